"""A convolution and the batch norm behind it, in a model that is evaluated: one convolution with other weights.

The norm's scale and shift go into weights and bias. That is free where parameters are constants
(``torch._inductor.config.freezing = True`` and no gradients); otherwise it is a pass over the weights in each call, and
saves nothing where the norm would be fused with what follows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from shiplap.compat.constants import folded
from shiplap.op.source import source_digest
from shiplap.rewrite.base import Program, Rewrite, proving
from shiplap.rewrite.graph import describe, operator_name, place, source_line, value
from shiplap.rewrite.match import Level, NearMiss, Obstacle, Outcome
from shiplap.rewrite.normal import arguments, called

__all__ = ["FoldedNorm", "conv_norm"]


class FoldedNorm(Rewrite):
    """Folds an evaluated ``batch_norm`` into the convolution before it.

    Args:
        name: of the rewrite. ``operator``: of the convolution, as in ``shiplap.rewrite.normal.called``.
        conv: what computes it, of arguments by name; ``weight`` ``[co, ...]`` and ``bias`` ``[co]`` among them.
        examples: programs of a convolution with a norm behind it.
        always: fold weights that are no constants, too. ``gradient``: whether ``conv`` has one.
    """

    level: Level = "pre-grad"

    def __init__(
        self, name: str, operator: str, conv: Callable[..., Tensor], examples: Callable[[], Iterator[Program]],
        *, always: bool = False, gradient: bool = True,
    ) -> None:  # fmt: skip
        self.name, self.operator, self.conv, self.examples = name, operator, conv, examples
        self.always, self.gradient = always, gradient

    @property
    def digest(self) -> str:
        parts = [source_digest(f) for f in (FoldedNorm.apply, FoldedNorm._at, _parameters, self.conv)]
        parts += [self.name, self.operator, str(self.always), str(self.gradient)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    def programs(self) -> Iterator[Program]:
        return self.examples()

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        for node in list(graph.nodes):
            if node.op.startswith("call") and called(node) == "batch_norm":
                before = arguments(node).get("input")
                if isinstance(before, Node) and before.op.startswith("call") and called(before) == self.operator:
                    yield self._at(graph, node, before)

    def _at(self, graph: Graph, norm: Node, conv: Node) -> Outcome:
        given, named = arguments(norm), arguments(conv)
        mean, var, eps = given.get("running_mean"), given.get("running_var"), given.get("eps", 1e-5)
        if given.get("training") or mean is None or var is None:
            return self._miss(norm, "constant", "the norm takes the statistics of the batch: the model is in training")
        if len(conv.users) > 1:
            other = next(u for u in conv.users if u is not norm)
            return self._miss(conv, "user", f"{conv.name} ({operator_name(conv)}) is read by {other.name}, too")
        if not (self.always or proving.get() or folded(named["weight"])):
            what = describe(named["weight"])
            reason = f"{what} is no constant: folding would be a pass over it in each call"
            return self._miss(norm, "cost", f"{reason}, and the norm is fused with what follows")
        if not self.gradient and torch.is_grad_enabled() and value(norm).requires_grad:
            return self._miss(norm, "argument", "a gradient is asked for, and the folded convolution has none")
        scale, shift = given.get("weight"), given.get("bias")
        args = [named, mean, var, scale, shift, eps]
        return place(graph, self.level, self.name, self._folded, args, [norm], [conv, norm],
                     [(k, describe(v)) for k, v in named.items()])  # fmt: skip

    def _folded(self, named: dict[str, Any], *statistics: Any) -> Tensor:
        weight, bias = _parameters(named["weight"], named.get("bias"), *statistics)
        return self.conv(**{**named, "weight": weight, "bias": bias})

    def _miss(self, node: Node, obstacle: Obstacle, reason: str) -> NearMiss:
        return NearMiss(self.name, self.level, node.name, source_line(node), obstacle, reason, 1, 2)


def _parameters(
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Weight and bias of the folded convolution, computed in the dtype of the statistics."""
    factor = torch.rsqrt(var + eps) if scale is None else torch.rsqrt(var + eps) * scale
    moved = (-mean if bias is None else bias - mean) * factor
    weights = weight * factor.view(-1, *[1] * (weight.dim() - 1))
    return weights.to(weight.dtype), (moved if shift is None else moved + shift).to(weight.dtype)


def statistics(co: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean, variance, scale and shift of ``co`` channels, for programs."""
    return torch.randn(co), 0.5 + torch.rand(co), 1 + torch.randn(co) / 4, torch.randn(co)


def _examples() -> Iterator[Program]:
    for bias, stride, padding, groups in ((True, 1, 1, 1), (False, (2, 1), 0, 2)):

        def conv(
            x: Tensor, weight: Tensor, mean: Tensor, var: Tensor, scale: Tensor, shift: Tensor, b: Tensor | None = None,
            stride: Any = stride, padding: Any = padding, groups: int = groups,
        ) -> Tensor:  # fmt: skip
            out = F.conv2d(x, weight, b, stride, padding, 1, groups)
            return F.batch_norm(out, mean.detach(), var.detach(), scale, shift, False, 0.1, 1e-3)

        args = [torch.randn(2, 4, 7, 6), torch.randn(6, 4 // groups, 3, 3) / 4, *statistics(6)]
        yield Program(
            conv, (*args, torch.randn(6)) if bias else tuple(args), f"bias={bias} stride={stride} groups={groups}"
        )


conv_norm = FoldedNorm("conv_norm", "conv2d", F.conv2d, _examples)
