"""Fold the batch norm behind a convolution into the weights of the convolution, in a model that is evaluated.

The scale and shift of the norm become part of weights and bias. This costs nothing if parameters are constants
(``torch._inductor.config.freezing = True`` and no gradients). Otherwise it is a pass over the weights in each call. It
then saves nothing if the norm would be fused with the operators after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from shiplap.declare.code_digest import code_digest
from shiplap.rewrite.base import Rewrite, short_digest
from shiplap.rewrite.graph import (
    describe_node,
    fake_value,
    name_and_operator,
    place_replacement,
)
from shiplap.rewrite.match import Level, NearMiss, Obstacle, Outcome
from shiplap.rewrite.matcher import check_sizes, check_users, match_first_way
from shiplap.rewrite.normalize_call import canonical_arguments, canonical_name
from shiplap.rewrite.obstacle import RewriteObstacle
from shiplap.rewrite.pattern_samples import PatternSamples
from shiplap.rewrite.program import Program, proving
from shiplap.rewrite.signature import PatternSignature
from shiplap.torch_private.dynamo import is_folded


@dataclass(frozen=True)
class _NormAfterConv:
    """A batch norm in a graph. It may follow a convolution.

    Attributes:
        out: the node of the result.
        x: the node whose value is normalized.
        nodes: the nodes that compute ``out`` from ``x``.
        statistics: mean, variance, scale, shift and eps. The first four are nodes or None.
        batch: whether the norm computes its statistics from the batch.
    """

    out: Node
    x: Any
    nodes: tuple[Node, ...]
    statistics: tuple[Any, ...]
    batch: bool = False


class FoldedNorm(Rewrite):
    """A rewrite that folds the batch norm after a convolution into the weights of the convolution, in an evaluated
    model.

    Args:
        name: the name of the rewrite.
        operator: the name of the convolution, as ``shiplap.rewrite.normalize_call.canonical_name`` returns it.
        conv: a function that computes the convolution. It takes arguments by name, among them ``weight`` ``[co, ...]``
            and ``bias`` ``[co]``.
        examples: a function that yields programs of a convolution with a norm behind it, for the proof.
        written_out: by dtype, a function that computes the norm as models write it without ``batch_norm`` in that
            dtype. Its annotated arguments are ``(x, mean, var, scale, shift, eps)``.
        pays: a function of the convolution's arguments, which are fake tensors. It returns True, or the reason why
            folding is not worth it.
        always: if true, fold even if it is not worth it, and even if the weights are no constants.
        gradient: whether ``conv`` has a gradient.
    """

    level: Level = "pre-grad"

    def __init__(
        self,
        name: str,
        operator: str,
        conv: Callable[..., Tensor],
        examples: Callable[[], Iterator[Program]],
        *,
        written_out: Mapping[torch.dtype, Callable[..., Tensor]] = MappingProxyType({}),
        pays: Callable[[dict[str, Any]], bool | str] | None = None,
        always: bool = False,
        gradient: bool = True,
    ) -> None:
        """Store the arguments, which the class describes. Prepare the patterns of norms that are written without
        ``batch_norm``.
        """
        self.name, self.operator, self.conv, self.examples = name, operator, conv, examples
        self.written_out = {
            dtype: (fn, PatternSamples(fn, PatternSignature(f"{name}_norm", fn), (), None))
            for dtype, fn in written_out.items()
        }
        self.pays, self.always, self.gradient = pays, always, gradient
        self.anchors = frozenset({operator})

    def forced(self) -> FoldedNorm:
        """Return a copy of this rewrite with ``always`` set. It also folds norms where that is not worth it, and where
        the weights are no constants.
        """
        norms = {dtype: fn for dtype, (fn, _) in self.written_out.items()}
        return FoldedNorm(
            self.name,
            self.operator,
            self.conv,
            self.examples,
            written_out=norms,
            pays=self.pays,
            always=True,
            gradient=self.gradient,
        )

    @property
    def code_is_fully_hashed(self) -> bool:
        """Whether the result of the proof depends only on the code of Shiplap and torch. It is false if the convolution
        is that of an op, since the result then depends on the op's kernels.
        """
        torchs_own = self.conv is F.conv2d and self.examples is _conv_norm_programs and not self.written_out
        return torchs_own and super().code_is_fully_hashed  # else the kernels of an op decide as well

    @property
    def digest(self) -> str:
        """A digest of the rewrite's code, its name, its operator, its options and the functions that it was given."""
        own = [getattr(FoldedNorm, n) for n in ("apply", "_norms", "_spelled", "_fold_norm", "_declined", "_folded")]
        written = [fn for fn, _ in self.written_out.values()]
        given: list[Callable[..., object]] = [self.conv, *written, *([self.pays] if self.pays else [])]
        parts = [code_digest(*own, _fold_parameters, *given)]
        parts += [self.name, self.operator, str(self.always), str(self.gradient)]
        return short_digest(*parts)

    def programs(self) -> Iterator[Program]:
        """Return an iterator over the programs on which the rewrite is proven. A program is a function with arguments.
        Each computes a convolution followed by a batch norm.
        """
        return self.examples()

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Fold each batch norm after a convolution of ``graph`` into the convolution's weights, in place. Yield a
        ``Match`` for each folded norm, and a ``NearMiss`` with the reason for each that is not folded.
        """
        # Checked first: tracing the norms that are written out costs more than this walk.
        if not any(map(self._is_conv, graph.nodes)):
            return
        for norm in list(self._norms(graph)):
            if self._is_conv(norm.x):
                yield self._fold_norm(graph, norm)

    def _is_conv(self, node: Any) -> bool:
        """Return whether ``node`` is a call of the convolution into which this rewrite folds norms."""
        return isinstance(node, Node) and node.op.startswith("call") and canonical_name(node) == self.operator

    def _norms(self, graph: Graph) -> Iterator[_NormAfterConv]:
        """Yield all batch norms in ``graph``, after a convolution or not. They are calls of ``batch_norm``, and
        computations of the functions in ``written_out``.
        """
        for node in graph.nodes:
            if node.op.startswith("call") and canonical_name(node) == "batch_norm":
                given = canonical_arguments(node)
                names = ("running_mean", "running_var", "weight", "bias")
                statistics = (*map(given.get, names), given.get("eps", 1e-5))
                # Without running statistics torch normalises by the batch in evaluation, too.
                batch = bool(given.get("training")) or None in statistics[:2]
                yield _NormAfterConv(node, given.get("input"), (node,), statistics, batch)
        dtypes = {fake_value(n).dtype for n in graph.nodes if self._is_conv(n)}
        for fn, drawn in (self.written_out[d] for d in self.written_out if d in dtypes):
            yield from self._spelled(graph, fn, drawn)

    def _spelled(self, graph: Graph, fn: Callable[..., Tensor], drawn: PatternSamples) -> Iterator[_NormAfterConv]:
        """Yield the norms in ``graph`` that are written as the calls of ``fn`` instead of ``batch_norm``. A norm is
        left out if another node reads one of its intermediate values. ``drawn`` holds the arguments on which ``fn`` is
        traced to a pattern.
        """
        from shiplap.torch_private.inductor_passes import preserving_state

        with preserving_state():
            patterns = drawn.patterns(fn, self.level, graph)
        for node in graph.nodes:
            for pattern in patterns if node.op.startswith("call") else ():
                if canonical_name(node) != canonical_name(pattern.outputs[0]):
                    continue
                fit = match_first_way(pattern, node)
                if not (fit.stop or check_sizes(pattern, fit, any_rank=False) or check_users(pattern, fit)):
                    x, *statistics = map(fit.args.get, drawn.signature.parameters)
                    yield _NormAfterConv(node, x, tuple(fit.replaced), tuple(statistics))
                    break

    def _fold_norm(self, graph: Graph, norm: _NormAfterConv) -> Outcome:
        """Fold ``norm`` into the convolution before it, in place. Return the ``Match``, or a ``NearMiss`` with the
        reason if the norm is not folded.
        """
        conv: Node = norm.x
        named = canonical_arguments(conv)
        if norm.batch:
            return self._miss(
                norm.out, "constant", "the norm takes the statistics of the batch: the model is in training"
            )
        # The plain result of the convolution would still be needed.
        if other := next((u for u in conv.users if u not in norm.nodes), None):
            return self._miss(conv, "user", f"{name_and_operator(conv)} is read by {other.name}, too")
        if not (self.always or proving.get()) and (reason := self._declined(named)):
            return self._miss(norm.out, "cost", reason)
        # The written-out form has a gradient, which the folded one would lose.
        if not self.gradient and torch.is_grad_enabled() and fake_value(norm.out).requires_grad:
            return self._miss(norm.out, "argument", "a gradient is asked for, and the folded convolution has none")
        return place_replacement(
            graph,
            self.level,
            self.name,
            self._folded,
            [named, *norm.statistics],
            [norm.out],
            [conv, *norm.nodes],
            [(k, describe_node(v)) for k, v in named.items()],
        )

    def _declined(self, named: dict[str, Any]) -> str:
        """Return the reason why folding a norm into the convolution with the arguments ``named`` is not worth it. An
        example is a weight that is no constant. Return an empty string if it is worth it.
        """
        if not is_folded(named["weight"]):
            reason = f"{describe_node(named['weight'])} is no constant: folding would be a pass over it in each call"
            return f"{reason}, and the norm is fused with what follows"
        fakes = {k: fake_value(v) if isinstance(v, Node) else v for k, v in named.items()}
        answer = True if self.pays is None else self.pays(fakes)
        return "" if answer is True else answer or "it does not pay here"

    def _folded(self, named: dict[str, Any], *statistics: Any) -> Tensor:
        """Return the result of the convolution with the arguments ``named``, after a batch norm was folded into its
        weight and bias. ``statistics`` are the mean, variance, scale, shift and eps of the norm.

        This function is traced in place of convolution and norm.
        """
        weight, bias = _fold_parameters(named["weight"], named.get("bias"), *statistics)
        return self.conv(**{**named, "weight": weight, "bias": bias})

    def _miss(self, node: Node, obstacle: Obstacle, reason: str) -> NearMiss:
        """Return a ``NearMiss`` of a norm that is not folded, with this kind of obstacle and reason at ``node``."""
        return self.near_miss(RewriteObstacle(node, obstacle, reason), of=2)


def _fold_parameters(
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias of a convolution into which a batch norm is folded. They are computed in the
    promoted dtype of the weight and the statistics, and cast to the dtype of ``weight``. ``bias``, ``scale`` and
    ``shift`` are None if the convolution or the norm has none.
    """
    factor = torch.rsqrt(var + eps) if scale is None else torch.rsqrt(var + eps) * scale
    moved = (-mean if bias is None else bias - mean) * factor
    # The output channels are the first dim of the weights.
    weights = weight * factor.view(-1, *[1] * (weight.dim() - 1))
    return weights.to(weight.dtype), (moved if shift is None else moved + shift).to(weight.dtype)


def statistics(co: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random tensors of ``co`` elements as the mean, variance, scale and shift of a batch norm, in this order.
    The variances are at least 0.5.
    """
    return torch.randn(co), 0.5 + torch.rand(co), 1 + torch.randn(co) / 4, torch.randn(co)


def _conv_norm_programs() -> Iterator[Program]:
    """Yield the programs on which the folding of norms into ``conv2d`` is proven. A program is a function with
    arguments. Each computes a convolution followed by a batch norm.
    """
    for bias, stride, padding, groups in ((True, 1, 1, 1), (False, (2, 1), 0, 2)):

        def conv(
            x: Tensor,
            weight: Tensor,
            mean: Tensor,
            var: Tensor,
            scale: Tensor,
            shift: Tensor,
            b: Tensor | None = None,
            stride: Any = stride,
            padding: Any = padding,
            groups: int = groups,
        ) -> Tensor:
            """Return the evaluated batch norm of ``conv2d`` of ``x``. The convolution has the bias ``b`` if it is
            given. ``stride``, ``padding`` and ``groups`` are its options.
            """
            out = F.conv2d(x, weight, b, stride, padding, 1, groups)
            # Running statistics of a module are buffers without gradients.
            return F.batch_norm(out, mean.detach(), var.detach(), scale, shift, False, 0.1, 1e-3)

        args = [torch.randn(2, 4, 7, 6), torch.randn(6, 4 // groups, 3, 3) / 4, *statistics(6)]
        yield Program(
            conv, (*args, torch.randn(6)) if bias else tuple(args), f"bias={bias} stride={stride} groups={groups}"
        )


conv_norm = FoldedNorm("conv_norm", "conv2d", F.conv2d, _conv_norm_programs)
