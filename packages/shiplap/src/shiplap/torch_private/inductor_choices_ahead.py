"""Inductor's choices before their turn: stand-ins for buffers not lowered yet, kernels compiled by its workers.

IR nodes, choices and graphs are opaque to callers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import ir
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.autotune_process import TritonBenchmarkRequest
from torch._inductor.codecache import PyCodeCache
from torch._inductor.virtualized import V

from shiplap.torch_private.inductor_lowering import size_expression
from shiplap.torch_private.size_ranges import evaluate_size

log = logging.getLogger(__name__)
PATIENCE = 60.0  # seconds for the worker processes to start
_futures: dict[str, Any] = {}  # futures; None once it is done
_loaded: set[str] = set()  # of those, the kernels that a worker process has compiled


def current_graph() -> Any:
    """Return the graph being lowered. It is the same object for all of its nodes, and can be referred to weakly."""
    return V.graph


def nodes_behind(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the calls of operators that are lowered after ``node``, in this order."""
    while (node := node.next).op != "root":
        if node.op == "call_function":
            yield node


@contextmanager
def lowering_at(node: torch.fx.Node) -> Iterator[None]:
    """Make ``node`` the node being lowered, within this context."""
    # Lowerings read the current node, for example to find the fakes of their arguments.
    before = V.graph.current_node
    V.graph.current_node = node
    try:
        yield
    finally:
        V.graph.current_node = before


@contextmanager
def stand_ins(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield inputs with the sizes, strides and dtypes of fake tensors, registered in the graph within this context
    only.
    """
    made, known = {}, V.graph.name_to_buffer
    for name, value in values.items():
        if isinstance(value, Tensor):
            sizes, strides = ([size_expression(s) for s in of] for of in (value.shape, value.stride()))
            layout = ir.FixedLayout(value.device, value.dtype, sizes, strides)
            known[f"shiplap_ahead_{name}"] = buffer = ir.InputBuffer(name=f"shiplap_ahead_{name}", layout=layout)
            made[name] = ir.TensorBox.create(buffer)
    try:
        yield made
    finally:
        for name in made:
            known.pop(f"shiplap_ahead_{name}", None)


def kernel_source(choice: Any) -> str:
    """Return the text of the kernel with which a choice is verified."""
    request = choice.bmreq
    return Path(request.module_path).read_text() if _is_triton(choice) else str(request.source_code)


def _is_triton(choice: Any) -> bool:
    return isinstance(choice.bmreq, TritonBenchmarkRequest)


def compile_apart(choice: Any) -> bool:
    """Start compiling the kernel of a choice beside this thread, once, and return whether it was started.

    Triton's compiler runs in a worker process of Inductor. The compiler of C++ is a process itself, for which a thread
    waits.
    """
    name = _kernel_name(choice)
    # A name stays in the table after its result was taken, so that no kernel is compiled twice.
    if name in _futures:
        return True
    if not _is_triton(choice):
        future: Any = AsyncCompile.pool().submit(choice.precompile) if get_compile_threads() > 1 else None
    elif choice.layout.device.type != "cpu" and _has_workers():  # the CPU's would be interpreted
        future = AsyncCompile().triton(kernel_name=choice.bmreq.kernel_name, source_code=kernel_source(choice))
    else:
        future = None
    if future is not None:
        _futures[name] = future
    return future is not None


def _kernel_name(choice: Any) -> str:
    """Return a name that is the same for choices with the same kernel."""
    return str(choice.bmreq.module_path if _is_triton(choice) else hash(choice.bmreq.source_code))


def _has_workers() -> bool:
    """Return whether there are worker processes, after they had time to start."""
    if get_compile_threads() < 2:
        return False
    # Inductor starts its workers in the background, so the first graph may be lowered before they are ready.
    end = time.monotonic() + PATIENCE
    while not AsyncCompile.use_process_pool():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def precompile_kernel(choice: Any) -> None:
    """Compile the kernel of a choice alone, or use the one that was compiled beside this thread."""
    name = _kernel_name(choice)
    kernel = _compiled_kernel(name)
    if kernel is not None:
        request = choice.bmreq
        module = PyCodeCache.load_by_key_path(request.module_cache_key, request.module_path)
        setattr(module, request.kernel_name, kernel)
        _loaded.add(name)
    elif name not in _loaded:
        choice.precompile()


def run_function(choice: Any, inputs: Sequence[Tensor], out: Tensor, sizes: Mapping[Any, int]) -> Callable[[], Any]:
    """Return a function that runs the kernel of a choice on these tensors, once it is compiled.

    Symbols in ``sizes`` have these values, other symbols those of the call.
    """
    request = choice.bmreq
    if sizes:
        request = copy(request)
        request.extra_args = choice.sized(lambda size: evaluate_size(size, sizes))
    if not _is_triton(choice) and request.DLL is not None:  # looking for the library again takes 10 ms
        addresses = [t.data_ptr() for t in (*inputs, out)]
        return partial(getattr(request.DLL, request.kernel_name), *addresses, *request.extra_args)
    run: Callable[[], Any] = request.make_run_fn(*inputs, out=out)
    return run


def kernel_library(choice: Any) -> Path | None:
    """Return the shared library of a compiled choice in C++, None for another choice."""
    loaded = None if _is_triton(choice) else choice.bmreq.DLL
    return None if loaded is None else Path(loaded._name)


def _compiled_kernel(name: str) -> Any:
    """Return the Triton kernel that a worker process has compiled, or None. A compiler of C++ has filled the cache."""
    future = _futures.get(name)
    if future is None:
        return None
    _futures[name] = None
    try:
        return future.result()
    except Exception:  # compiling here raises the same error again
        log.debug("not compiled apart: %s", name, exc_info=True)
        return None
