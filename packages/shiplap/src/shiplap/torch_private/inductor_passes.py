"""Inductor's hooks for custom passes: install a pass, and capture a function as the pass would see it.

Passes with a uuid are part of every cache key. A pass of Shiplap in the pre-grad place runs ahead of the cache look-up,
so that the key covers its result. That is the only way before torch 2.13, and an option since then.
"""

from __future__ import annotations

import os
import re
import threading
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import torch
from torch._functorch import config as functorch
from torch._inductor import config, custom_graph_pass
from torch.fx import Graph, Node

from shiplap.torch_private import mark_dynamic
from shiplap.torch_private.graph_nodes import node_value, record_graph

PLACES = {
    "pre-grad": "pre_grad_custom_pass",
    "joint": "joint_custom_pre_pass",
    "post-grad": "post_grad_custom_pre_pass",
}

# An option of Inductor under which passes in the pre-grad place run ahead of the cache look-up. Such a pass may read
# values of buffers, which are no part of a key, and adds guards on them to each compilation.
EARLY = {"pre_grad_pass_timing": "early"} if hasattr(config, "pre_grad_pass_timing") else {}

# The class of passes with an argument for inference, since torch 2.13.
_INFORMED = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())


class InductorPass(custom_graph_pass.CustomGraphPass):
    """A pass that first calls the passes which the user has configured at one option of Inductor, and then
    ``run(graph)``. Its uuid combines its own identity with the uuids of the user's passes.

    A plain function has no uuid. If one of the user's passes is a plain function, no graph is cached. Without this pass
    none would be cached either.
    """

    def __init__(self, run: Callable[[Graph], None], identity: Callable[[], Any], inner: Any = None) -> None:
        """Make a pass that calls ``run`` on a graph after ``inner``, the pass or passes of the user.

        ``identity`` returns its part of the cache key.
        """
        self.run, self.identity, self.users = run, identity, 0
        self.inner: tuple[Any, ...] = tuple(inner) if isinstance(inner, (list, tuple)) else (inner,) if inner else ()

    def __call__(self, graph: Graph, is_inference: bool = True) -> None:
        """Run the passes of the user, then this pass, on ``graph``. ``is_inference`` is passed on to those of the
        user's passes that take it.
        """
        for each in self.inner:
            informed = _INFORMED and isinstance(each, _INFORMED)
            each(graph, is_inference) if informed else each(graph)
        self.run(graph)

    def uuid(self) -> Any | None:
        """Return the values by which this pass enters the key of cached graphs. Return None if no graph may be cached.

        The values are the identity of this pass, and those of the user's passes around which it is installed. The
        result is None if one of those passes has no uuid.
        """
        inner = [p.uuid() if isinstance(p, custom_graph_pass.CustomGraphPass) else None for p in self.inner]
        return None if None in inner else ("shiplap", self.identity(), *inner)

    def __deepcopy__(self, memo: dict[int, Any]) -> InductorPass:
        """Return the pass itself instead of a copy, because torch copies its configuration deeply."""
        return self  # torch copies its configuration

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the pass's identity, by which it is pickled. Before torch 2.13, the key of a cached graph contains the
        pickled pass.
        """
        identity = self.uuid()
        if identity is None:
            raise TypeError("a pass without uuid is no part of a key")
        return tuple, (identity,)


_lock = threading.Lock()


def _after_fork() -> None:
    """Replace the lock in a forked child process. The thread that may hold the old lock does not exist there."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def install_passes(make: Callable[[str, Any], InductorPass]) -> Iterator[None]:
    """Return a context in which ``make(level, previous pass)`` is installed at each option of Inductor's configuration
    that holds a pass over graphs.

    ``level`` is the stage of the compilation. An option that already has a pass of Shiplap keeps it. The configuration
    belongs to the process before torch 2.13, and to the thread since then. A pass therefore stays until the last
    context that found it has ended. ``make`` must return a pass that does nothing in other threads. If other code has
    installed another pass meanwhile, that pass stays.
    """
    handles = {level: _enter_place(place, level, make) for level, place in PLACES.items()}
    try:
        with config.patch(EARLY):
            yield
    finally:
        for level, place in PLACES.items():
            _leave_place(place, handles[level])


def _enter_place(place: str, level: str, make: Callable[[str, Any], InductorPass]) -> InductorPass:
    """Install ``make(level, user's pass)`` at ``place`` unless a pass of Shiplap is there.

    Count one more user of the pass and return it. ``place`` is an option of Inductor's configuration that holds a pass.
    """
    with _lock:
        # The look-up and the installation are one step under the lock, as two threads may enter at once.
        there = getattr(config, place)
        if not (isinstance(there, InductorPass) and there.users):
            there = make(level, there)
            setattr(config, place, there)
        there.users += 1
        return there


def _leave_place(place: str, entered: InductorPass) -> None:
    """Count one user less of the pass ``entered`` at ``place``, an option of Inductor's configuration.

    After the last user, put the user's own pass back unless other code has installed another pass meanwhile.
    """
    with _lock:
        entered.users -= 1
        # Other code may have put its own pass here meanwhile, which must not be removed.
        if not entered.users and getattr(config, place) is entered:
            before = entered.inner
            setattr(config, place, list(before) if len(before) > 1 else before[0] if before else None)


def user_pass(level: str) -> Any:
    """Return the pass, or list of passes, that the user has configured for ``level``, a stage of Inductor's
    compilation.

    The pass that Shiplap has installed around it is left out.
    """
    there = getattr(config, PLACES[level])
    return list(there.inner) if isinstance(there, InductorPass) and there.users else there


def compile_with(graph: Any, inputs: Sequence[Any], mode: str | None, options: dict[str, Any]) -> Callable[..., Any]:
    """Compile an FX graph from Dynamo with Inductor and return the function. ``mode`` is a mode of ``torch.compile``,
    or None for no mode. ``options`` are added to the options that ``mode`` implies.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    made: Any = compile_fx(graph, inputs, config_patches={**(list_mode_options(mode) if mode else {}), **options})
    compiled: Callable[..., Any] = made
    return compiled


class _Uncached(InductorPass):
    """A pass without a uuid. Torch neither reads a cached graph nor caches one if this pass is installed."""

    def uuid(self) -> Any | None:
        """Return None, so that torch caches no graph that this pass has seen."""
        return None


def active_autocasts() -> tuple[tuple[str, torch.dtype], ...]:
    """Return a pair of device type and dtype for each device type whose autocast is on in this thread. Autocast casts
    to that dtype.
    """
    kinds = ("cpu", "cuda", "xpu", "mps", torch._C._get_privateuse1_backend_name())
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


@contextmanager
def without_autocast() -> Iterator[None]:
    """Return a context in which autocast is off for all device types in this thread."""
    with ExitStack() as stack:
        for kind, _ in active_autocasts():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def preserving_state() -> Iterator[None]:
    """Return a context for a compilation inside another one. At its end torch's counters and event log are as before.

    One thread at a time is inside the context, by the lock that every compilation holds. If there were a second lock,
    two threads that took both locks in different orders would wait for each other forever.
    """
    from torch._dynamo.convert_frame import compile_lock

    elsewhere = torch.get_default_device().type != "cpu"  # samples name their device, or are on the CPU
    with compile_lock, torch.device("cpu") if elsewhere else nullcontext(), _as_it_was():
        yield


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Return a context outside dispatch modes and inference mode. After it, torch's counters and event log are as
    before.
    """
    from torch._dynamo import utils
    from torch.utils._python_dispatch import _disable_current_modes

    kept = {group: dict(of) for group, of in utils.counters.items()}
    logger = utils.get_chromium_event_logger()
    stacks = [(s, list(s)) for s in (logger.get_stack(), logger.get_pt2_compile_substack())]
    data = logger.get_event_data()
    held = dict(data)
    try:
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for stack, before in stacks:
            # In place, since the logger holds these objects.
            stack[:] = before
        data.clear()
        data.update(held)
        for group, of in utils.counters.items():
            of.clear()
            of.update(kept.get(group, {}))


class _Stop(BaseException):
    """An exception that ends a compilation once its graph was captured. No handler of torch treats it as a failure."""


@dataclass(frozen=True)
class CapturedGraph:
    """The graph of a function at one stage of Inductor's compilation.

    ``roles`` maps each placeholder of ``graph`` to what it stands for. This is the index of a tensor argument,
    ``"size"`` for a symbol, or ``"grad"`` for the gradient of an output. The gradients are in the order of outputs.
    """

    graph: Graph
    roles: dict[Node, int | str]


def capture_graph(
    fn: Callable[..., Any], tensors: Sequence[torch.Tensor], level: str, *, dynamic: bool | Collection[int]
) -> CapturedGraph:
    """Return the FX graph of ``fn(*tensors)`` as Inductor has it at ``level``, a stage of the compilation such as
    ``"pre-grad"``.

    The result also says what each placeholder stands for. The compilation ends at that stage. If ``dynamic`` is True,
    all sizes of at least 2 are symbols. If it is a collection, those of these sizes that it contains are symbols. If it
    is False, all sizes are numbers. Equal sizes are one symbol. Torch raises its errors for a function that cannot be
    one graph. Raise ``ValueError`` if the function computes nothing from tensors.
    """
    from torch._dynamo import config as dynamo

    # The roles are read ahead of autograd, where placeholders still have Dynamo's names.
    order: list[int | str] = []
    seen: list[Graph] = []
    symbols = () if isinstance(dynamic, bool) else dynamic

    def note(graph: Graph) -> None:
        """Record which argument each placeholder of ``graph`` stands for. This pass runs before autograd, and ends the
        compilation if the graph of this stage is wanted.
        """
        order.extend(_placeholder_role(n) for n in graph.nodes if n.op == "placeholder")
        if level == "pre-grad":
            stop(graph)

    def stop(graph: Graph) -> None:
        """Keep ``graph`` and raise ``_Stop``, which ends the compilation. This pass runs at the wanted stage."""
        seen.append(graph)
        raise _Stop

    options: dict[str, Any] = {**dict.fromkeys(PLACES.values()), "fx_graph_cache": False}
    options |= {PLACES[level]: _Uncached(stop, str), PLACES["pre-grad"]: InductorPass(note, lambda: "capture")}
    uncached = functorch.patch(enable_autograd_cache=False)  # nothing ends up there, and a key reads all of torch
    # A collection takes longer than a trace, and a shape that is met once costs more to remember than to compute.
    brief = dynamo.patch(run_gc_after_compile=False, fake_tensor_cache_enabled=False)
    with preserving_state(), suppress(_Stop), uncached, brief, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = [t.detach().requires_grad_(t.requires_grad) for t in tensors]  # marks stay on a tensor
        for t in own if dynamic else ():
            for dim, size in enumerate(t.shape):
                if size > 1 and (dynamic is True or size in symbols):
                    mark_dynamic(t, dim)
        torch.compile(_of_its_own(fn), dynamic=False, fullgraph=True, options=options)(*own)
    if not seen:
        raise ValueError("it computes nothing from tensors")
    # Every placeholder behind those of ``order`` is a gradient.
    roles = dict(zip((n for n in seen[0].nodes if n.op == "placeholder"), chain(order, repeat("grad")), strict=False))
    return CapturedGraph(seen[0], roles)


def record_captured(fn: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> CapturedGraph | None:
    """Return the graph of ``fn(*tensors)`` from before autograd, recorded from its calls of torch functions.

    This takes a third of Dynamo's time. Return None if a call cannot be recorded, or if a result is an argument.
    """
    from torch._dynamo import config as dynamo
    from torch._subclasses.fake_tensor import FakeTensorMode

    with dynamo.patch(fake_tensor_cache_enabled=False):  # a mode reads it once; a cache of shapes met once costs more
        mode = FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in tensors]
    with preserving_state(), mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            graph = record_graph(fn, fakes)
        except Exception:  # Dynamo reports the error of the function
            return None
    if graph is None:
        return None
    graph.eliminate_dead_code()
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    if not output.all_input_nodes or any(n.op == "placeholder" for n in output.all_input_nodes):
        return None
    return CapturedGraph(graph, {n: i for i, n in enumerate(placeholders)})


def _placeholder_role(node: Node) -> int | str:
    """Return the index of the argument that the placeholder ``node`` stands for, or ``"size"`` for a symbolic size.
    Raise ``ValueError`` for a tensor that is no argument.
    """
    if isinstance(node_value(node), torch.SymInt):
        return "size"
    match = re.fullmatch(r"L_tensors_(\d+)_", str(node.target))
    if match is None:
        raise ValueError(f"it uses a tensor that is no argument: {node.target}")
    return int(match[1])


def _of_its_own(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of ``fn`` with a code object of its own. The copy takes and returns the same. Dynamo stores sizes
    and recompile limits by code object.
    """

    def run(*tensors: torch.Tensor) -> Any:
        """Call the wrapped function with ``tensors`` and return its results. This function has a new code object."""
        return fn(*tensors)

    return types.FunctionType(run.__code__.replace(), run.__globals__, "run", None, run.__closure__)
