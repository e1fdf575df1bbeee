"""The operations after a call that could be fused into its kernel, as a separate graph that can be timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shiplap.cached_property import cached_property
from shiplap.inductor.bound_call import LoweredCall
from shiplap.torch_private import inductor_lowering
from shiplap.torch_private.graph_nodes import overload_of

LIMIT = 24  # nodes
VIEWS = frozenset({"view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand"})
CASTS = frozenset({"convert_element_type", "_to_copy"})


@dataclass(frozen=True)
class FusibleSurroundings:
    """A call of an op and the operations that may be fused with it.

    ``call`` is the call, and ``node`` its FX node. ``nodes`` are pointwise operations, casts and views that depend on
    the call's result, in graph order.
    """

    call: LoweredCall
    node: fx.Node
    nodes: tuple[fx.Node, ...]

    @staticmethod
    def around_call(call: LoweredCall) -> FusibleSurroundings:
        """Return ``call`` with at most 24 pointwise operations, casts and views that depend on its result."""
        node = inductor_lowering.current_node()
        inside: dict[fx.Node, None] = {node: None}
        for other in node.graph.nodes:
            if (
                len(inside) <= LIMIT
                and other is not node
                and _can_fuse(other)
                # Nodes are in topological order, so one pass finds all that depend on the call through others.
                and inside.keys() & set(other.all_input_nodes)
            ):
                inside[other] = None
        return FusibleSurroundings(call, node, tuple(n for n in inside if n is not node))

    @property
    def text(self) -> str:
        """The names of the operations in ``nodes``, such as ``add, gelu``, or an empty string if there are none. This
        text is part of the key of a stored choice.
        """
        return ", ".join(_operator_base_name(n) for n in self.nodes)

    @cached_property
    def _inputs(self) -> tuple[fx.Node, ...]:
        """The FX nodes that the call and the operations in ``nodes`` read, without these themselves, in the order of
        their first use.
        """
        inside = {self.node, *self.nodes}
        read = [i for n in (self.node, *self.nodes) for i in n.all_input_nodes if i not in inside]
        return tuple(dict.fromkeys(read))

    def graph(self) -> fx.GraphModule:
        """Return a new FX graph of the call and the operations in ``nodes``, with fixed sizes. Its inputs stand for
        ``_inputs``. Its outputs are the results that no node or a node outside of it reads.
        """
        graph, made = fx.Graph(), {}
        for node in self._inputs:
            made[node] = graph.placeholder(node.name)
        for node in (self.node, *self.nodes):
            made[node] = graph.node_copy(node, lambda n: made[n])
        inside = {self.node, *self.nodes}
        # A result that the rest of the graph reads has to be an output, or Inductor would remove its computation.
        leaves = [n for n in (self.node, *self.nodes) if not n.users or any(u not in inside for u in n.users)]
        graph.output(tuple(made[n] for n in leaves))
        return inductor_lowering.with_values(fx.GraphModule(torch.nn.Module(), graph), self.fakes())

    def fakes(self) -> list[Any]:
        """Return fake tensors of fixed sizes for the inputs of :meth:`graph`."""
        return [inductor_lowering.fixed_fake(n.meta["val"]) for n in self._inputs]

    def arguments(self, args: tuple[Any, ...]) -> list[Any]:
        """Return real tensors as inputs of :meth:`graph`. The inputs of the call come from ``args``, its arguments. The
        inputs of the other operations are filled with normally distributed numbers.
        """
        # Valid values for the op; for its neighbours any numbers will do.
        given = dict(zip(self.node.all_input_nodes, [a for a in args if isinstance(a, Tensor)], strict=False))
        return [inductor_lowering.real_tensor_like(n.meta["val"], given.get(n)) for n in self._inputs]


def _can_fuse(node: fx.Node) -> bool:
    """Return whether ``node`` is a pointwise operation, a cast or a view, and returns one tensor."""
    overload = overload_of(node)
    if overload is None:
        return False
    pointwise = torch.Tag.pointwise in overload.tags or _operator_base_name(node) in CASTS
    return isinstance(node.meta.get("val"), Tensor) and (pointwise or _operator_base_name(node) in VIEWS)


def _operator_base_name(node: fx.Node) -> str:
    """Return the name of the ATen operator that ``node`` calls, without namespace and overload, such as ``add``."""
    return str(node.target).split(".")[1]
