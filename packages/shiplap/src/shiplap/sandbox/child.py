"""The process in which the target runs: loads the target, calls it, and reports where the results lie.

The verdict does not depend on this module, since the code that is judged shares the interpreter with it and may rewrite
it. The other process reads the bytes of the results itself, and measures time with its own clock.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from shiplap.sampling.run import error_line
from shiplap.sandbox.gpu_call import call_in_queue
from shiplap.sandbox.interpreter_state import InterpreterWatch, changed_interpreter_state, read_interpreter_state
from shiplap.sandbox.landlock import SandboxPolicy, lock_process
from shiplap.sandbox.load_candidate import load_parameters, load_requested
from shiplap.sandbox.patched_functions import FunctionSnapshot
from shiplap.sandbox.protocol import (
    describe_tensor,
    flatten_results,
    receive_message,
    send_message,
    strided_extent,
    structure_of,
    tree_leaves,
    unpack_arguments,
)
from shiplap.sandbox.rng_state import RngWatch

_baseline: FunctionSnapshot | None = None  # taken before this process was forked
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


class ArgumentsDeclined(Exception):
    """Raised by a callable for arguments that it does not support."""


def take_baseline() -> None:
    """Take the snapshot of functions that all forked processes share."""
    global _known
    _baseline = FunctionSnapshot()


def serve_requests(connection: socket.socket, asked: Mapping[str, Any]) -> None:
    """Lock this process in, then reply to requests until the connection ends."""
    os.chdir(asked["scratch"])
    os.environ.update(asked["environment"])
    readable, hidden = tuple(asked["readable"]), tuple(asked["hidden"])
    cell = SandboxPolicy(asked["scratch"], readable, asked["file_size"], asked["device"], hidden)
    missing = lock_process(cell) if asked["locked"] else {}
    # As many threads as in the process that judges, so that times can be compared.
    torch.set_num_threads(asked["threads"])
    send_message(connection, {"missing": missing})
    host = Child()
    while True:
        message, handles = receive_message(connection, 1, 1 << 26)
        try:
            reply = host.answer(message, handles[0] if handles else -1)
        except ArgumentsDeclined as e:
            reply = {"declined": str(e)}
        except Exception as e:
            reply = {"error": error_line(e)}
        finally:
            for handle in handles:
                os.close(handle)
        send_message(connection, reply)


class Child:
    """The target, the results of its last calls, and the observers of the interpreter."""

    def __init__(self) -> None:
        self._target: Callable[..., Any] = lambda *args: ()
        self._kept: deque[Any] = deque()  # arguments and results of earlier calls, which are compared again
        self._last: Any = ()  # tensors whose locations the reply holds must live until the next request
        self._intact, self._watch = FunctionSnapshot(_baseline), InterpreterWatch()
        self._batches: dict[int, Any] = {}
        self._dice = RngWatch()

    def answer(self, asked: Mapping[str, Any], handle: int) -> dict[str, Any]:
        """Return the reply to one request."""
        if asked["do"] == "intact":
            return {
                "changed": self._intact.changed()[:20],
                "threads": self._intact.threads(),
                **self._watch.read_observations(),
            }
        if asked["do"] == "kept":
            return self._module_keeps(asked["names"])
        if asked["do"] == "device":
            torch.ones(1, device=asked["device"]).item()
            return {"ok": True}
        if asked["do"] == "prepare":
            return self._prepare(asked, handle)
        if asked["do"] in ("go", "sample"):
            return self._run_batch(asked) if asked["do"] == "go" else self._repeat_first_call(asked)
        while len(self._kept) > asked.get("keep", len(self._kept)):
            self._kept.popleft()
        # Private, so that nothing written here shows in the file of the other side.
        memory: Any = mmap.mmap(handle, 0, flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0))
        if asked["do"] == "load":
            if asked.get("thorough"):
                self._intact = FunctionSnapshot(self._intact, thorough=True)
            self._target = load_requested(
                asked, unpack_arguments(asked["init"], memory), unpack_arguments(asked["state"], memory)
            )
            self._watch.loaded()
            if asked["kind"] == "maker":  # the user's own module: its changes are in force in the user's process too
                self._intact = FunctionSnapshot(self._intact)
                self._watch.reset()
            return {"ok": True}
        if asked["do"] == "state":
            return {"ok": load_parameters(self._target, unpack_arguments(asked["state"], memory))}
        if asked.get("again"):  # new values in the tensors of the last call, without a new version number
            before, args = self._kept[-1][:2]
            before[:], memory = memory[:], before
            for there, now in zip(tree_leaves(args), tree_leaves(unpack_arguments(asked["args"], memory)), strict=True):
                if isinstance(there, Tensor) and there.is_cuda:
                    there.data.copy_(now)
        else:
            args = list(unpack_arguments(asked["args"], memory))
        if asked["do"] == "ops":
            return self._operators(args)
        if asked["do"] == "gradients":
            return self._gradients(args, list(unpack_arguments(asked["seeds"], memory)), asked["parameters"], memory)
        return self._call(args, memory)

    def _module_keeps(self, names: list[str]) -> dict[str, Any]:
        """Return the locations of these entries of the module's state."""
        state = self._target.state_dict() if isinstance(self._target, torch.nn.Module) else {}
        self._last = [_copy_to_host(state[name].detach()) for name in names]
        return {"outs": [_describe_place(v) for v in self._last]}

    def _call(self, args: list[Any], memory: Any) -> dict[str, Any]:
        """Call the target and return the locations of its results, and the times."""
        with torch.no_grad():
            if not any(isinstance(a, Tensor) and a.is_cuda for a in args):
                started = perf_counter_ns()
                returned = self._target(*args)
                result = flatten_results(returned)
                spent = perf_counter_ns() - started
                return {**self._told(args, result, memory, result), "spent": spent, "nested": structure_of(returned)}
            call = call_in_queue(self._target, args)
            told = self._told(args, call.result, memory, call.seen)
        # Code that runs between two calls would see the next values before the clock starts.
        between = {"left": self._watch.read_observations()["left"], "threads": self._intact.threads()}
        return {**told, **call.clock, **between, "raced": call.raced}

    def _prepare(self, asked: Mapping[str, Any], handle: int) -> dict[str, Any]:
        """Prepare calls on arguments in shared memory, whose values may be replaced before the calls run."""
        self._batches = {n: b for n, b in self._batches.items() if n in asked["kept"]}
        # Shared, since the other side replaces the values after the calls are prepared.
        memory = mmap.mmap(handle, 0, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        sets = [list(unpack_arguments(args, memory)) for args in asked["sets"]]
        with torch.no_grad():
            runs = [self._target(asked["which"], args) for args in sets]
        self._batches[asked["batch"]] = memory, sets, runs, []
        return {"ok": True}

    def _run_batch(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Run each prepared call once."""
        _, sets, runs, results = self._batches[asked["batch"]]
        results.clear()
        with torch.no_grad():
            started = perf_counter_ns()
            for run in runs:
                results.append(flatten_results(run()))
            spent = perf_counter_ns() - started
        pairs = zip(results, sets, strict=True)
        told = [
            {"outs": [_describe_place(o) for o in r], "args": [_describe_place(a) for a in flatten_results(s)]}
            for r, s in pairs
        ]
        return {"calls": told, "spent": spent}

    def _repeat_first_call(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Run the first prepared call repeatedly."""
        run, repeats = self._batches[asked["batch"]][2][0], int(asked["repeats"])
        with torch.no_grad():
            started = perf_counter_ns()
            run()
            if perf_counter_ns() - started < COLD_CALL_NS:  # the process was stopped, and its caches are cold
                started, repeats = perf_counter_ns(), repeats + 1
            for _ in range(repeats - 1):
                run()
            return {"spent": perf_counter_ns() - started}

    def _operators(self, args: list[Any]) -> dict[str, Any]:
        """List the operators that a call of the target runs."""
        self._last = ()  # finalizers of an earlier call must not run inside the list of operators
        # Generators that are advanced here must not be at the same position after the call.
        self._dice.advance_generators()
        with self._watch.record_calls():
            ops, result, between = _list_operators(self._target, args, self._intact)
        between["left"] += self._dice.stuck_generators()
        self._last = args, result, [_copy_to_host(o) for o in result]
        return {"ops": ops, "outs": [_describe_place(o) for o in self._last[-1]], **between}

    def _gradients(self, args: list[Any], seeds: list[Tensor], names: list[str], memory: Any) -> dict[str, Any]:
        """Return the locations of the gradients of arguments and parameters."""
        given = [a.detach().clone().requires_grad_() if _is_floating_tensor(a) else a for a in args]
        outs = [o for o in tree_leaves(self._target(*given)) if isinstance(o, Tensor) and o.requires_grad]
        owned = dict(self._target.named_parameters()) if isinstance(self._target, torch.nn.Module) else {}
        all_there = all(name in owned for name in names)
        wanted = [a for a in given if _is_floating_tensor(a)] + [owned[name] for name in names if all_there]
        if not outs:
            return {"error": "no result carries a gradient"}
        grads = torch.autograd.grad(outs, wanted, seeds[: len(outs)], allow_unused=True)
        values = [torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted, strict=True)]
        self._last = [_copy_to_host(v) for v in values], memory
        return {"outs": [_describe_place(v) for v in self._last[0]], "parameters": all_there}

    def _told(self, args: list[Any], result: Any, memory: Any, seen: list[Any]) -> dict[str, Any]:
        """Keep the results of a call, and return the locations of these and of the arguments."""
        for _, _, earlier, copies in self._kept:  # earlier results are compared again: copies of them, if on a GPU
            for now, copy in zip(tree_leaves(earlier), copies, strict=False):
                if type(now) is Tensor and now.is_cuda and now.shape == copy.shape:
                    copy.copy_(now)
        outs, given = [_copy_to_host(o) for o in seen], [_copy_to_host(a) for a in flatten_results(args)]
        self._kept.append((memory, args, result, [*outs, *given]))
        return {"outs": [_describe_place(o) for o in outs], "args": [_describe_place(a) for a in given]}


def _is_floating_tensor(value: Any) -> bool:
    """Return whether ``value`` is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _copy_to_host(value: Any) -> Any:
    """Return a copy of a GPU tensor on the CPU, where the other process can read it; other values unchanged."""
    return value.detach().cpu() if type(value) is Tensor and value.is_cuda else value


def _describe_place(value: Any) -> dict[str, Any]:
    """Return the location and description of a tensor, or a plain value."""
    if isinstance(value, Tensor) and type(value) not in (Tensor, torch.nn.Parameter):
        return {"foreign": type(value).__name__}
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_conj() or value.is_neg():
            return {"foreign": f"{value.layout} tensor, or one with a pending conjugation"}
        length = strided_extent(value.shape, value.stride()) * value.itemsize
        return {
            "tensor": {**describe_tensor(value), "at": value.data_ptr(), "bytes": length, "device": value.device.type}
        }
    if isinstance(value, (bool, int)):
        return {"plain": value}
    return {"float": float.hex(value)} if isinstance(value, float) else {"foreign": type(value).__name__}


def _list_operators(
    target: Callable[..., Any], args: list[Any], intact: FunctionSnapshot
) -> tuple[list[list[Any]], list[Any], dict[str, Any]]:
    """List the operators of torch that compute something in one call.

    The results are ``[name, shapes]`` of each operator, the results of the call, and observations of work that could go
    on after the list has ended. Garbage is collected before the list ends, so that finalizers of the call's objects are
    listed.
    """
    from torch.autograd.profiler import profile

    from shiplap.torch_private.profiler import all_threads_config

    config = all_threads_config()
    with torch.no_grad(), profile(use_cpu=True, record_shapes=True, experimental_config=config) as seen:
        before = read_interpreter_state()
        result = flatten_results(target(*args))
        gc.collect()
        if any(isinstance(a, Tensor) and a.is_cuda for a in args):
            torch.cuda.synchronize()
        between = {"left": changed_interpreter_state(before), "threads": intact.threads()}
    values: list[list[Any]] = []
    for event in seen.function_events or ():
        inner = [c for c in event.cpu_children if c.name.startswith("aten::") and c.name not in FREE]
        if event.name.startswith("aten::") and event.name not in FREE and not inner:
            values.append([event.name, [list(s) if isinstance(s, (list, tuple)) else [] for s in event.input_shapes]])
    with contextlib.suppress(AttributeError):
        for event in seen.function_events or ():
            values += [["kernel", k.name] for k in event.kernels]
    return values[:2000], result, between
