"""Calls into a sandboxed process, one by one or in batches, and the checks of all effects of a call."""

from __future__ import annotations

import errno
import os
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from shiplap.errors import error_line
from shiplap.sampling.case import tensors_among
from shiplap.sampling.compare import Difference
from shiplap.sandbox import kept_results, protocol
from shiplap.sandbox.arguments import ArgumentArena, MappedArguments, packed_locations, packed_tensor
from shiplap.sandbox.device_memory import DeviceBlock, DeviceError, OpenedAllocations, lies_on_device
from shiplap.sandbox.equal_bits import bits_are_equal
from shiplap.sandbox.kept_results import KeptResults, ResultSpan, ResultSpans, all_are_equal, argument_bytes
from shiplap.sandbox.machine_lack import find_lack
from shiplap.sandbox.proc_filesystem import OversizedMemoryMap, RequestTime, find_mapped_pieces
from shiplap.sandbox.protocol import Place, Reply, Request, TensorLocation, printable_text, strided_extent
from shiplap.sandbox.request_errors import ProcessEnded, RequestFailed, Timeout, UnsupportedArguments
from shiplap.sandbox.strided_memory import elements_overlap
from shiplap.sandbox.supervisor import LACKS, SandboxedProcess

INVALID = (TypeError, ValueError, OverflowError, RuntimeError)  # errors of torch for results that do not fit
# Calls whose results stay in use: at least, at most, and their bytes.
LEAST, LEAST_LARGE, MOST, ROOM, HUGE = 5, 2, 128, 64 << 20, 4 << 30
COMPARED_BYTES = 1 << 20  # bytes of a result that are read at once to be compared again, which stay in the caches
MAX_RESULT_SPREAD = 64  # the greatest span in memory of a result, as a multiple of its elements
MAX_PADDED_BYTES = 256 << 20  # bytes of that span; twice the length of the result if that is more
ReplyT = TypeVar("ReplyT", bound=Reply)
MappedPieces: TypeAlias = list[tuple[int, int, int]]  # mapped parts of the file of arguments: address, bytes, offset
Waiting: TypeAlias = Callable[[float], None] | None  # called with the seconds waited so far


class CandidateError(Exception):
    """An error that names a fault of a candidate, the code under test. It has the name of the failed ``check``, a text
    as ``evidence``, and the index of the ``call`` in its batch, or -1 outside a batch.
    """

    def __init__(self, check: str, evidence: str, call: int = -1) -> None:
        """Make the error with the failed check, the evidence, and the number of the call in its batch."""
        super().__init__(printable_text(evidence))
        self.check, self.evidence, self.call = check, printable_text(evidence), call


class MachineLack(CandidateError):
    """An error for a request to a sandboxed process that failed because the machine lacks a resource, such as memory,
    open files or disk space. The candidate is not at fault.
    """

    def __init__(self, evidence: str) -> None:
        """Make the error. ``evidence`` says which resource the machine lacks."""
        super().__init__("machine", evidence)


class DeviceUnavailable(Exception):
    """Raised if a sandboxed process cannot use the accelerator. The candidate is not at fault."""


@dataclass(frozen=True)
class ExpectedEffects:
    """The effects of the reference on one draw of arguments, ``own``. They are its results, then the new values of the
    arguments that it changes. ``against`` is a function that returns the difference of other effects from these.
    ``changed`` has the indices of the tensor arguments that the reference changes. ``aliased`` says whether a result
    may share memory with an argument, and ``overlapping`` whether two elements of results may share memory.
    ``nested`` is the nesting of containers around the results (see ``structure_of``), or an empty string if it is not
    compared. ``altered`` has the changes of arguments beside their values (see ``changed_facts``).
    """

    own: Sequence[Tensor]
    against: Callable[[Sequence[Tensor]], Difference]
    changed: tuple[int, ...] = ()
    aliased: bool = False
    nested: str = ""
    overlapping: bool = True
    altered: Sequence[str] = ()


@dataclass(frozen=True)
class CallOutcome:
    """The times and the error of one call. ``wall`` and ``quiet`` are seconds by the clock of the process that judges
    (see ``RequestTime``). ``spent`` are the seconds that the sandboxed process reports, by its own clock or by events
    of the GPU. ``written`` is the part of ``wall`` in which the process that judges wrote arguments to a GPU. ``late``
    are the seconds for which other streams of a GPU worked after the call's own stream was done. ``error`` is the
    largest error of a result in units of the tolerance.
    """

    wall: float
    quiet: float
    spent: float
    late: float
    error: float = 0.0
    written: float = 0.0


def check_process_state(traces: protocol.CallTraces, allowed: Sequence[str] = ()) -> None:
    """Raise ``CandidateError`` if a call's ``traces`` show unfinished GPU work, changed settings, running threads, or
    changes of arguments beside their values that are not in ``allowed``.
    """
    if traces.raced:
        raise CandidateError("streams", "a result was not complete when the call's own stream was done")
    if left := [*traces.left, *(change for change in traces.altered if change not in allowed)]:
        raise CandidateError("state", f"it leaves changed between its calls: {left}"[:300])
    if traces.threads:
        raise CandidateError("threads", "threads that it started run between its calls")


def check_result_layout(reply: protocol.CallPlaces, expected: ExpectedEffects) -> None:
    """Raise ``CandidateError`` if the results are nested otherwise than in ``expected.nested``, or if elements of one
    result or of two share memory without ``expected.overlapping``. An empty ``expected.nested`` allows any nesting.
    """
    lies = reply.structure  # calls of a batch do not report it
    if expected.nested and lies is not None and lies != expected.nested:
        raise CandidateError("results", f"results that lie as {lies[:80]}, expected {expected.nested[:80]}")
    for number, place in enumerate(reply.outs[: 0 if expected.overlapping else len(expected.own)]):  # not thousands
        if isinstance(place, TensorLocation) and elements_overlap(place.shape, place.stride):
            raise CandidateError("results", f"elements of result {number} lie in the same place")
    if not expected.overlapping and (shared := kept_results.find_shared_result(reply.outs, expected.own)) >= 0:
        raise CandidateError("aliases", f"result {shared} shares memory with another result")


class TargetProcess:
    """A sandboxed process in which a target is loaded. A target is the code under test or its reference. ``declines``
    says whether the target may decline arguments, as a kernel in ``sl.tune`` may.
    """

    def __init__(self, prisoner: SandboxedProcess, *, declines: bool = False) -> None:
        """Wrap a sandboxed process. The target may refuse arguments only if ``declines`` is true."""
        self.prisoner, self.declines = prisoner, declines
        self.batches: set[int] = set()  # numbers of the batches that the process has prepared
        self.opened = OpenedAllocations()
        self.block: DeviceBlock | None = None  # of the arguments on a GPU that were sent last
        self._layout = 0
        self._given: MappedArguments | None = None
        self._earlier: deque[KeptResults] = deque()

    def check_device(self, device: str) -> None:
        """Raise ``DeviceUnavailable`` if the process cannot use ``device``, such as ``"cuda"``, or if memory of the
        device that both processes share has other values in one of them. Call this method before ``load``.
        """
        number, arena = torch.tensor([secrets.randbits(40)], device=device), ArgumentArena()
        try:
            reply = self._request_with_arena(protocol.CheckDevice(arena.pack([number])), arena, "device")
            same = torch.equal(self._read_results(reply.outs, [number])[0], number + 1)
        except (CandidateError, RuntimeError) as e:  # of the driver, of its memory, or of another device than the first
            raise DeviceUnavailable(f"the sandboxed process cannot use {device}: {str(e)[:200]}") from None
        if not same:
            raise DeviceUnavailable(f"memory of {device} that two processes share shows other values in one of them")

    def load(self, target: protocol.LoadTarget, arena: ArgumentArena, waiting: Waiting = None) -> None:
        """Import ``target``, whose arguments lie in ``arena``. ``waiting`` and the errors are those of ``request``."""
        self._request_with_arena(target, arena, "import", waiting)

    def _request_with_arena(
        self, message: Request[ReplyT], arena: ArgumentArena, check: str, waiting: Waiting = None
    ) -> ReplyT:
        """Send ``message``, whose arguments lie in ``arena``, and return the reply. ``check`` is the name of the check
        that fails if the process reports an error. The errors raised and ``waiting`` are those of ``request``.
        """
        handle = arena.write()
        try:
            return self.request(message, check, *arena.files(handle), waiting=waiting)[0]
        finally:
            self.use_block(arena.block)
            os.close(handle)

    def end(self) -> None:
        """Kill the process, and unmap all memory that it shares with this one."""
        self.prisoner.kill()
        self.forget_results()
        self.use_block(None)

    def use_block(self, block: DeviceBlock | None) -> None:
        """Store ``block``, the GPU memory of the last arguments, or None. Unmap the block that was stored before."""
        before, self.block = self.block, block  # at once: another thread may end the process meanwhile
        if before is not None and before is not block:
            # Queued kernels may still use the memory that is unmapped here.
            before.driver.synchronize()
            before.close()
            before.driver.release_retired()
        if block is not None:
            block.close_file()

    def request(
        self,
        message: Request[ReplyT],
        check: str = "raised",
        *files: int,
        waiting: Waiting = None,
    ) -> tuple[ReplyT, RequestTime]:
        """Send ``message`` and the descriptors ``files``. Return the reply and the time of the request. ``waiting`` is
        called meanwhile with the seconds waited so far. Raise ``CandidateError`` if the process reports an error (with
        ``check``) or ends (with ``process``), ``MachineLack`` if a resource lacks, ``Timeout`` if the budget ends, and
        ``UnsupportedArguments`` if the target may decline arguments and does.
        """
        if self.block is not None:
            self.block.driver.leave_room()
        try:
            return self.prisoner.request_reply(message, *files, waiting=waiting)
        except Timeout:
            raise
        except ProcessEnded as e:
            raise MachineLack(str(e)) if e.lack else CandidateError("process", str(e)) from None
        except RequestFailed as e:
            lack = find_lack(str(e), self.prisoner)
            raise MachineLack(lack) if lack else CandidateError(check, str(e)) from None
        except UnsupportedArguments as e:
            if self.declines:
                raise
            raise CandidateError("answer", f"it declines arguments, which nobody may: {e}") from None

    def list_operators(
        self, args: Sequence[Any], expected: ExpectedEffects, *, trusted: bool = False
    ) -> list[protocol.OperatorUse] | str:
        """Run one call of the target on ``args``. Return the torch operators that it runs, or a string that says why
        they cannot be listed. Raise ``CandidateError`` if the results differ from ``expected``. Unless ``trusted`` is
        true, raise it also if the call leaves threads, changed settings or GPU work behind.
        """
        arena = ArgumentArena()
        try:
            reply = self._request_with_arena(protocol.ListOperators(arena.pack(list(args))), arena, "operators")
        except CandidateError as e:
            if e.check != "operators":
                raise
            return e.evidence[:200]
        if not trusted:
            check_process_state(reply.traces)
        outs = len(expected.own) - len(expected.changed)
        got = self._read_results(reply.outs, expected.own[:outs])
        if not expected.changed and (problem := _compare(expected, got).problem):
            raise CandidateError("values", f"{problem}, while its operators are listed")
        return reply.operators

    def check_interpreter(self) -> None:
        """Raise ``CandidateError`` if the code under test has replaced functions of Python or torch, read frames or
        objects of other code, changed settings of the interpreter, or left threads running.
        """
        seen = self.request(protocol.Inspect())[0]
        for names, check, text in (
            (seen.changed, "patched", "replaces"),
            (seen.looked, "source", "looks at its callers or at objects of others, or hides what it runs:"),
            (seen.left, "state", "leaves changed for its caller:"),
        ):
            if names:
                raise CandidateError(check, f"it {text} {', '.join(name[:80] for name in names[:5])}")
        if seen.threads > 0:
            raise CandidateError("threads", "threads that it started run beside its calls")

    def call(
        self,
        args: Sequence[Any],
        expected: ExpectedEffects | None = None,
        *,
        in_place: bool = False,
        conditions: str = "",
    ) -> CallOutcome:
        """Call the target on ``args``. Return the times and the largest error in units of the tolerance. If
        ``expected`` is given, compare the effects with it, and raise ``CandidateError`` if they differ. Otherwise the
        error is 0. If ``in_place`` is true and the layout of the tensors is that of the last call, the values are
        written into the tensors of that call. Otherwise the call gets new tensors. ``conditions`` are those of the
        caller (see ``protocol.CallTarget``).
        """
        last = self._given if in_place else None
        # A layout of its own for each call: addresses say nothing about values.
        self._layout = self._layout if last is not None else secrets.randbits(62)
        # A block is used again: mapping a new one takes longer than most calls, and these are not timed.
        arena = ArgumentArena(self._layout, self.block)
        packed, handle = arena.pack(list(args)), -1
        if last is not None and last.places == tuple(packed_locations(packed)):
            arena.write_into(last.memory)
        else:
            handle, last = arena.write(), None
        given = last or MappedArguments.of(handle, packed)
        self._given = given
        try:
            message = protocol.CallTarget(packed, last is not None, self._in_use(), conditions)
            reply, took = self.request(message, "raised", *arena.files(handle))
        finally:
            self.use_block(arena.block)
            if handle >= 0:
                os.close(handle)
        error = 0.0
        if expected is None:  # the process keeps as much as in a call that is compared
            self._earlier.append(KeptResults([], argument_bytes(args), argument_bytes(args, host=True)))
        else:
            try:
                check_process_state(reply.traces, expected.altered)
                error = self.examine(reply.places, args, expected, given)
            except CandidateError:
                self.forget_results()  # its list of kept results no longer matches this one
                raise
        device = reply.spent if reply.device is None else reply.device
        return CallOutcome(took.wall, took.quiet, device * 1e-9, reply.late * 1e-9, error)

    def gradients(
        self,
        args: Sequence[Any],
        seeds: Sequence[Tensor | None],
        like: Sequence[Tensor],
        parameters: Sequence[str],
        wanted: Sequence[bool],
        expected: ExpectedEffects,
    ) -> list[Tensor]:
        """Return the target's gradients of those floating-point arguments in ``args`` that are ``wanted``, then those
        of ``parameters`` if it has all of these. ``seeds`` are the gradients of the results, which are compared with
        ``expected``. Raise ``CandidateError`` for other results, and for other dtypes or shapes than those of ``like``.
        """
        arena, names = ArgumentArena(), list(parameters)
        message = protocol.Differentiate(arena.pack(list(args)), arena.pack(list(seeds)), names, list(wanted))
        reply = self._request_with_arena(message, arena, "gradients")
        outs = len(expected.own) - len(expected.changed)
        got = self._read_results(reply.results, expected.own[:outs])
        if not expected.changed and (problem := _compare(expected, got).problem):
            raise CandidateError("values", f"{problem}, while gradients are recorded")
        if like and not reply.outs:
            raise CandidateError("gradients", "no result carries a gradient")
        return self._read_results(reply.outs, like if reply.complete else like[: len(like) - len(names)])

    def set_evaluation(self, on: bool) -> bool:
        """Set the target to evaluation, or back to its own modes. Return whether it is a module."""
        return self.request(protocol.SetEvaluation(on), "state")[0].yes

    def renew(self, state: Mapping[str, Tensor]) -> bool:
        """Load ``state`` into the target and return True. If it lacks a name, load nothing and return False."""
        arena = ArgumentArena()
        return self._request_with_arena(protocol.LoadParameters(arena.pack(dict(state))), arena, "parameters").yes

    def read_module_state(self, names: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the values of the target module's parameters and buffers with the names in ``names``, in that order.
        Raise ``CandidateError`` if a value has another dtype or shape than the tensor under its name.
        """
        if not names:
            return []
        return self._read_results(self.request(protocol.ReadState(list(names)), "state")[0].outs, list(names.values()))

    @property
    def kept_bytes(self) -> int:
        """The bytes in host memory of the arguments and results of earlier calls that the process keeps."""
        return sum(call.host for call in self._earlier)

    def forget_results(self) -> None:
        """Forget all earlier calls, and unmap their GPU results. The process releases them at its next call."""
        while self._earlier:
            self._drop_earliest()

    def _drop_earliest(self) -> None:
        """Forget the earliest call that is kept for later comparison, and unmap its GPU results."""
        self.release(self._earlier.popleft().spans)

    def release(self, spans: ResultSpans) -> None:
        """Lower the users of each GPU allocation in ``spans`` by one. An allocation without a user is unmapped."""
        for span in spans:
            if isinstance(span.memory, bytes) and span.memory:
                self.opened.drop(span.memory)

    def last_spans(self) -> ResultSpans:
        """Return the last call's spans and delete the bytes kept of them. Return ``[]`` if not all lie on a GPU."""
        last = self._earlier[-1]
        if not all(isinstance(span.content, Tensor) for span in last.spans):
            return []
        self._earlier[-1] = replace(last, spans=[replace(span, content=None) for span in last.spans])
        return last.spans

    def _in_use(self) -> int:
        """Return for how many of the last calls the process must keep the results, so that later changes of them are
        detected. The number is larger for small results. Forget all calls before these.
        """
        sizes, kept = 0, 0
        # The latest results stay.
        for call in reversed(self._earlier):
            sizes += call.size
            # Of huge results on a GPU, two beside the present ones leave no memory for the reference.
            least = LEAST if call.size < ROOM else LEAST_LARGE if call.size < HUGE else 1
            if kept >= MOST or (sizes > ROOM and kept >= least):
                break
            kept += 1
        while len(self._earlier) > kept:
            self._drop_earliest()
        return kept

    def pieces(self, at: MappedArguments) -> MappedPieces:
        """Return the mappings of the arguments' file ``at`` in the target process, as (address, size in bytes, offset
        in the file) sorted by offset. Raise ``CandidateError`` if a part of the file is mapped twice.
        """
        try:
            pieces = sorted(find_mapped_pieces(self.prisoner.pid, at.file), key=lambda piece: piece[2])
        except OSError as e:
            raise _memory_fault(e, "its memory cannot be looked at") from None
        except OversizedMemoryMap as e:
            raise CandidateError("memory", str(e)) from None
        # With two mappings, a write through one would not show in the other address.
        if any(a[2] + a[1] > b[2] for a, b in pairwise(pieces)):
            raise CandidateError("arguments", "it maps its arguments a second time")
        return pieces

    def examine(
        self,
        reply: protocol.CallPlaces,
        args: Sequence[Any],
        expected: ExpectedEffects,
        at: MappedArguments,
        pieces: MappedPieces | None = None,
    ) -> float:
        """Compare the effects of a call, read from the process's memory, with ``expected``. Return the error in units
        of the tolerance, and raise ``CandidateError`` for a difference. ``at`` is the file of the arguments ``args``.
        For a call of a batch, ``pieces`` are its mappings. Without them, results of earlier calls are compared again.
        """
        given, spans = tensors_among(args), list[ResultSpan]()
        outs = len(expected.own) - len(expected.changed)
        check_result_layout(reply, expected)
        try:
            got = self._results(reply.outs, expected.own[:outs], spans)
            places = self._places(given, at, pieces)
            after = [packed_tensor(place, at.memory, self.block) for place in at.places]
            self._check_aliases(spans, places, given, expected)
            for number, (now, before) in enumerate(zip(after, given, strict=True)):
                if number not in expected.changed and not bits_are_equal(now, before):
                    raise CandidateError(
                        "arguments", f"it changes tensor argument {number}, which the reference leaves as it is"
                    )
            difference = _compare(expected, [*got, *(after[i] for i in expected.changed)])
            if difference.problem:
                raise CandidateError("values", difference.problem)
            if pieces is None:
                if (number := at.find_overrun(self.block)) >= 0:
                    raise CandidateError("arguments", f"it writes past the end of tensor argument {number}")
                self._check_earlier_results()
        except BaseException:
            self.release(spans)
            raise
        size = argument_bytes(args) + sum(span.length for span in spans)
        host = argument_bytes(args, host=True) + sum(span.length for span in spans if span.memory == "host")
        self._earlier.append(KeptResults(spans, size, host))
        return difference.error

    def _places(
        self, given: Sequence[Tensor], at: MappedArguments, pieces: MappedPieces | None
    ) -> list[TensorLocation]:
        """Return the location of each tensor in ``given``. It lies in the GPU block, or at an address that follows from
        the mappings ``pieces``. If they are None, they are read from Linux's map of the process, since the process
        itself could report a copy of the arguments.
        """
        if pieces is None:
            pieces = self.pieces(at) if not all(map(lies_on_device, given)) else []
        places: list[TensorLocation] = []
        for place, t in zip(at.places, given, strict=True):
            if lies_on_device(t):
                places.append(place)
                continue
            addresses = [a + place.at - o for a, size, o in pieces if o <= place.at < o + size]
            if t.numel() and not addresses:
                raise CandidateError("arguments", "its arguments are not where they were put")
            places.append(TensorLocation.of(t, addresses[0] if addresses else 0))
        return places

    def _read_results(self, places: Sequence[Place], like: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the results at ``places``. Their number, types, dtypes and shapes must be as in ``like``."""
        spans: ResultSpans = []
        try:
            return self._results(places, like, spans)
        finally:
            self.release(spans)

    def _results(self, places: Sequence[Place], like: Sequence[Tensor], spans: ResultSpans) -> list[Tensor]:
        """Return copies of the results at ``places``. Append the spans of tensors that are not empty to ``spans``,
        which the caller must ``release``. Raise ``CandidateError`` for other types, dtypes or shapes than in ``like``.
        """
        if len(places) != len(like):
            raise CandidateError("results", f"{len(places)} results, expected {len(like)}")
        got, room = [], MAX_PADDED_BYTES
        for number, (place, expected) in enumerate(zip(places, like, strict=True)):
            if isinstance(place, protocol.Foreign):
                raise CandidateError("results", f"result {number} is a {place.kind[:60]}, and no plain tensor")
            if not isinstance(place, TensorLocation):
                if expected.dim():
                    raise CandidateError("results", f"result {number} is a number, expected a tensor")
                got.append(torch.tensor(place, device=expected.device))
                continue
            t, span = self._tensor(number, place, expected, room)
            got.append(t)
            spans += [span] if span is not None else []
            room -= max(0, span.length - expected.numel() * expected.itemsize) if span is not None else 0
        return got

    def _tensor(self, number: int, place: TensorLocation, like: Tensor, room: int) -> tuple[Tensor, ResultSpan | None]:
        """Return a copy of result ``number`` at ``place`` and its span, which is None for an empty tensor. With gaps,
        it may span ``room`` bytes. Raise ``CandidateError`` for another dtype, shape or device than that of ``like``.
        """
        shape, stride, wanted = place.shape, place.stride, TensorLocation.of(like, 0)
        if shape != wanted.shape or place.dtype != wanted.dtype:
            raise CandidateError(
                "results", f"result {number}: {place.dtype}{shape}, expected {wanted.dtype}{wanted.shape}"
            )
        if place.device != wanted.device:
            raise CandidateError("results", f"result {number}: a tensor on {place.device}, expected {wanted.device}")
        # A limit on the bytes that a candidate can make this process read.
        widest = min(MAX_RESULT_SPREAD * like.numel() + 4096, max(2 * like.numel(), room // like.itemsize))
        if (length := strided_extent(shape, stride)) > widest:
            raise CandidateError("results", f"result {number}: strides {stride} for {shape}")
        if not length:
            return torch.empty(like.shape, dtype=like.dtype, device=like.device), None
        if lies_on_device(like):
            span = self._read_on_device(place, length * like.itemsize)
            assert isinstance(span.content, Tensor)
            return span.content.view(like.dtype).as_strided(shape, stride), span
        content = self._read(place.at, length * like.itemsize)
        flat = torch.frombuffer(content, dtype=like.dtype)
        return flat.as_strided(shape, stride), ResultSpan("host", place.at, len(content), content)

    def _read_on_device(self, place: TensorLocation, length: int) -> ResultSpan:
        """Return a span with a copy of ``length`` bytes at ``place`` on the GPU. They are mapped until ``release``."""
        try:
            block = self.opened.take(place.block) if place.block else self.block
            if block is None:
                raise DeviceError("memory of no block")
            try:
                return ResultSpan(place.block, place.at, length, block.bytes_at(place.at, length).clone())
            except BaseException:
                if place.block:
                    self.opened.drop(place.block)
                raise
        except DeviceError as e:
            raise CandidateError("memory", f"its results cannot be read: {e}") from None

    def _read(self, address: int, length: int) -> bytearray:
        """Return ``length`` bytes from ``address`` in the process. Raise ``CandidateError`` if they cannot be read."""
        try:
            return self.prisoner.read(address, length)
        except OSError as e:
            raise _memory_fault(e, "its results cannot be read") from None

    def _holds(self, address: int, content: bytearray) -> bool:
        """Return whether the process's memory holds the bytes ``content`` from ``address`` on."""
        starts = range(0, len(content), COMPARED_BYTES)
        parts = memoryview(content)
        return all(
            self._read(address + at, min(COMPARED_BYTES, len(content) - at)) == parts[at : at + COMPARED_BYTES]
            for at in starts
        )

    def _check_aliases(
        self, spans: ResultSpans, places: Sequence[TensorLocation], given: Sequence[Tensor], expected: ExpectedEffects
    ) -> None:
        """Raise ``CandidateError`` if a result in ``spans`` shares memory with a kept result of an earlier call. Unless
        ``expected.aliased`` is true, the arguments ``given``, which lie at ``places``, are compared as well.
        """
        taken: list[tuple[bytes | str, int, int, str]] = []
        for p, t in zip(places, given, strict=True) if not expected.aliased else ():
            memory = p.block if lies_on_device(t) else "host"
            taken.append((memory, p.at, strided_extent(p.shape, p.stride) * t.itemsize, "an argument"))
        still = "an earlier result, which is still in use"
        taken += [
            (span.memory, span.at, span.length, still) for call in self._earlier for span in call.spans if span.memory
        ]
        for span in spans:
            for memory, start, length, what in taken:
                if span.memory == memory and span.at < start + length and start < span.at + span.length:
                    raise CandidateError("aliases", f"a result shares memory with {what}")

    def _check_earlier_results(self) -> None:
        """Raise ``CandidateError`` if the kept result of an earlier call has changed since it was read."""
        pairs, same = list[tuple[Tensor, Tensor]](), True
        for span in (span for call in self._earlier for span in call.spans):
            if not isinstance(span.content, Tensor):
                same = same and (span.content is None or self._holds(span.at, span.content))
            elif isinstance(span.memory, bytes) and span.memory:
                pairs.append((self.opened.find(span.memory).bytes_at(span.at, span.length), span.content))
        if not (same and all_are_equal(pairs)):
            raise CandidateError("results", "a result changed after the call that returned it")


def _memory_fault(e: OSError, what: str) -> CandidateError:
    """Return the error for a failure ``e`` to read memory, with a text that begins with ``what``. It is a
    ``MachineLack`` if the machine may be at fault, and otherwise a plain ``CandidateError``.
    """
    lack, told = e.errno in {*LACKS, errno.ESRCH, errno.ENOENT, errno.EPERM}, f"{what}: {e.strerror or e}"
    return MachineLack(told) if lack else CandidateError("memory", told)


def _compare(expected: ExpectedEffects, got: Sequence[Tensor]) -> Difference:
    """Return the difference of ``got`` from ``expected``. Raise ``CandidateError`` if they cannot be compared. It is a
    ``MachineLack`` if the device has no memory left for that.
    """
    try:
        return expected.against(got)
    except torch.OutOfMemoryError as e:
        raise MachineLack(f"no memory of the device is left to compare results: {error_line(e)}"[:300]) from None
    except INVALID as e:
        raise CandidateError("answer", f"results that cannot be compared: {error_line(e)}"[:300]) from None
