"""Calls into a sandboxed process, and the checks of all effects of a call."""

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

from shiplap.sampling.run import error_line, tensors_among
from shiplap.sandbox.outcome import (
    CallOutcome,
    CandidateError,
    DeviceUnavailable,
    ExpectedEffects,
    check_process_state,
    check_result_layout,
    error_text,
    shorten_name,
)
from shiplap.sandbox.proc_filesystem import find_mapped_pieces
from shiplap.sandbox.protocol import (
    ArgumentArena,
    bits_are_equal,
    describe_tensor,
    is_operator_record,
    packed_offsets,
    strided_extent,
)
from shiplap.sandbox.supervisor import ProcessEnded, RequestTime, SandboxedProcess, Timeout

__all__ = [
    "INVALID_REPLY_ERRORS",
    "CallOutcome",
    "CandidateError",
    "DeviceUnavailable",
    "ExpectedEffects",
    "TargetProcess",
]

INVALID_REPLY_ERRORS = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError)
# Calls whose results stay in use: at least, at most, and their bytes.
LEAST, MOST, ROOM = 5, 128, 64 << 20
MAX_RESULT_SPREAD = 64  # the greatest span in memory of a result, as a multiple of its elements
MAX_PADDED_BYTES = 256 << 20  # bytes of that span; twice the length of the result if that is more


# Key of the reply, name of the check, and text of the fault.
INTACT_CHECKS = (
    ("changed", "patched", "replaces"),
    ("looked", "source", "looks at its callers or at objects of others, or hides what it runs:"),
    ("left", "state", "leaves changed for its caller:"),
)


ResultSpans: TypeAlias = list[tuple[int, bytearray]]  # addresses of results, and their bytes
MappedPieces: TypeAlias = list[tuple[int, int, int]]  # mapped parts of the file of arguments: address, bytes, offset


@dataclass(frozen=True)
class MappedArguments:
    """Arguments in a file that a process has mapped: the device and inode of the file, and the
    offsets of the tensors.
    """

    file: tuple[int, int]
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, handle: int, packed: Any) -> MappedArguments:
        """Return the arguments with the description ``packed`` in the file of ``handle``."""
        stat = os.fstat(handle)
        return cls((stat.st_dev, stat.st_ino), tuple(packed_offsets(packed)))


@dataclass(frozen=True)
class _KeptResults:
    """The results of one call that stay in use, and the bytes of its arguments and results."""

    spans: ResultSpans
    size: int


class TargetProcess:
    """A sandboxed process in which a target is loaded."""

    def __init__(self, prisoner: SandboxedProcess) -> None:
        self.prisoner = prisoner
        self.batches: set[int] = set()  # numbers of the batches that the process has prepared
        self._layout = 0
        self._given = MappedArguments((0, 0), ())
        self._earlier: deque[_KeptResults] = deque()

    def check_device(self, device: str) -> None:
        """Raise OutOfReach if the process cannot use the device. Call this before any code of a target is loaded."""
        reply = self.request({"do": "device", "device": device})[0]
        if "error" in reply:
            raise DeviceUnavailable(f"the sandboxed process cannot use {device}: {str(reply['error'])[:200]}")

    def load(self, order: Mapping[str, Any], init: Sequence[Any], state: Mapping[str, Tensor]) -> None:
        """Import the target in the process. Raises Wrong if that fails."""
        arena = ArgumentArena()
        message = {"do": "load", **order, "init": arena.pack(list(init)), "state": arena.pack(dict(state))}
        reply = self._request_with_arena(message, arena)[0]
        if "error" in reply:
            raise CandidateError("import", error_text(reply["error"])[:400])

    def _request_with_arena(self, message: dict[str, Any], arena: ArgumentArena) -> tuple[dict[str, Any], RequestTime]:
        """Return the reply to a message whose arguments lie in ``arena``, and the time."""
        handle = arena.write()
        try:
            return self.request(message, handle)
        finally:
            os.close(handle)

    def request(self, message: dict[str, Any], handle: int = -1) -> tuple[dict[str, Any], RequestTime]:
        """Return the reply to any message, and the time. Raises Wrong if the process ended, and
        Late at its deadline.
        """
        try:
            return self.prisoner.request_reply(message, handle)
        except Timeout:
            raise
        except ProcessEnded as e:
            raise CandidateError("process", str(e)) from None

    def list_operators(
        self, args: Sequence[Any], expected: ExpectedEffects, *, trusted: bool = False
    ) -> list[tuple[str, Any]] | str:
        """Return the name and shapes of each operator of torch that a call runs, or a text that says why not.

        Raises Wrong for a call whose results differ from ``expected`` while operators are listed, and for a call that
        leaves something behind which could compute later. The latter is not checked for a ``trusted`` target.
        """
        arena = ArgumentArena()
        reply = self._request_with_arena({"do": "ops", "args": arena.pack(list(args))}, arena)[0]
        if "error" in reply or not isinstance(reply.get("ops"), list):
            return error_text(reply.get("error", "no list"))[:200]
        if not trusted:
            check_process_state(reply)
        try:
            outs = len(expected.own) - len(expected.changed)
            got = self._results(reply.get("outs"), expected.own[:outs])[0]
        except INVALID_REPLY_ERRORS as e:
            raise CandidateError("answer", f"an answer that is not valid: {error_line(e)}"[:300]) from None
        if not expected.changed and (problem := expected.against(got).problem):
            raise CandidateError("values", f"{problem}, while its operators are listed")
        if not all(map(is_operator_record, reply["ops"])):
            raise CandidateError("answer", "a list of operators that is none")
        return [(o[0], o[1]) for o in reply["ops"]]

    def check_interpreter(self) -> None:
        """Raise Wrong for patched functions, for other threads, and for changes of the state of the interpreter."""
        reply = self._request_with_arena({"do": "intact"}, ArgumentArena())[0]
        told = {name: reply.get(name, []) for name in ("changed", "looked", "left")}
        count = reply.get("threads")
        if not all(isinstance(v, list) for v in told.values()) or type(count) is not int:
            raise CandidateError("answer", "an answer that is not valid")
        for name, check, text in INTACT_CHECKS:
            if told[name]:
                raise CandidateError(check, f"it {text} {', '.join(shorten_name(v) for v in told[name][:5])}")
        if count > 0:
            raise CandidateError("threads", "threads that it started run beside its calls")

    def call(
        self, args: Sequence[Any], expected: ExpectedEffects | None = None, *, in_place: bool = False
    ) -> CallOutcome:
        """Call the target on these arguments, and compare the effects with ``expected``. Raises Wrong.

        With ``in_place``, the values are written into the tensors of the last call, as another library that shares
        their memory would do.
        """
        if not in_place:
            self._layout = secrets.randbits(62)
        # A layout of its own for each call: addresses say nothing about values.
        arena = ArgumentArena(self._layout)
        packed = arena.pack(list(args))
        handle = arena.write()
        if not in_place:
            self._given = MappedArguments.of(handle, packed)
        message = {"do": "call", "args": packed, "again": in_place, "keep": self._in_use()}
        try:
            reply, took = self.request(message, handle)
        finally:
            os.close(handle)
        if "error" in reply:
            raise CandidateError("raised", error_text(reply["error"])[:400])
        if expected is not None:
            check_process_state(reply)
        try:
            if expected is None:  # the process keeps as much as in a call that is compared
                self._earlier.append(_KeptResults([], _argument_bytes(args)))
            error = self.examine(reply, args, expected, self._given) if expected is not None else 0.0
            spent, late = float(reply["spent"]), float(reply.get("late", 0))
            device = float(reply.get("device", spent))
            # NaN fails this comparison as well.
            if not all(0 <= each < 1e15 for each in (spent, device, late)):
                raise ValueError("a time that is none")
            return CallOutcome(took.wall, took.quiet, device * 1e-9, late * 1e-9, error)
        except CandidateError:
            self.forget_results()  # its list of kept results no longer matches this one
            raise
        except INVALID_REPLY_ERRORS as e:
            raise CandidateError("answer", f"an answer that is not valid: {error_line(e)}"[:300]) from None

    def gradients(
        self, args: Sequence[Any], seeds: Sequence[Tensor], like: Sequence[Tensor], parameters: Sequence[str] = ()
    ) -> list[Tensor]:
        """Return the candidate's gradients of floating arguments, and of these parameters if it has them all.

        Raises Wrong.
        """
        arena = ArgumentArena()
        message = {"do": "gradients", "args": arena.pack(list(args)), "seeds": arena.pack(list(seeds))}
        reply = self._request_with_arena({**message, "parameters": list(parameters)}, arena)[0]
        if reply.get("parameters") is not True:
            like = like[: len(like) - len(parameters)]
        if "error" in reply:
            raise CandidateError("gradients", error_text(reply["error"])[:400])
        try:
            return self._results(reply.get("outs"), like)[0]
        except INVALID_REPLY_ERRORS as e:
            raise CandidateError("answer", f"an answer that is not valid: {error_line(e)}"[:300]) from None

    def renew(self, state: Mapping[str, Tensor]) -> bool:
        """Load these values into the parameters of the target. Return False if it lacks one of the names."""
        arena = ArgumentArena()
        reply = self._request_with_arena({"do": "state", "state": arena.pack(dict(state))}, arena)[0]
        if "error" in reply:
            raise CandidateError("parameters", error_text(reply["error"])[:400])
        return reply.get("ok") is True

    def read_module_state(self, names: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the entries of the module's state with these names. Raises Wrong."""
        if not names:
            return []
        reply = self._request_with_arena({"do": "kept", "names": list(names)}, ArgumentArena())[0]
        if "error" in reply:
            raise CandidateError("state", error_text(reply["error"])[:400])
        try:
            return self._results(reply.get("outs"), list(names.values()))[0]
        except INVALID_REPLY_ERRORS as e:
            raise CandidateError("answer", f"an answer that is not valid: {error_line(e)}"[:300]) from None

    @property
    def kept(self) -> tuple[int, int]:
        """The number of files and the bytes that the process keeps on request."""
        return len(self._earlier), sum(call.size for call in self._earlier)

    def forget_results(self) -> None:
        """Drop all earlier results, so that the process releases them with the next call."""
        self._earlier.clear()

    def _in_use(self) -> int:
        """Return the number of last calls whose results stay in use.

        A program may hold as many results as memory allows, so more are kept where they are small.
        """
        sizes, kept = 0, 0
        for call in reversed(self._earlier):
            sizes += call.size
            if kept >= MOST or (kept >= LEAST and sizes > ROOM):
                break
            kept += 1
        while len(self._earlier) > kept:
            self._earlier.popleft()
        return kept

    def pieces(self, at: MappedArguments) -> MappedPieces:
        """Return the memory in which the process has mapped its arguments, in order of the offset. Raises Wrong."""
        try:
            pieces = sorted(find_mapped_pieces(self.prisoner.pid, at.file), key=lambda piece: piece[2])
        except OSError as e:
            raise CandidateError("memory", f"its memory cannot be looked at: {e.strerror or e}") from None
        # With two mappings, a write through one would not show in the other address.
        if any(a[2] + a[1] > b[2] for a, b in pairwise(pieces)):
            raise CandidateError("arguments", "it maps its arguments a second time")
        return pieces

    def examine(
        self,
        reply: Mapping[str, Any],
        args: Sequence[Any],
        expected: ExpectedEffects,
        at: MappedArguments,
        pieces: MappedPieces | None = None,
    ) -> float:
        """Read the effects of a call and compare them. Return the error in units of the tolerance.

        Raises Wrong, or one of ``INVALID_REPLY_ERRORS``. ``pieces`` is the mapped memory for one call of a batch. All
        calls of a batch have returned before the first is examined, so earlier results cannot have changed in between
        and are not compared again.
        """
        given = tensors_among(args)
        outs = len(expected.own) - len(expected.changed)
        check_result_layout(reply, expected)
        got, spans = self._results(reply["outs"], expected.own[:outs])
        places = self._places(reply, given, at, pieces)
        after = self._arguments(places, given)
        self._check_aliases(spans, places, expected)
        for number, (now, before) in enumerate(zip(after, given, strict=True)):
            if number not in expected.changed and not bits_are_equal(now, before):
                raise CandidateError(
                    "arguments", f"it changes tensor argument {number}, which the reference leaves as it is"
                )
        difference = expected.against([*got, *(after[i] for i in expected.changed)])
        if difference.problem:
            raise CandidateError("values", difference.problem)
        if pieces is None:
            self._check_earlier_results()
        self._earlier.append(_KeptResults(spans, _argument_bytes(args) + sum(len(content) for _, content in spans)))
        return difference.error

    def _places(
        self, reply: Mapping[str, Any], given: Sequence[Tensor], at: MappedArguments, pieces: MappedPieces | None
    ) -> list[Mapping[str, Any]]:
        """Return the locations of the arguments. On a CPU they come from the kernel's map of the process's memory.

        The process could report a copy of the arguments instead of those that it changed.
        """
        if any(t.device.type != "cpu" for t in given):
            return [p["tensor"] for p in reply["args"] if "tensor" in p]
        pieces = self.pieces(at) if pieces is None else pieces
        places: list[Mapping[str, Any]] = []
        for offset, t in zip(at.offsets, given, strict=True):
            length = strided_extent(t.shape, t.stride()) * t.itemsize
            addresses = [a + offset - o for a, size, o in pieces if o <= offset < o + size]
            if length and not addresses:
                raise CandidateError("arguments", "its arguments are not where they were put")
            places.append({**describe_tensor(t), "at": addresses[0] if addresses else 0, "bytes": length})
        return places

    def _results(self, told: Any, like: Sequence[Tensor]) -> tuple[list[Tensor], ResultSpans]:
        """Return the results at the reported locations, and their bytes. Raises Wrong for other kinds of results."""
        if not isinstance(told, list) or len(told) != len(like):
            raise CandidateError(
                "results", f"{len(told) if isinstance(told, list) else 'no'} results, expected {len(like)}"
            )
        got, spans = [], []
        for number, (place, expected) in enumerate(zip(told, like, strict=True)):
            if "foreign" in place:
                raise CandidateError(
                    "results", f"result {number} is a {str(place['foreign'])[:60]}, and no plain tensor"
                )
            if "tensor" not in place:
                value = float.fromhex(place["float"]) if "float" in place else place["plain"]
                got.append(torch.tensor(value, device=expected.device))
                continue
            t, content = self._tensor(number, place["tensor"], expected)
            got.append(t)
            spans.append((int(place["tensor"]["at"]), content))
        return got, spans

    def _tensor(self, number: int, told: Mapping[str, Any], like: Tensor) -> tuple[Tensor, bytearray]:
        """Return one tensor read from the process, and its bytes. Raises Wrong for another shape, dtype or stride."""
        shape, stride, dtype = list(told["shape"]), list(told["stride"]), str(told["dtype"])
        wanted = describe_tensor(like)
        if shape != wanted["shape"] or dtype != wanted["dtype"]:
            raise CandidateError(
                "results", f"result {number}: {dtype}{shape}, expected {wanted['dtype']}{wanted['shape']}"
            )
        if len(stride) != len(shape) or any(type(s) is not int or s < 0 for s in stride):
            raise CandidateError("results", f"result {number}: strides {stride}")
        length = strided_extent(shape, stride)
        # A limit on the bytes that a candidate can make this process read.
        widest = max(2 * like.numel(), MAX_PADDED_BYTES // like.itemsize)
        if length > min(MAX_RESULT_SPREAD * like.numel() + 4096, widest):
            raise CandidateError("results", f"result {number}: strides {stride} for {shape}")
        if not length:
            return torch.empty(like.shape, dtype=like.dtype, device=like.device), bytearray()
        content = self._read(int(told["at"]), length * like.itemsize)
        flat = torch.frombuffer(content, dtype=like.dtype).to(like.device)
        return flat.as_strided(shape, stride), content

    def _read(self, address: int, length: int) -> bytearray:
        """Return bytes of the process's memory. Raises Wrong where it cannot be read."""
        try:
            return self.prisoner.read(address, length)
        except OSError as e:
            raise CandidateError("memory", f"its results cannot be read: {e.strerror or e}") from None

    def _arguments(self, places: Sequence[Mapping[str, Any]], given: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensor arguments as they are after the call."""
        if len(places) != len(given):
            raise CandidateError("answer", "its arguments are not those that it was given")
        return [self._tensor(-1, p, t)[0] for p, t in zip(places, given, strict=True)]

    def _check_aliases(self, spans: ResultSpans, places: list[Mapping[str, Any]], expected: ExpectedEffects) -> None:
        """Raise Wrong if a result shares memory with an argument or with an earlier result."""
        taken = [] if expected.aliased else [(int(p["at"]), int(p["bytes"]), "an argument") for p in places]
        still = "an earlier result, which is still in use"
        taken += [(at, len(content), still) for call in self._earlier for at, content in call.spans]
        for at, content in spans:
            for start, length, what in taken:
                if at < start + length and start < at + len(content):
                    raise CandidateError("aliases", f"a result shares memory with {what}")

    def _check_earlier_results(self) -> None:
        """Raise Wrong if the result of an earlier call has changed."""
        for call in self._earlier:
            for at, content in call.spans:
                if content and self._read(at, len(content)) != content:
                    raise CandidateError("results", "a result changed after the call that returned it")


def _argument_bytes(args: Sequence[Any]) -> int:
    """Return the bytes of all tensors among the arguments."""
    return sum(t.numel() * t.itemsize for t in tensors_among(args))
