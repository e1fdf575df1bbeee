"""Nodes of FX graphs in Inductor's passes: their fake values and metadata, and how to add new nodes.

The compiler is imported when the first graph is handled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from shiplap.torch_private.dynamo_record import record_graph
from shiplap.torch_private.pytree import leaves

if TYPE_CHECKING:
    from torch._ops import OpOverload


def node_value(node: Node) -> Any:
    """Return the fake value of a node at any level of the compiler. None if the node has none."""
    return node.meta.get("val", node.meta.get("example_value"))


def set_value(node: Node, value: Any, level: str) -> None:
    """Store the fake value of ``node`` under the name that later passes of this level read."""
    node.meta["example_value" if level == "pre-grad" else "val"] = value


def overload_of(node: Node) -> OpOverload | None:
    """Return the operator overload that ``node`` calls. None for methods and for Python functions."""
    target = node.target
    return target if node.op == "call_function" and isinstance(target, torch._ops.OpOverload) else None


def operator_name(target: Any) -> str:
    """Return the name of an operator as users write it (``aten.gelu``, ``tt::qmm``), or of a Python function."""
    if not isinstance(target, torch._ops.OpOverload):
        return str(getattr(target, "__name__", target))
    namespace, _, name = target._schema.name.partition("::")
    return f"aten.{name}" if namespace in ("aten", "prims") else f"{namespace}::{name}"


def size_hint_of(size: Any) -> int:
    """Return a size as a number: its value in the call that is compiled for. 0 for a data-dependent size."""
    if isinstance(size, int):
        return size
    value = size.node.hint
    return int(value) if value is not None else 0


def carry_over(new: Node, old: Node) -> None:
    """Copy source line, module, pass and the partitioner's tags from ``old`` to ``new``, which replaces it."""
    # Without these, error messages and profiles would not show the user's line for the new node.
    for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr", "partitioner_tag", "custom"):
        if key in old.meta:
            new.meta.setdefault(key, old.meta[key])


@contextmanager
def autocast_at(node: Node) -> Iterator[None]:
    """Enter the autocast that is active at ``node`` in a graph ahead of autograd."""
    from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

    entered: dict[Node, tuple[Any, ...]] = {}
    for before in takewhile(lambda n: n is not node, node.graph.nodes):
        if before.target is _enter_autocast:
            entered[before] = before.args
        elif before.target is _exit_autocast:
            entered.pop(before.args[0])
    with ExitStack() as stack:
        for args in entered.values():
            stack.enter_context(torch.autocast(*args))
        yield


def trace_to_nodes(fn: Callable[..., Any], values: Sequence[Any], level: str) -> Graph:
    """Return ``fn`` of fake values as nodes of ``level``, under the values' own fake mode and symbols.

    The output is the flattened list of results. Ahead of autograd no operator is decomposed.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    ahead = level == "pre-grad"
    table = None if ahead else select_decomp_table()

    def flat(*args: Any) -> list[Any]:
        return leaves(fn(*args))

    mode = next(v.fake_mode for v in values if hasattr(v, "fake_mode"))
    if ahead:
        with mode, torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = record_graph(fn, values)
        if graph is not None:
            graph.eliminate_dead_code()
            return graph
    with mode, enable_python_dispatcher(), torch.set_grad_enabled(ahead), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = make_fx(flat, table, tracing_mode="real", pre_dispatch=ahead)(*values)
    made.graph.eliminate_dead_code()
    return made.graph


def count_rewrite(rewrite: str, nodes: int) -> None:
    """Count one application of a rewrite, beside Inductor's own counters."""
    from torch._dynamo.utils import counters

    for name, more in (("pattern_matcher_count", 1), ("pattern_matcher_nodes", nodes), (f"shiplap_{rewrite}", 1)):
        counters["inductor"][name] += more


def rewrite_count(rewrite: str) -> int:
    """Return how often ``rewrite`` was applied since ``reset_compiler``."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"][f"shiplap_{rewrite}"])
