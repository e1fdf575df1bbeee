"""Remove calls that return their argument, such as a cast to the dtype that it has, or a dropout of an evaluated model.

Patterns then need no variants with these calls. The calls cost nothing in compiled code, so their removal saves nothing
either.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from shiplap.declare.code_digest import code_digest
from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.graph import describe_node, fake_value, place_replacement
from shiplap.rewrite.match import Level, Outcome
from shiplap.rewrite.normalize_call import canonical_arguments, canonical_name
from shiplap.rewrite.program import Program


class NoOps(Rewrite):
    """A rewrite that removes ``x.to(x.dtype)`` and ``dropout`` calls that drop nothing."""

    name = "no_ops"
    level: Level = "pre-grad"
    anchors = frozenset({"to", "dropout"})

    @property
    def digest(self) -> str:
        """A digest of the code that finds and removes casts and dropouts that change nothing."""
        return code_digest(NoOps.apply, _is_cast_to_own_dtype, _is_disabled_dropout)

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Remove calls that return their input unchanged from ``graph``, in place. Yield a ``Match`` for each, or a
        ``NearMiss`` if it cannot be removed. Such calls are casts to the dtype that a tensor already has, and disabled
        dropouts.
        """
        for node in list(graph.nodes):
            if node.op.startswith("call") and (_is_cast_to_own_dtype(node) or _is_disabled_dropout(node)):
                given = node.args[0]
                yield place_replacement(
                    graph, self.level, self.name, lambda x: x, [given], [node], bound=[("x", describe_node(given))]
                )

    def programs(self) -> Iterator[Program]:
        """Yield the one function with arguments on which the rewrite is proven. It has a cast and a dropout that change
        nothing.
        """
        yield Program(_run_idle_calls, (torch.randn(3, 4),), "a cast and a dropout")


def _run_idle_calls(x: Tensor) -> Tensor:
    """Return the cosine of the sine of a float32 tensor ``x``, with a cast and a dropout in between that change
    nothing.
    """
    return F.dropout(torch.sin(x).to(torch.float32), 0.3, False).cos()


def _is_cast_to_own_dtype(node: Node) -> bool:
    """Return whether ``node`` is ``x.to(dtype)`` with the dtype of ``x`` and no further argument."""
    # A further argument may ask for a copy, or for another device.
    if canonical_name(node) != "to" or len(node.args) + len(node.kwargs) != 2 or not isinstance(node.args[0], Node):
        return False
    (asked,) = (*node.args[1:], *node.kwargs.values())
    held = fake_value(node.args[0])
    return isinstance(held, Tensor) and asked == held.dtype


def _is_disabled_dropout(node: Node) -> bool:
    """Return whether ``node`` is a dropout that returns its argument unchanged. It is not in training, or has
    probability 0 and is not in-place.
    """
    if canonical_name(node) != "dropout" or not node.args or not isinstance(node.args[0], Node):
        return False
    given = canonical_arguments(node)
    # In-place dropout of nothing still returns its argument, but the call is a write in the graph.
    return given.get("training", True) is False or (given.get("p", 0.5) == 0 and not given.get("inplace"))


no_ops = NoOps()
