"""One process that is judged or measured: call it, and look at everything that the call left behind."""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shiplap.sampling.run import last_line, tensors
from shiplap.sandbox.outcome import Call, Expected, OutOfReach, Wrong, as_it_should_lie, of_a_process, short, text_of
from shiplap.sandbox.proc_filesystem import mapped
from shiplap.sandbox.protocol import Arena, describe, extent, identical, is_operator, places_of
from shiplap.sandbox.supervisor import Ended, Late, Prisoner, Took

__all__ = ["NO_ANSWER", "Call", "Expected", "OutOfReach", "Witness", "Wrong"]

NO_ANSWER = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError)
LEAST, MOST, ROOM = 5, 128, 64 << 20  # earlier calls whose results stay in use, and the bytes that these may take
SPREAD = 64  # a result may lie in memory with this many times its own length
PADDED = 256 << 20  # bytes, or in twice its own length if that is more


INTACT = (
    ("changed", "patched", "replaces"),
    ("looked", "source", "looks at its callers or at objects of others, or hides what it runs:"),
    ("left", "state", "leaves changed for its caller:"),
)


Spans: TypeAlias = list[tuple[int, bytearray]]  # addresses of results, and what lay there
Pieces: TypeAlias = list[tuple[int, int, int]]  # of the file with the arguments: address, bytes, offset


@dataclass(frozen=True)
class Given:
    """Arguments in a file that a process has mapped: its device and inode, and where in it the tensors lie."""

    file: tuple[int, int]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, handle: int, packed: Any) -> Given:
        stat = os.fstat(handle)
        return cls((stat.st_dev, stat.st_ino), tuple(places_of(packed)))


@dataclass(frozen=True)
class _Kept:
    """Results of one call, which are still in use, and the bytes of its arguments and results."""

    spans: Spans
    size: int


class Witness:
    """A prisoner with its target loaded."""

    def __init__(self, prisoner: Prisoner) -> None:
        self.prisoner = prisoner
        self.batches: set[int] = set()  # those that the process holds ready
        self._layout = 0
        self._given = Given((0, 0), ())
        self._earlier: deque[_Kept] = deque()

    def reach(self, device: str) -> None:
        """Raises OutOfReach where the process cannot use the device. Asked before anybody's code is loaded."""
        reply = self.request({"do": "device", "device": device})[0]
        if "error" in reply:
            raise OutOfReach(f"the sandboxed process cannot use {device}: {str(reply['error'])[:200]}")

    def load(self, order: Mapping[str, Any], init: Sequence[Any], state: Mapping[str, Tensor]) -> None:
        """Import the target. Raises Wrong when it cannot be imported."""
        arena = Arena()
        message = {"do": "load", **order, "init": arena.pack(list(init)), "state": arena.pack(dict(state))}
        reply = self._ask(message, arena)[0]
        if "error" in reply:
            raise Wrong("import", text_of(reply["error"])[:400])

    def _ask(self, message: dict[str, Any], arena: Arena) -> tuple[dict[str, Any], Took]:
        handle = arena.write()
        try:
            return self.request(message, handle)
        finally:
            os.close(handle)

    def request(self, message: dict[str, Any], handle: int = -1) -> tuple[dict[str, Any], Took]:
        """The reply to any message, and what it took. Raises Wrong when the process ended, and Late where its time is
        over.
        """
        try:
            return self.prisoner.ask(message, handle)
        except Late:
            raise
        except Ended as e:
            raise Wrong("process", str(e)) from None

    def ops(self, args: Sequence[Any], expected: Expected, *, trusted: bool = False) -> list[tuple[str, Any]] | str:
        """Name and shapes of each operator of the framework that a call runs; a text says why they are unknown.

        Raises Wrong for a call that computes something else than ``expected`` while its operators are listed, or that
        leaves something which could compute after the list has ended. Who is ``trusted`` may leave what he likes.
        """
        arena = Arena()
        reply = self._ask({"do": "ops", "args": arena.pack(list(args))}, arena)[0]
        if "error" in reply or not isinstance(reply.get("ops"), list):
            return text_of(reply.get("error", "no list"))[:200]
        if not trusted:
            of_a_process(reply)
        try:
            outs = len(expected.own) - len(expected.changed)
            got = self._results(reply.get("outs"), expected.own[:outs])[0]
        except NO_ANSWER as e:
            raise Wrong("answer", f"an answer that is not valid: {last_line(e)}"[:300]) from None
        if not expected.changed and (problem := expected.against(got).problem):
            raise Wrong("values", f"{problem}, while its operators are listed")
        if not all(map(is_operator, reply["ops"])):
            raise Wrong("answer", "a list of operators that is none")
        return [(o[0], o[1]) for o in reply["ops"]]

    def intact(self) -> None:
        """Raises Wrong where functions of Python, torch or ours were replaced, where threads of Python run, and for
        what the process was seen to do to its interpreter.
        """
        reply = self._ask({"do": "intact"}, Arena())[0]
        told = {name: reply.get(name, []) for name in ("changed", "looked", "left")}
        count = reply.get("threads")
        if not all(isinstance(v, list) for v in told.values()) or type(count) is not int:
            raise Wrong("answer", "an answer that is not valid")
        for name, check, text in INTACT:
            if told[name]:
                raise Wrong(check, f"it {text} {', '.join(short(v) for v in told[name][:5])}")
        if count > 0:
            raise Wrong("threads", "threads that it started run beside its calls")

    def call(self, args: Sequence[Any], expected: Expected | None = None, *, in_place: bool = False) -> Call:
        """Call it on these arguments, and compare what it did with ``expected``. Raises Wrong.

        ``in_place`` writes the arguments into the tensors of the last call, as if another library shared their memory.
        """
        if not in_place:
            self._layout = secrets.randbits(62)
        arena = Arena(self._layout)
        packed = arena.pack(list(args))
        handle = arena.write()
        if not in_place:
            self._given = Given.of(handle, packed)
        message = {"do": "call", "args": packed, "again": in_place, "keep": self._in_use()}
        try:
            reply, took = self.request(message, handle)
        finally:
            os.close(handle)
        if "error" in reply:
            raise Wrong("raised", text_of(reply["error"])[:400])
        if expected is not None:
            of_a_process(reply)
        try:
            if expected is None:  # it keeps as much alive as one whose results are looked at
                self._earlier.append(_Kept([], _size(args)))
            error = self.examine(reply, args, expected, self._given) if expected is not None else 0.0
            spent, late = float(reply["spent"]), float(reply.get("late", 0))
            device = float(reply.get("device", spent))
            if not all(0 <= each < 1e15 for each in (spent, device, late)):
                raise ValueError("a time that is none")
            return Call(took.wall, took.quiet, device * 1e-9, late * 1e-9, error)
        except Wrong:
            self.forget()  # the process keeps some results alive, and has let go of the oldest for this one
            raise
        except NO_ANSWER as e:
            raise Wrong("answer", f"an answer that is not valid: {last_line(e)}"[:300]) from None

    def gradients(
        self, args: Sequence[Any], seeds: Sequence[Tensor], like: Sequence[Tensor], parameters: Sequence[str] = ()
    ) -> list[Tensor]:
        """Gradients of the floating arguments, as the candidate computes them, and of its parameters of these names if
        it has all of them. Raises Wrong.
        """
        arena = Arena()
        message = {"do": "gradients", "args": arena.pack(list(args)), "seeds": arena.pack(list(seeds))}
        reply = self._ask({**message, "parameters": list(parameters)}, arena)[0]
        if reply.get("parameters") is not True:
            like = like[: len(like) - len(parameters)]
        if "error" in reply:
            raise Wrong("gradients", text_of(reply["error"])[:400])
        try:
            return self._results(reply.get("outs"), like)[0]
        except NO_ANSWER as e:
            raise Wrong("answer", f"an answer that is not valid: {last_line(e)}"[:300]) from None

    def renew(self, state: Mapping[str, Tensor]) -> bool:
        """Give its parameters these values. False if it has no parameters of all these names."""
        arena = Arena()
        reply = self._ask({"do": "state", "state": arena.pack(dict(state))}, arena)[0]
        if "error" in reply:
            raise Wrong("parameters", text_of(reply["error"])[:400])
        return reply.get("ok") is True

    def state(self, names: Mapping[str, Tensor]) -> list[Tensor]:
        """What its module keeps under these names. Raises Wrong."""
        if not names:
            return []
        reply = self._ask({"do": "kept", "names": list(names)}, Arena())[0]
        if "error" in reply:
            raise Wrong("state", text_of(reply["error"])[:400])
        try:
            return self._results(reply.get("outs"), list(names.values()))[0]
        except NO_ANSWER as e:
            raise Wrong("answer", f"an answer that is not valid: {last_line(e)}"[:300]) from None

    @property
    def kept(self) -> tuple[int, int]:
        """How many calls the process was asked to keep, each in an open file, and the bytes of these."""
        return len(self._earlier), sum(call.size for call in self._earlier)

    def forget(self) -> None:
        """The results of earlier calls are not in use any more."""
        self._earlier.clear()

    def _in_use(self) -> int:
        """How many of the last calls have results that stay in use: a consumer may hold as many as memory allows."""
        sizes, kept = 0, 0
        for call in reversed(self._earlier):
            sizes += call.size
            if kept >= MOST or (kept >= LEAST and sizes > ROOM):
                break
            kept += 1
        while len(self._earlier) > kept:
            self._earlier.popleft()
        return kept

    def pieces(self, at: Given) -> Pieces:
        """Where the process has mapped its arguments. Raises Wrong."""
        try:
            pieces = sorted(mapped(self.prisoner.pid, at.file), key=lambda piece: piece[2])
        except OSError as e:
            raise Wrong("memory", f"its memory cannot be looked at: {e.strerror or e}") from None
        if any(a[2] + a[1] > b[2] for a, b in pairwise(pieces)):
            raise Wrong("arguments", "it maps its arguments a second time")
        return pieces

    def examine(
        self,
        reply: Mapping[str, Any],
        args: Sequence[Any],
        expected: Expected,
        at: Given,
        pieces: Pieces | None = None,
    ) -> float:
        """Read what a call did, and compare it: how far it is off. Raises Wrong, or one of ``NO_ANSWER``.

        ``pieces``: for one of the calls of a batch, where the arguments of all are mapped. All of them have returned
        before any is looked at, so that nothing can have changed since another was.
        """
        given = tensors(args)
        outs = len(expected.own) - len(expected.changed)
        as_it_should_lie(reply, expected)
        got, spans = self._results(reply["outs"], expected.own[:outs])
        places = self._places(reply, given, at, pieces)
        after = self._arguments(places, given)
        self._disjoint(spans, places, expected)
        for number, (now, before) in enumerate(zip(after, given, strict=True)):
            if number not in expected.changed and not identical(now, before):
                raise Wrong("arguments", f"it changes tensor argument {number}, which the reference leaves as it is")
        difference = expected.against([*got, *(after[i] for i in expected.changed)])
        if difference.problem:
            raise Wrong("values", difference.problem)
        if pieces is None:
            self._unchanged()
        self._earlier.append(_Kept(spans, _size(args) + sum(len(content) for _, content in spans)))
        return difference.error

    def _places(
        self, reply: Mapping[str, Any], given: Sequence[Tensor], at: Given, pieces: Pieces | None
    ) -> list[Mapping[str, Any]]:
        """Where the arguments lie: on a CPU by the map of the process's memory, and not by what it says."""
        if any(t.device.type != "cpu" for t in given):
            return [p["tensor"] for p in reply["args"] if "tensor" in p]
        pieces = self.pieces(at) if pieces is None else pieces
        places: list[Mapping[str, Any]] = []
        for offset, t in zip(at.offsets, given, strict=True):
            length = extent(t.shape, t.stride()) * t.itemsize
            addresses = [a + offset - o for a, size, o in pieces if o <= offset < o + size]
            if length and not addresses:
                raise Wrong("arguments", "its arguments are not where they were put")
            places.append({**describe(t), "at": addresses[0] if addresses else 0, "bytes": length})
        return places

    def _results(self, told: Any, like: Sequence[Tensor]) -> tuple[list[Tensor], Spans]:
        if not isinstance(told, list) or len(told) != len(like):
            raise Wrong("results", f"{len(told) if isinstance(told, list) else 'no'} results, expected {len(like)}")
        got, spans = [], []
        for number, (place, expected) in enumerate(zip(told, like, strict=True)):
            if "foreign" in place:
                raise Wrong("results", f"result {number} is a {str(place['foreign'])[:60]}, and no plain tensor")
            if "tensor" not in place:
                value = float.fromhex(place["float"]) if "float" in place else place["plain"]
                got.append(torch.tensor(value, device=expected.device))
                continue
            t, content = self._tensor(number, place["tensor"], expected)
            got.append(t)
            spans.append((int(place["tensor"]["at"]), content))
        return got, spans

    def _tensor(self, number: int, told: Mapping[str, Any], like: Tensor) -> tuple[Tensor, bytearray]:
        shape, stride, dtype = list(told["shape"]), list(told["stride"]), str(told["dtype"])
        wanted = describe(like)
        if shape != wanted["shape"] or dtype != wanted["dtype"]:
            raise Wrong("results", f"result {number}: {dtype}{shape}, expected {wanted['dtype']}{wanted['shape']}")
        if len(stride) != len(shape) or any(type(s) is not int or s < 0 for s in stride):
            raise Wrong("results", f"result {number}: strides {stride}")
        length = extent(shape, stride)
        widest = max(2 * like.numel(), PADDED // like.itemsize)  # nobody makes the referee read without end
        if length > min(SPREAD * like.numel() + 4096, widest):
            raise Wrong("results", f"result {number}: strides {stride} for {shape}")
        if not length:
            return torch.empty(like.shape, dtype=like.dtype, device=like.device), bytearray()
        content = self._read(int(told["at"]), length * like.itemsize)
        flat = torch.frombuffer(content, dtype=like.dtype).to(like.device)
        return flat.as_strided(shape, stride), content

    def _read(self, address: int, length: int) -> bytearray:
        try:
            return self.prisoner.read(address, length)
        except OSError as e:
            raise Wrong("memory", f"its results cannot be read: {e.strerror or e}") from None

    def _arguments(self, places: Sequence[Mapping[str, Any]], given: Sequence[Tensor]) -> list[Tensor]:
        """What the tensor arguments hold after the call."""
        if len(places) != len(given):
            raise Wrong("answer", "its arguments are not those that it was given")
        return [self._tensor(-1, p, t)[0] for p, t in zip(places, given, strict=True)]

    def _disjoint(self, spans: Spans, places: list[Mapping[str, Any]], expected: Expected) -> None:
        """Results lie neither in an argument nor in an earlier result."""
        taken = [] if expected.aliased else [(int(p["at"]), int(p["bytes"]), "an argument") for p in places]
        still = "an earlier result, which is still in use"
        taken += [(at, len(content), still) for call in self._earlier for at, content in call.spans]
        for at, content in spans:
            for start, length, what in taken:
                if at < start + length and start < at + len(content):
                    raise Wrong("aliases", f"a result shares memory with {what}")

    def _unchanged(self) -> None:
        """Results of earlier calls are what they were."""
        for call in self._earlier:
            for at, content in call.spans:
                if content and self._read(at, len(content)) != content:
                    raise Wrong("results", "a result changed after the call that returned it")


def _size(args: Sequence[Any]) -> int:
    return sum(t.numel() * t.itemsize for t in tensors(args))
