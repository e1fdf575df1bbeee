"""The process in which the target runs: loads the target, calls it, and reports where the results lie.

The verdict does not depend on this module, since the code that is judged shares the interpreter with it and may rewrite
it. The other process reads the bytes of the results itself, and measures time with its own clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import secrets
import socket
import tempfile
import weakref
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any, TypeVar

import torch
from torch import Tensor

from shiplap.errors import error_line
from shiplap.sandbox import protocol
from shiplap.sandbox.arguments import BLOCK_SIZE, argument_facts, changed_facts, unpack_arguments
from shiplap.sandbox.call_conditions import CONDITIONS
from shiplap.sandbox.device_memory import (
    END_AT,
    FIRST_AT,
    FIRST_BYTES,
    GATE_AT,
    DeviceBlock,
    DeviceError,
    device_driver,
    lies_on_device,
)
from shiplap.sandbox.gpu_call import call_in_queue
from shiplap.sandbox.interpreter_state import (
    InterpreterWatch,
    changed_interpreter_state,
    import_hooks,
    read_interpreter_state,
)
from shiplap.sandbox.landlock import SandboxPolicy, lock_process
from shiplap.sandbox.load_candidate import load_parameters, load_requested
from shiplap.sandbox.patched_functions import FunctionSnapshot
from shiplap.sandbox.protocol import (
    MAX_REQUEST_BYTES,
    NO_ADDRESS,
    Place,
    Reply,
    Request,
    flatten_results,
    pack_message,
    printable_text,
    receive_message,
    send_message,
    structure_of,
    tree_leaves,
)
from shiplap.sandbox.rng_state import RngWatch
from shiplap.sandbox.unshown_modules import import_unshown_modules
from shiplap.torch_private.dynamo import use_temporary_folder

_baseline: FunctionSnapshot | None = None  # taken before this process was forked
LOOKED_AT = 8  # first calls on a GPU after which the state of the process is read, and then each of so many
COLD_CALL_NS = 1_000_000  # ns; a longer call is hardly slower as the first after a pause
MOVING_OPERATORS = """
empty empty_like empty_strided empty_permuted new_empty new_empty_strided view reshape _unsafe_view as_strided
_reshape_alias expand expand_as t transpose permute unsqueeze squeeze slice select narrow detach detach_ alias
clone contiguous copy_ to _to_copy resolve_conj resolve_neg resize_ set_ item _local_scalar_dense is_nonzero
unflatten flatten view_as chunk split unbind numpy_T mT lift_fresh result_type zeros zeros_like zero_ fill_
ones ones_like full random_ uniform_ normal_
"""
FREE = frozenset("aten::" + name for name in MOVING_OPERATORS.split())
"""Operators that move, allocate or describe data, and compute nothing."""


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
ReplyT = TypeVar("ReplyT", bound=Reply)
Handler = Callable[["Child", Any, int], ReplyT]
HANDLERS: dict[type[Request[Any]], Handler[Any]] = {}
"""The function that serves each class of requests: of the child, the request, and the open file sent with it, or -1."""


class ArgumentsDeclined(Exception):
    """An error that a callable raises for arguments that it does not support."""


def handles(kind: type[Request[ReplyT]]) -> Callable[[Handler[ReplyT]], Handler[ReplyT]]:
    """Return a decorator that registers a function as the handler of requests of the class ``kind``, and returns the
    function unchanged.
    """

    def register(handler: Handler[ReplyT]) -> Handler[ReplyT]:
        """Register ``handler`` in ``HANDLERS`` for requests of the class ``kind`` of the enclosing function, and return
        it unchanged.
        """
        HANDLERS[kind] = handler
        return handler

    return register


def take_baseline(*, standard: bool = False) -> None:
    """Store a snapshot of the functions of all trusted modules that are imported. All processes that are forked later
    share it. The launcher does this at its start and after each import that a request makes.

    If ``standard`` is true, only modules of Python's library are added to the snapshot that exists.
    """
    global _baseline
    import_unshown_modules()
    _baseline = FunctionSnapshot(_baseline, standard=standard)


def serve_requests(connection: socket.socket, order: protocol.Fork) -> None:
    """Restrict this process as ``order`` says and report which restrictions are missing. Then answer requests on
    ``connection`` until it ends, which raises ``BrokenMessage``.
    """
    os.chdir(order.scratch)
    os.environ.update(order.environment)
    tempfile.tempdir = None  # that of the launcher, if it has looked for it
    use_temporary_folder()
    cell = SandboxPolicy(order.scratch, tuple(order.readable), order.file_size, order.device, tuple(order.hidden))
    missing = lock_process(cell) if order.locked else {}
    # As many threads as in the process that judges, so that times can be compared.
    torch.set_num_threads(order.threads)
    send_message(connection, pack_message(protocol.Locked(missing)))
    host = Child(watched=order.locked)
    while True:
        message, files = receive_message(connection, *HANDLERS, handles=2, longest=MAX_REQUEST_BYTES)
        try:
            host.block_file = files[1] if len(files) > 1 else -1
            data = pack_message(host.answer(message, files[0] if files else -1))
        except ArgumentsDeclined as e:
            data = pack_message(protocol.Declined(printable_text(str(e))[:400]))
        except Exception as e:
            # The candidate may raise anything, and the other process waits for a reply.
            data = pack_message(protocol.Failed(printable_text(error_line(e))[:400]))
        finally:
            for file in files:
                os.close(file)
        send_message(connection, data)


class Child:
    """The state of a sandboxed process. It holds the target (the code under test or its reference), the arguments and
    results of its last calls, and the records by which changes of the interpreter are detected.
    """

    def __init__(self, *, watched: bool = True) -> None:
        """Start without a target. If ``watched`` is true, snapshots are taken, by which changes of the interpreter are
        detected later. Otherwise such changes are not detected.
        """
        self.watched = watched  # a process of the user's own is not
        self.target: Callable[..., Any] = lambda *args: ()
        self.prepare: Callable[[int, int | None, list[Any]], Callable[[], Any]] = self._prepare_call
        self._kept: deque[Any] = deque()  # arguments and results of earlier calls, which are compared again
        self._modes: list[tuple[torch.nn.Module, bool]] = []  # of the target's modules, before its evaluation
        self._last: Any = ()  # tensors whose locations the reply holds must live until the next request
        if watched:
            # Nothing but code of ours has run since the launcher took the snapshot that it shares.
            self._intact, self._watch = _baseline or FunctionSnapshot(), InterpreterWatch()
        self._batches: dict[int, Any] = {}
        self._calls = 0  # on a GPU, one by one
        self._gradients = secrets.randbelow(4)  # calls that were differentiated, and a beginning that nobody knows
        self._dice = RngWatch()
        self.block_file = -1  # the open file of a block that belongs to the request
        self._block: DeviceBlock | None = None  # the block of the arguments in use

    def answer(self, message: Request[ReplyT], file: int) -> ReplyT:
        """Return the reply to the request ``message``. ``file`` is the descriptor of the arguments' file, or -1 if
        there is none.
        """
        self._last = ()
        if self._block is not None:
            self._block.driver.release_retired()
        reply: ReplyT = HANDLERS[type(message)](self, message, file)
        # What a batch has allocated once has to be there when it is timed.
        if self._block is not None and not isinstance(message, (protocol.PrepareBatch, protocol.RunBatch)):
            self._block.driver.leave_room()
        return reply

    def _unpack(self, value: protocol.Packed, memory: Any, *, as_views: bool | None = None) -> Any:
        """Return the arguments that ``value`` describes. Their tensors lie in ``memory``, the mapped file of the
        request, or in the GPU block that came with the request. ``as_views`` is that of ``unpack_arguments``.
        """
        if self.block_file >= 0:
            (size,) = BLOCK_SIZE.unpack_from(memory, 0)
            self._block, self.block_file = device_driver().receive_block(self.block_file, size), -1
        return unpack_arguments(value, memory, self._block, as_views=as_views)

    def _describe_place(self, value: Any) -> Place:
        """Return the location of the result ``value`` for the reply.

        The location of a tensor on the host is its address. The location of a tensor on the GPU is its offset in the
        arguments' block, or the handle to its allocation with an offset. A number or bool is returned itself. For any
        other value, return a ``Foreign`` with a description such as the name of its type.
        """
        if type(value) not in (Tensor, torch.nn.Parameter) or not lies_on_device(value) or not value.numel():
            return _describe_place(value)
        if isinstance(place := _describe_place(value), protocol.Foreign):
            return place
        block, at = self._block, value.data_ptr()
        if block is not None and block.address <= at < block.address + block.size:
            return protocol.TensorLocation.of(value, at - block.address)
        try:
            handle, offset = device_driver().export_allocation(at)
        except DeviceError:
            return protocol.Foreign("tensor in memory that is no longer its own")
        return protocol.TensorLocation.of(value, offset, handle)

    def accept_modules(self) -> None:
        """Take new snapshots of functions and settings, in which the modules that were imported so far count as
        unchanged.

        These modules are also imported by the user's own process, so their changes are not faults of the target.
        """
        if self.watched:
            self._intact = FunctionSnapshot(self._intact)
            self._watch.reset()

    @handles(protocol.Inspect)
    def _inspect(self, message: protocol.Inspect, file: int) -> protocol.Inspection:
        """Return what the target has done since it was loaded. The reply has the functions and settings that the target
        has changed, its reads of other code's frames or objects, and the number of its threads. ``message`` and
        ``file`` are ignored.
        """
        seen = self._watch.read_observations()
        texts = self._intact.changed()[:20], seen["looked"], seen["left"]
        replaced, looked, left = ([printable_text(name)[:400] for name in names] for names in texts)
        return protocol.Inspection(replaced, looked, left, self._intact.threads())

    @handles(protocol.CheckDevice)
    def _check_device(self, message: protocol.CheckDevice, file: int) -> protocol.ResultPlaces:
        """Add 1 to the tensor of the request, which lies on the accelerator, and return the location of the result. The
        caller reads the result to test whether the device and shared memory work. ``file`` is the descriptor of the
        arguments' file.
        """
        self._last = [self._unpack(message.args, _map(file))[0] + 1]
        self._last[0].cpu()
        return protocol.ResultPlaces([*map(self._describe_place, self._last)])

    @handles(protocol.LoadTarget)
    def _load(self, message: protocol.LoadTarget, file: int) -> protocol.Done:
        """Load the target that the request names. ``file`` is the descriptor of the file with the arguments of its
        constructor and its parameters. If the request's field ``thorough`` is true, a snapshot of the functions of
        torch is taken first.
        """
        memory = _map(file)
        if message.thorough:
            self._intact = self._intact.with_operators()
        self.target = load_requested(
            message, self._unpack(message.init, memory) or (), self._unpack(message.state, memory) or {}
        )
        self._watch.loaded()
        return protocol.Done()

    @handles(protocol.LoadParameters)
    def _load_parameters(self, message: protocol.LoadParameters, file: int) -> protocol.Answer:
        """Load the values of the request into the parameters and buffers of the target. ``file`` is the descriptor of
        the file with these values. If the target lacks one of the names, nothing is loaded and ``yes`` of the reply is
        false.
        """
        return protocol.Answer(load_parameters(self.target, self._unpack(message.state, _map(file))))

    @handles(protocol.ReadState)
    def _read_state(self, message: protocol.ReadState, file: int) -> protocol.ResultPlaces:
        """Return the locations of those parameters and buffers of the target module that ``message.names`` names, in
        that order. Raise ``KeyError`` for a name that the target lacks. ``file`` is ignored.
        """
        state = self.target.state_dict() if isinstance(self.target, torch.nn.Module) else {}
        self._last = [state[name].detach() for name in message.names]
        # The other process reads them as soon as it has the reply.
        if _on_devices(self._last):
            torch.cuda.synchronize()
        return protocol.ResultPlaces([self._describe_place(v) for v in self._last])

    @handles(protocol.CallTarget)
    def _call(self, message: protocol.CallTarget, file: int) -> protocol.TargetCalled:
        """Call the target and return the locations of its results and the times. ``file`` is the descriptor of the file
        with the arguments. If ``message.again`` is true, the call uses the tensors of the last call instead, into which
        the other process has written new values.

        The arguments and results of ``message.keep`` earlier calls stay in memory. ``message.conditions`` names
        the conditions of the call in ``CONDITIONS``.
        """
        while len(self._kept) > message.keep:
            self._kept.popleft()
        if message.again:  # the other side has written new values into the tensors of the last call
            memory, args = self._kept[-1][:2]
        else:
            memory = _map(file)
            args = list(self._unpack(message.args, memory))
        before = argument_facts(args)
        target = partial(CONDITIONS[message.conditions], self.target) if message.conditions else self.target
        with torch.no_grad():
            if not _on_devices(args):
                started = perf_counter_ns()
                returned = target(*args)
                result = flatten_results(returned)
                spent = perf_counter_ns() - started
                altered = changed_facts(before, argument_facts(args))
                places = self._keep(args, result, memory, structure_of(returned))
                return protocol.TargetCalled(places, spent, traces=protocol.CallTraces(altered=altered))
            call = call_in_queue(target, args)
            altered = changed_facts(before, argument_facts(args))
            places = self._keep(args, call.result, memory, call.structure)
        # Reading the state takes longer than most calls, so that of many calls some are looked at.
        self._calls += 1
        looked = self._calls <= LOOKED_AT or self._calls % LOOKED_AT == 0
        state = (self._watch.read_observations(thorough=False)["left"], self._intact.threads()) if looked else ([], 0)
        traces = protocol.CallTraces(call.raced, state[0], state[1], altered)
        return protocol.TargetCalled(places, traces=traces, **call.clock)

    def _keep(self, args: list[Any], result: Any, memory: Any, lies: str | None = None) -> protocol.CallPlaces:
        """Keep ``args`` and ``result``, the flat list of a call's results, alive, and return the locations of the
        results.

        ``memory`` is the mapped file in which the arguments lie. ``lies`` is the nesting of tuples, lists and dicts
        around the results, as a string such as ``(.,{'a':.})``. If it is None, the reply has no structure.
        """
        self._kept.append((memory, args, result))
        return protocol.CallPlaces([*map(self._describe_place, result)], lies and printable_text(lies))

    @handles(protocol.PrepareBatch)
    def _prepare(self, message: protocol.PrepareBatch, file: int) -> protocol.Done:
        """Prepare one call for each set of arguments in the shared file with the descriptor ``file``. ``_run_batch``
        runs the calls later, and the values may be replaced before that. Release the batches whose numbers are not in
        ``message.kept``.
        """
        self._batches = {n: b for n, b in self._batches.items() if n in message.kept}
        memory = _map(file)
        sets = [list(self._unpack(args, memory, as_views=False)) for args in message.sets]
        with torch.no_grad():
            runs = [self.prepare(message.index, message.poison, args) for args in sets]
        if _on_devices(sets):  # an idle batch makes its results now; the clock must find no work of that
            torch.cuda.synchronize()
        self._kept.clear()  # the other side asks for no earlier results between batches
        self._batches[message.batch] = self._block, sets, runs, []
        return protocol.Done()

    @handles(protocol.ReleaseBatches)
    def _release(self, message: protocol.ReleaseBatches, file: int) -> protocol.Done:
        """Release all batches whose numbers are not in ``message.kept``. Unmap the GPU blocks of their arguments.
        ``file`` is ignored.
        """
        self._batches = {n: b for n, b in self._batches.items() if n in message.kept}
        driver, self._block = self._block.driver if self._block is not None else None, None
        if driver is not None:
            driver.release_retired()
            driver.leave_room()
        return protocol.Done()

    def _prepare_call(self, index: int, poison: int | None, args: list[Any]) -> Callable[[], Any]:
        """Return a function without arguments that calls the target on ``args``. If ``index`` is negative, the target
        is called once now, and the function returns the results of that call. ``poison`` is ignored.
        """
        if index >= 0:
            return partial(self.target, *args)
        result = self.target(*args)
        return lambda: result

    @handles(protocol.RunBatch)
    def _run_batch(self, message: protocol.RunBatch, file: int) -> protocol.BatchCalled:
        """Run each prepared call of a batch once. Return the locations of the results and the time in nanoseconds,
        which is 0 on a GPU. ``file`` is ignored.

        If ``message.repeats`` is not 0, run the first call that many times instead and return the time alone. If
        ``message.gated`` is true, the calls are queued on the GPU and begin when the other process opens the gate.
        """
        self._block, sets, runs, results = self._batches[message.batch]
        if message.repeats:
            return self._repeat_first_call(runs[0], message.repeats)
        results.clear()
        on_device = self._block is not None and bool(_on_devices(sets))
        with torch.no_grad():
            # All calls are queued behind this wait before the clock starts.
            if message.gated and self._block is not None:
                self._block.driver.wait_for_word(self._block, GATE_AT)
            if self._block is not None:
                # A GPU takes a tenth of a millisecond to turn to the kernels of another process, also for calls that
                # compute nothing. Calls that are not queued run this kernel, too: CUDA loads a kernel at its first
                # launch, and cannot do so behind a closed gate.
                self._block.bytes_at(FIRST_AT, FIRST_BYTES).zero_()
            started = perf_counter_ns()
            for run in runs:
                results.append(flatten_results(run()))
            spent = perf_counter_ns() - started
            if on_device and self._block is not None:
                self._block.driver.write_word(self._block, END_AT)
        calls = [protocol.CallPlaces([*map(self._describe_place, each)]) for each in results]
        return protocol.BatchCalled(calls, 0 if on_device else spent)

    def _repeat_first_call(self, run: Callable[[], Any], repeats: int) -> protocol.BatchCalled:
        """Run one call ``repeats`` times and return the time of all runs together, without results. If the first run is
        shorter than a millisecond, it is not counted, since the caches were cold, and another one is made in its place.
        """
        with torch.no_grad():
            started = perf_counter_ns()
            run()
            if perf_counter_ns() - started < COLD_CALL_NS:  # the process was stopped, and its caches are cold
                started, repeats = perf_counter_ns(), repeats + 1
            for _ in range(repeats - 1):
                run()
            return protocol.BatchCalled([], perf_counter_ns() - started)

    @handles(protocol.ListOperators)
    def _list_operators(self, message: protocol.ListOperators, file: int) -> protocol.OperatorList:
        """Run one call of the target on the arguments in the file with the descriptor ``file``. Return the torch
        operators that it runs and the locations of its results. The reply also has the names of settings that the call
        has changed and the number of threads that still run its code.
        """
        args = list(self._unpack(message.args, _map(file)))
        # Generators that are advanced here must not be at the same position after the call.
        self._dice.advance_generators()
        with self._watch.record_calls():
            operators, result, left, threads = _ops(self.target, args, self._intact)
        self._last = args, result
        traces = protocol.CallTraces(False, left + self._dice.stuck_generators(), threads)
        return protocol.OperatorList(operators, [*map(self._describe_place, result)], traces)

    @handles(protocol.SetEvaluation)
    def _set_evaluation(self, message: protocol.SetEvaluation, file: int) -> protocol.Answer:
        """Set the target module to evaluation, or back to the modes that its modules had before. Return whether the
        target is a module. ``file`` is ignored.
        """
        if not isinstance(self.target, torch.nn.Module):
            return protocol.Answer(False)
        if message.on:
            self._modes = [(module, module.training) for module in self.target.modules()]
            self.target.eval()
        for module, mode in () if message.on else self._modes:
            module.training = mode
        return protocol.Answer(True)

    @handles(protocol.Differentiate)
    def _differentiate(self, message: protocol.Differentiate, file: int) -> protocol.Gradients:
        """Call the target on copies of the arguments in the file with the descriptor ``file``. Return the locations of
        the gradients of those of its floating-point arguments that are wanted, then of those of the requested
        parameters. ``complete`` of the reply is false if the target lacks one of the parameters, and they are then left
        out. The reply also has the locations of the results.

        If no result carries a gradient or ``message.seeds`` is empty, no gradient is returned.
        """
        memory, flags = _map(file), iter(message.wanted)
        args, seeds = list(self._unpack(message.args, memory)), list(self._unpack(message.seeds, memory))
        given = [a.detach().clone().requires_grad_(next(flags, True)) if _is_floating_tensor(a) else a for a in args]
        given = self._taken_from_operators(given)
        returned = self.target(*given)
        results = flatten_results(returned)
        floating = [o for o in tree_leaves(returned) if _is_floating_tensor(o)]
        able = [(o, s) for o, s in zip(floating, seeds, strict=False) if o.requires_grad]
        values: list[Tensor] = []
        owned = dict(self.target.named_parameters()) if isinstance(self.target, torch.nn.Module) else {}
        all_there = all(name in owned for name in message.parameters)
        if able:
            pairs = [(o, s) for o, s in able if s is not None]  # without any, all gradients are 0
            wanted = [a for a in given if _is_floating_tensor(a) and a.requires_grad]
            wanted += [owned[name] for name in message.parameters if all_there]
            outs, seeds = ([pair[side] for pair in pairs] for side in (0, 1))
            grads = torch.autograd.grad(outs, wanted, seeds, allow_unused=True)
            values = [torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted, strict=True)]
        # The other process reads the gradients as soon as it has the reply.
        if _on_devices(args):
            torch.cuda.synchronize()
        self._last = values, results, memory
        places = [[self._describe_place(v) for v in listed] for listed in (values, results)]
        return protocol.Gradients(places[0], places[1], all_there)

    def _taken_from_operators(self, args: list[Any]) -> list[Any]:
        """Return ``args``, the arguments of a call that is differentiated, of which some that require a gradient come
        from an operator, as those of a layer within a model do. In four calls in a row each of them does in two. In
        which ones it does depends on chance.
        """
        at, self._gradients = self._gradients, self._gradients + 1
        return [
            a.clone() if isinstance(a, Tensor) and a.requires_grad and (at + at // 2 + i) % 2 else a
            for i, a in enumerate(args)
        ]


def _map(file: int) -> Any:
    """Map ``file``, the descriptor of a file of arguments that two processes share, and return its memory as a ctypes
    array.

    Unlike ``mmap.mmap``, the mapping keeps no descriptor open. Raise ``OSError`` if the file cannot be mapped or has
    not arrived.
    """
    if file < 0:  # none has arrived
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    size, access = os.fstat(file).st_size, mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, size, access, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), file, 0)
    if address in (None, NO_ADDRESS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_char * size).from_address(address)
    # Not at exit: tensors on this memory may still be alive then, and the kernel unmaps it anyway.
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memory


def _is_floating_tensor(value: Any) -> bool:
    """Return whether ``value`` is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _on_devices(args: list[Any]) -> list[Any]:
    """Return the tensors among the arguments of a call that lie on a GPU. Tensors inside tuples, lists and dicts are
    included.
    """
    return [a for a in tree_leaves(args) if lies_on_device(a)]


def _describe_place(value: Any) -> Place:
    """Return the address, dtype, shape and strides of ``value`` if it is a strided tensor. Return a float, a bool or a
    signed 64-bit int itself. For any other value, return a ``Foreign`` with a description such as the name of its type.
    """
    if isinstance(value, Tensor) and type(value) in (Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            return protocol.Foreign(f"{value.layout} tensor, or one with a pending conjugation")
        return protocol.TensorLocation.of(value, value.data_ptr())
    if type(value) is bool:
        return value
    # Methods of a subclass, which could compute the value, do not run.
    if isinstance(value, float):
        return float.__pos__(value)
    if isinstance(value, int) and -(1 << 63) <= int.__pos__(value) < 1 << 63:
        return int.__pos__(value)
    return protocol.Foreign(printable_text(type(value).__name__)[:400])


def _ops(
    target: Callable[..., Any], args: list[Any], intact: FunctionSnapshot
) -> tuple[list[protocol.OperatorUse], list[Any], list[str], int]:
    """Call ``target`` on ``args`` once under torch's profiler. Return (operators, results, settings, threads).

    The operators are those that compute something. The settings are the names of those that the call has changed. The
    last value is the number of threads that run code of the target, counted by the snapshot ``intact``. Garbage is
    collected before the profile ends, so that operators run by finalizers are listed, too.
    """
    from torch.autograd.profiler import profile

    from shiplap.torch_private.process_state import all_threads_config

    config = all_threads_config()
    with torch.no_grad(), profile(use_cpu=True, record_shapes=True, experimental_config=config) as seen:
        before = read_interpreter_state(hooks := import_hooks())
        result = flatten_results(target(*args))
        gc.collect()
        # A kernel that runs after the profile has ended would not be listed.
        if any(isinstance(a, Tensor) and a.is_cuda for a in args):
            torch.cuda.synchronize()
        left, threads = changed_interpreter_state(before, hooks), intact.threads()
    uses: list[tuple[str, list[Any]]] = []
    for event in seen.function_events or ():
        # An operator that calls others is listed by those.
        inner = [c for c in event.cpu_children if c.name.startswith("aten::") and c.name not in FREE]
        if event.name.startswith("aten::") and event.name not in FREE and not inner:
            shapes = [list(s) if isinstance(s, (list, tuple)) else [] for s in event.input_shapes]
            uses.append((event.name, shapes))
    with contextlib.suppress(AttributeError):
        for event in seen.function_events or ():
            uses += [(printable_text(f"kernel {k.name}")[:400], []) for k in event.kernels]
    return _count_uses(uses), result, left, threads


def _count_uses(uses: list[tuple[str, list[Any]]]) -> list[protocol.OperatorUse]:
    """Return each of ``uses``, which are pairs of an operator's name and the sizes of its arguments, once with its
    count. Raise ``RuntimeError`` if there are more than 2,000 different ones. A list that was cut off would hide the
    last operators of a call.
    """
    counts = Counter((name, repr(shapes)) for name, shapes in uses)
    if len(counts) > protocol.MOST_OPERATORS:
        raise RuntimeError(f"it runs operators in {len(counts)} ways, of which {protocol.MOST_OPERATORS} can be listed")
    listed = {(name, repr(shapes)): (name, shapes) for name, shapes in uses}
    return [protocol.OperatorUse(*listed[key], count) for key, count in counts.items()]
