"""The only room that touches private torch: one function per capability.

``verified.json`` says on which torch the suite has shown that a capability works; runs write it (``versions``). An
unknown torch is not refused. Where torch has a public way, the users of a capability ask :func:`available` and take the
public way on a torch without a run; ``shiplap env`` says so. A capability without a public way is used all the same.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shiplap.torch_private.versions import read_table, verified_on

__all__ = ["CAPABILITIES", "Capability", "available"]


@dataclass(frozen=True)
class Capability:
    """One use of private names of torch.

    ``name`` is its name in reports, and ``uses`` lists the private names. ``otherwise`` describes what happens instead
    on a version of torch on which no test run has verified the use. It is an empty string if there is no replacement.
    """

    name: str
    uses: str
    otherwise: str = ""

    @property
    def verified(self) -> tuple[str, ...]:
        """The versions of torch, such as ``2.13``, on which a test run has shown that this capability works. A
        capability is one use of private torch.
        """
        return tuple(version for version, row in read_table().items() if self.name in row["verified"])

    @property
    def known(self) -> bool:
        """Whether a test run has verified this capability on the installed version of torch. A capability is one use of
        private torch.
        """
        return self.name in verified_on(torch.__version__)


# The suite checks each of these on every release of `versions.RELEASES`, and `shiplap env` prints them.
CAPABILITIES = (
    Capability("autocast rules", "torch._C._DisableAutocast, Autocast dispatch keys"),
    Capability(
        "calls below autograd",
        "torch._C._any_requires_grad, _is_any_autocast_enabled, peek_interpreter_stack, _is_compiling_flag",
        "a call goes through torch's dispatcher",
    ),
    Capability(
        "transforms of torch.func, forward-mode AD",
        "torch._C._after_autograd_keyset, torch.autograd.function._SingleLevelFunction, forward_ad._current_level",
    ),
    Capability(
        "gradients in C++",
        "the headers of torch/csrc/autograd, and of torch/csrc/dynamo/compiled_autograd.h",
        "Python records the gradients of native ops",
    ),
    Capability(
        "calls past OpOverload.__call__",
        "torch._ops.OpOverload._op, torch.jit._builtins._register_builtin, set_code_exec_strategy of Dynamo's frames",
        "torch.ops.ns.name is torch's own object: native errors are RuntimeErrors, and it takes any tensor as a number",
    ),
    Capability(
        "templates in Inductor's lowering",
        "torch._inductor.lowering, ir, select_algorithm, codegen: registered lowerings, templates and their choices",
        "an op with templates is an opaque call in compiled code",
    ),
    Capability(
        "calls from Inductor's code",
        "torch._inductor.ir.FallbackKernel, lowering.fallback_handler, PythonWrapperCodegen.imports",
        "compiled code calls ops as torch writes it",
    ),
    Capability("redeclaring an op", "attributes of torch._ops._OpNamespace"),
    Capability("cache keys of graphs", "FxGraphHashDetails, AOTAutogradCacheDetails: gm, example_inputs"),
    Capability("symbolic fakes", "torch._subclasses.fake_tensor.FakeTensorMode"),
    Capability("symbolic sizes", "torch.SymInt.node, ShapeEnv.bound_sympy, ShapeEnv.backed_var_to_val"),
    Capability("data-dependent sizes", "torch._dynamo.config.capture_dynamic_output_shape_ops"),
    Capability("storage identity", "torch.UntypedStorage._cdata"),
    Capability("compile counters", "torch._dynamo.utils.counters, torch._dynamo.utils.compile_times"),
    Capability("dynamic dims", "torch._dynamo.mark_dynamic"),
    Capability("graph-break registry", "torch/_dynamo/graph_break_registry.json"),
    Capability("abandoned captures", "torch._C._cuda_endAllocateToPool, _cuda_releasePool"),
    Capability("tuning keys and guards", "torch._C._cuda_getDriverVersion, torch._C._current_graph_task_id"),
    Capability("fused groups and reasons", "_inductor.config._post_fusion_custom_pass; logs fusion, output_code"),
    Capability(
        "Inductor on a generated device",
        "torch._inductor.codegen.common.register_device_op_overrides, PythonWrapperCodegen",
    ),
    Capability("nested arguments", "torch.utils._pytree.tree_leaves, tree_map"),
    Capability("operators of a graph", "torch._ops.OpOverload, its _schema and tags"),
    Capability("device tests", "torch.testing._internal.common_device_type, common_methods_invocations.op_db"),
    Capability("rewrites", "_inductor.config pre_grad_, joint_ and post_grad_custom passes, decompositions"),
    Capability("structured trace", "TORCH_TRACE, logger torch.__trace: metadata, payload of records"),
)


def available(name: str) -> bool:
    """Return whether the capability ``name``, which is one use of private names of torch, may be used.

    It may be used if a test run has verified it on the installed version of torch. Code that also works without it (by
    ``Capability.otherwise``) calls this function first.
    """
    return name in verified_on(torch.__version__)


@contextmanager
def fake_mode(symbolic: bool, *, fallbacks: bool = True) -> Iterator[Any]:
    """Return a context in which a new ``FakeTensorMode`` is active. The context yields the mode.

    If ``symbolic`` is true, the sizes of converted tensors may become symbols. Otherwise they stay numbers. If
    ``fallbacks`` is true, torch runs a real kernel on zeros for an op that lacks a fake implementation. Otherwise such
    an op raises an error.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv() if symbolic else None
    with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=False, allow_fallback_kernels=fallbacks) as mode:
        yield mode


def make_fake_tensor(mode: Any, tensor: torch.Tensor, dynamic: bool) -> torch.Tensor:
    """Return ``tensor`` as a fake tensor of the fake mode ``mode``. If ``dynamic`` is true, each of its sizes is a
    symbol. Otherwise its sizes are numbers.
    """
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim()) if dynamic else None
    fake: torch.Tensor = mode.from_tensor(tensor, symbolic_context=context)
    return fake


def size_value(size: Any, unbacked: dict[str, int]) -> int | None:
    """Return the value of a fake tensor's size as an int. Return None if one of its symbols has no value. ``unbacked``
    has the values of symbols that depend on data, by name.
    """
    if isinstance(size, int):
        return size
    env, expr = size.node.shape_env, size.node.expr
    backed = getattr(env, "backed_var_to_val", None) or env.var_to_val  # renamed after 2.11
    known = {s: backed[s] if s in backed else unbacked.get(str(s)) for s in expr.free_symbols}
    if None in known.values():
        return None
    return int(expr.xreplace({s: _sympy_integer(v) for s, v in known.items()}))


def _sympy_integer(value: Any) -> Any:
    """Return an integer value as a ``sympy.Integer``."""
    import sympy

    return sympy.Integer(int(value))


def size_symbol(size: Any) -> str:
    """Return the name of the symbol, such as ``u0``, if a fake tensor's size is a single symbol that depends on data.
    Return an empty string for any other size.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    lone = not isinstance(size, int) and size.node.expr.is_Symbol and free_unbacked_symbols(size)
    return str(size.node.expr) if lone else ""


def size_constant(size: Any) -> int | None:
    """Return the number to which the compiler has specialised a symbolic size so far. Return None if the size may still
    vary.
    """
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr) if expr.is_number else None


def size_range(size: Any) -> tuple[float, float]:
    """Return the least and the greatest value that a fake tensor's size may have, as ints. A missing bound is a float
    infinity.
    """
    if isinstance(size, int):
        return size, size
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    return _finite_bound(bounds.lower, float("-inf")), _finite_bound(bounds.upper, float("inf"))


def _finite_bound(value: Any, infinite: float) -> float:
    """Return the sympy number ``value`` as an int. Return ``infinite`` if the number is infinite."""
    return int(value) if value.is_Integer else infinite  # sympy's and torch's own infinities are not Integers


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether ``a`` and ``b`` share one storage. The tensors may be fake."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


@contextmanager
def data_dependent_sizes() -> Iterator[None]:
    """Return a context in which Dynamo keeps ops in its graphs even if their output sizes depend on data. Outside of
    the context, Dynamo breaks the graph at such an op.
    """
    import torch._dynamo

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Mark ``tensor.shape[dim]`` as varying for Dynamo, so that a call with another size does not recompile."""
    import torch._dynamo

    torch._dynamo.mark_dynamic(tensor, dim)


def graph_break_registry() -> Path | None:
    """Return the path of torch's JSON file that explains its graph breaks, or None if there is none. The compiler is
    not imported.
    """
    path = Path(torch.__file__).parent / "_dynamo" / "graph_break_registry.json"
    return path if path.is_file() else None


@contextmanager
def structured_trace(emit: Callable[[dict[str, Any], str], None]) -> Iterator[None]:
    """Return a context in which ``emit(metadata, payload)`` is called for each event of torch's structured compiler
    trace. ``metadata`` is a dict that describes the event. ``payload`` is a string such as a graph's code, or empty.
    """

    def receive(record: logging.LogRecord) -> None:
        """Pass the metadata and payload of a trace record to ``emit``. Ignore other records."""
        metadata = getattr(record, "metadata", None)
        if isinstance(metadata, dict):
            emit(metadata, getattr(record, "payload", None) or "")

    # The trace logger is torch's interface for log files. A handler gets the same records without a file. They have no
    # text, and the program's log must not fill with them.
    with listen_to_logger("torch.__trace", receive, propagates=False):
        yield


@contextmanager
def listen_to_logger(
    name: str, receive: Callable[[logging.LogRecord], None], *, propagates: bool | None = None
) -> Iterator[None]:
    """Return a context in which ``receive`` is called with the records of the logger ``name``, of all levels.

    ``propagates`` states whether the user's log gets them. By default, it gets them only if it got them before.
    """

    class Handler(logging.Handler):
        """A log handler that passes each record to ``receive``."""

        def emit(self, record: logging.LogRecord) -> None:
            """Pass the record to ``receive``."""
            receive(record)

    logger, handler = logging.getLogger(name), Handler(logging.DEBUG)
    level, propagate, shown = logger.level, logger.propagate, logger.isEnabledFor(logging.DEBUG)
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    # The level of the logger is lowered here, and the user's log would otherwise fill with its records.
    logger.propagate = propagate and shown if propagates is None else propagates
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def capture_graph(
    graph: torch.cuda.CUDAGraph, call: Callable[[], Any], pool: Any, mode: str = "global"
) -> tuple[Any, Exception | None]:
    """Capture ``call()`` into the CUDA graph ``graph`` on the current stream.

    Return its result and the exception with which the capture failed. The exception is None if the capture succeeded.
    ``pool`` is the memory pool of the graph, and ``mode`` is torch's ``capture_error_mode``.

    ``torch.cuda.graph`` is not used, since a failed end of the capture leaves its stream current. The allocator and the
    device's random generator then continue as if they were captured.
    """
    result, failure = None, None
    graph.capture_begin(pool=pool, capture_error_mode=mode)
    try:
        result = call()
    except Exception as e:
        # The capture has to be ended all the same.
        failure = e
    try:
        graph.capture_end()
    except RuntimeError as e:
        failure = failure or e
        _abandon_capture(torch.cuda.current_device(), pool)
    return result, failure


def compiles_to_cuda_graphs() -> bool:
    """Return whether the compilation at hand replays its kernels from CUDA graphs (``mode="reduce-overhead"``), which
    the host launches as a whole.
    """
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


def _abandon_capture(device: int, pool: Any) -> None:
    """Remove the memory pool and the random generator of ``device`` from a CUDA graph capture that could not be ended.
    Later calls then work.
    """
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        with suppress(RuntimeError, AttributeError):  # torch got this far by itself
            getattr(torch._C, name)(device, pool)
    # A generator that still counts as captured would raise at every later draw of random numbers.
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())  # a copy does not take itself for captured


def reset_compiler() -> None:
    """Discard all code that Dynamo has compiled in this process, and reset its counters and metrics."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()


def prepare_thread_for_cuda_graphs() -> None:
    """Give the calling thread the tables of CUDA graphs that ``mode="reduce-overhead"`` reads. Before torch 2.13 only
    the thread that imports Inductor's module of CUDA graphs has them, and in other threads the compiled code and
    ``reset_compiler`` raise ``AssertionError``.
    """
    from torch._inductor import cudagraph_trees

    tables: dict[str, Any] = {"tree_manager_containers": {}, "tree_manager_locks": defaultdict(threading.Lock)}
    for name, table in tables.items():
        if not hasattr(cudagraph_trees.local, name) and not torch._C._is_key_in_tls(name):
            setattr(cudagraph_trees.local, name, table)
            torch._C._stash_obj_in_tls(name, table)  # a thread of autograd gets these from the thread that calls it


@contextmanager
def silenced_vmap_fallback() -> Iterator[None]:
    """Let ``torch.vmap`` run an operator once for each sample without a warning in each call. The warning says that a
    batching rule would be faster. After the block it is on, as it is by default.
    """
    functorch: Any = torch._C._functorch  # torch gives the function no type
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        # torch has no function that returns whether it was on.
        functorch._set_vmap_fallback_warning_enabled(True)


def forget_compile_threads() -> None:
    """Discard Inductor's thread pool in a forked child process. The pool's threads do not exist there, so submitted
    work would never run.
    """
    if (compiling := sys.modules.get("torch._inductor.async_compile")) is not None:
        compiling.AsyncCompile.pool.cache_clear()


@dataclass(frozen=True)
class CompileCounts:
    """The compiler's counts of graphs, graph breaks and recompiles since the last ``reset_compiler``. ``break_reasons``
    has each reason of a graph break once.
    """

    graphs: int
    graph_breaks: int
    recompiles: int
    break_reasons: tuple[str, ...] = ()


def compile_counts() -> CompileCounts:
    """Return the numbers of graphs, graph breaks and recompiles since ``reset_compiler``, with the reasons of the
    breaks. They are read from Dynamo's counters.
    """
    from torch._dynamo.utils import counters, get_compilation_metrics

    breaks = counters["graph_break"]
    attempts = [str(m.compile_id) for m in get_compilation_metrics() if m.compile_id is not None]
    forward = {i for i in attempts if "/" in i}
    first = {i.split("/")[0] for i in forward}
    return CompileCounts(
        graphs=int(counters["stats"].get("unique_graphs", 0)),
        graph_breaks=sum(breaks.values()),
        # A compile id is "frame/attempt": the first attempt of each frame is no recompile.
        recompiles=len({i.split("_")[0] for i in forward}) - len(first),
        break_reasons=tuple(breaks),
    )


def cuda_driver_version() -> str:
    """Return the newest CUDA version that the installed driver supports, such as ``"13000"`` for 13.0. Return an empty
    string if torch does not report it.
    """
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    return str(ask()) if ask is not None else ""


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass of autograd."""
    return torch._C._current_graph_task_id() != -1
