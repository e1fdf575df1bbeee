"""Calls that hand back their argument: casts to the dtype it has, dropout of a model that is evaluated.

Patterns need not spell them then. They cost nothing in compiled code; removing them saves nothing either.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from shiplap.declare.code_digest import code_digest
from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.graph import describe, place, value
from shiplap.rewrite.match import Level, Outcome
from shiplap.rewrite.normalize_call import arguments, called
from shiplap.rewrite.program import Program


class NoOps(Rewrite):
    """Takes out ``x.to(x.dtype)`` and ``dropout`` that drops nothing."""

    name = "no_ops"
    level: Level = "pre-grad"
    anchors = frozenset({"to", "dropout"})

    @property
    def digest(self) -> str:
        return code_digest(NoOps.apply, _idle_cast, _idle_dropout)

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        for node in list(graph.nodes):
            if node.op.startswith("call") and (_idle_cast(node) or _idle_dropout(node)):
                given = node.args[0]
                yield place(graph, self.level, self.name, lambda x: x, [given], [node], bound=[("x", describe(given))])

    def programs(self) -> Iterator[Program]:
        yield Program(_idle, (torch.randn(3, 4),), "a cast and a dropout")


def _idle(x: Tensor) -> Tensor:
    return F.dropout(torch.sin(x).to(torch.float32), 0.3, False).cos()


def _idle_cast(node: Node) -> bool:
    """``x.to(dtype)`` and nothing else asked for."""
    if called(node) != "to" or len(node.args) + len(node.kwargs) != 2 or not isinstance(node.args[0], Node):
        return False
    (asked,) = (*node.args[1:], *node.kwargs.values())
    held = value(node.args[0])
    return isinstance(held, Tensor) and asked == held.dtype


def _idle_dropout(node: Node) -> bool:
    if called(node) != "dropout" or not node.args or not isinstance(node.args[0], Node):
        return False
    given = arguments(node)
    return given.get("training", True) is False or (given.get("p", 0.5) == 0 and not given.get("inplace"))


no_ops = NoOps()
