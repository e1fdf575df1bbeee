"""Compile in parallel the kernels that later calls in the graph will probably need.

Inductor lowers one node after the other, so the compiler of each kernel would wait for the proof of the one before it.
At the first call of a graph, the kernels that will probably be proven for all of its calls are therefore sent to the
worker processes of Inductor. Each kind is sent once. A wrong guess only costs time. The proof of a call renders its own
candidate, and finds its kernel in Triton's cache or compiles it.

The progress of the compilation is shown on stderr after a few seconds: on a terminal, or if the environment variable
``SHIPLAP_PROGRESS`` is 1.
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shiplap.dispatch import Op, registry
from shiplap.inductor.bound_call import LoweredCall
from shiplap.inductor.prove_candidate import known_verdict
from shiplap.inductor.template_candidate import TemplateCandidate
from shiplap.render.console import make_console
from shiplap.settings import settings
from shiplap.torch_private import inductor_templates
from shiplap.torch_private.graph_nodes import overload_of

if TYPE_CHECKING:
    from rich.status import Status


log = logging.getLogger(__name__)
Likely = Callable[
    [LoweredCall], TemplateCandidate | None
]  # the candidate that will probably be proven first for a call
# The graph is the key, so that its progress is freed with it, also when its lowering fails.
_graphs: weakref.WeakKeyDictionary[Any, CompileProgress] = weakref.WeakKeyDictionary()


def precompile_later_calls(call: LoweredCall, likely: Likely) -> CompileProgress:
    """Return the progress counter of the graph that contains ``call``.

    At the first call of a graph with several calls, also start to compile the kernels of all its calls in worker
    processes. ``likely`` returns the candidate that will probably be used for a call, or None.
    """
    graph = inductor_templates.current_graph()
    progress = _graphs.get(graph)
    if progress is None:
        behind = _later_calls(call)
        _graphs[graph] = progress = start_progress(1 + len(behind), graph)
        kinds: set[Any] = set()
        # A single call gains nothing: its own proof starts the compiler at once.
        for op, node in [(call.op, call.node), *behind] if behind else ():
            _start_likely_kernel(op, node, likely, kinds)
    return progress


def _later_calls(call: LoweredCall) -> list[tuple[Op, torch.fx.Node]]:
    """Return the calls after ``call`` in its graph whose ops have kernel templates for its device. They are pairs of an
    op and an FX node, in the order of the graph.
    """
    ops: dict[Any, Op] = {
        overload: op
        for op in registry.declared_op_list()
        if op.templates
        for overload in (op.overload, op.below_autograd)
    }
    listed = [(ops.get(overload_of(n)), n) for n in inductor_templates.nodes_behind(call.node)]
    return [(op, n) for op, n in listed if op is not None and call.device.type in op.templates]


def _start_likely_kernel(op: Op, node: torch.fx.Node, likely: Likely, kinds: set[Any]) -> None:
    """Start to compile the kernel of the candidate that ``likely`` returns for the call ``node`` of ``op``. Do nothing
    if ``kinds`` contains the description of an equal call, and otherwise add the description to it. Errors are only
    logged.
    """
    values = {n.name: n.meta.get("val") for n in node.all_input_nodes}
    rest = [a for a in (*node.args, *node.kwargs.values()) if not isinstance(a, torch.fx.Node)]
    # Equal layers of a network have equal kernels, of which one compilation is enough.
    kind = op.spec.name, *map(_describe_argument, values.values()), str(rest)
    if kind in kinds:
        return
    kinds.add(kind)
    try:
        # The lowering of the candidate reads the current node, which is an earlier one now.
        with inductor_templates.lowering_at(node), inductor_templates.stand_ins(values) as nodes:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: nodes.get(n.name, values[n.name]))
            with LoweredCall.bind(op, args, kwargs) as call:
                _start_compiler(likely(call))
    except Exception:  # the error is raised again in the proof
        log.debug("not looked at ahead: %s", node, exc_info=True)


def _start_compiler(candidate: TemplateCandidate | None) -> None:
    """Start to compile the kernel of ``candidate`` in another process, unless the result of its test is known already.
    Do nothing if ``candidate`` is None, or if its template reads tables or copied inputs.
    """
    if candidate is None or candidate.template.tables or candidate.template.innermost:
        return  # tables and copies would stay in the graph
    if known_verdict(candidate) is None:
        started = candidate.compile_apart()
        log.debug("%s %s", candidate.label, "is compiled apart" if started else "waits for its turn")


def _describe_argument(value: Any) -> str:
    """Return a string for an argument of a call that is equal for equal calls. For a tensor it holds the dtype, shape,
    strides and device. For any other value it is ``str(value)``.
    """
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} {list(value.stride())} {value.device}"
    return str(value)


PATIENCE = 3.0  # seconds before anything is said
EACH = 5.0  # seconds from one line to the next, where lines stay


@dataclass
class CompileProgress:
    """The progress of lowering a graph. ``done`` is the number of calls of ops whose lowering has begun, out of
    ``total``. ``began`` is the time at which the lowering of the graph began, as ``time.monotonic()`` returned it.
    """

    total: int
    done: int = 0
    began: float = field(default_factory=time.monotonic)
    _last: float = 0.0
    _status: Status | None = None

    def step(self, op: str) -> None:
        """Add 1 to ``done``, since the lowering of a call of the op named ``op`` begins. If the compilation has taken
        three seconds and progress is wanted, show the count and ``op`` on stderr. With the last call, remove the status
        line.
        """
        self.done += 1
        seconds = time.monotonic() - self.began
        # Most compilations end sooner, and a line for each of them would be noise.
        if seconds < PATIENCE or not _progress_is_wanted():
            return
        text = f"torch.compile: {op}, kernel {self.done} of {self.total}, {seconds:.0f} s"
        if sys.stderr.isatty():
            self._on_terminal(text)
        # Lines in a log stay, so there are few of them.
        elif seconds - self._last >= EACH:
            self._last = seconds
            print(text, file=sys.stderr, flush=True)
        if self.done >= self.total:
            self.end()

    def _on_terminal(self, text: str) -> None:
        """Show ``text`` in the status line of the terminal. The first call starts the status line."""
        if self._status is None:
            self._status = make_console(stderr=True).status(text)
            self._status.start()
        self._status.update(text)

    def end(self) -> None:
        """Remove the status line from the terminal, if there is one."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def start_progress(total: int, graph: Any) -> CompileProgress:
    """Return a progress counter for the ``total`` calls of ``graph`` that are lowered to kernels. Its status line on
    the terminal is removed at the last call, or when ``graph`` is freed.
    """
    progress = CompileProgress(total)
    # Lowering may fail before the last call, and a status line would stay on the terminal.
    weakref.finalize(graph, progress.end)
    return progress


def _progress_is_wanted() -> bool:
    """Return whether progress is shown. This is so if stderr is a terminal, or if the environment variable
    ``SHIPLAP_PROGRESS`` asks for it.
    """
    return settings().progress or sys.stderr.isatty()
