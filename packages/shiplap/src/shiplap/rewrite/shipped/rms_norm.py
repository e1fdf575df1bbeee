"""RMS norm written out, ``weight * x * rsqrt(mean(x ** 2) + eps)``: torch's ``rms_norm``.

Recognised by what is computed: from each reciprocal root of a mean of squares the pass follows the scaled values down,
through casts, to the product with a weight of one dim, which may be computed from a parameter (``1 + weight``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from shiplap.op.source import source_digest
from shiplap.rewrite import trail
from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.graph import describe, operator_name, place, source_line, value
from shiplap.rewrite.match import Level, NearMiss, Obstacle, Outcome
from shiplap.rewrite.program import Program

__all__ = ["RmsNorm", "rms_norm"]


@dataclass(frozen=True)
class _Squares:
    """``root`` is ``rsqrt(mean(x ** 2, -1, keepdim=True) + eps)``; ``nodes`` compute it from ``x``, root included."""

    root: Node
    x: Node
    eps: float
    nodes: list[Node]


@dataclass(frozen=True)
class _Miss:
    node: Node
    obstacle: Obstacle
    reason: str
    fix: str


class RmsNorm(Rewrite):
    """Puts ``torch.nn.functional.rms_norm`` where a graph computes it step by step."""

    name = "rms_norm"
    level: Level = "pre-grad"
    anchors = frozenset({"rsqrt", "pow"})

    @property
    def digest(self) -> str:
        parts = [source_digest(f) for f in (RmsNorm.apply, RmsNorm._at, _squares, _weighted, _normed)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    def programs(self) -> Iterator[Program]:
        return _programs()

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        for node in list(graph.nodes):
            squares = _squares(node)
            outcome = self._at(graph, squares) if isinstance(squares, _Squares) else squares
            if isinstance(outcome, _Miss):
                outcome = self._near(outcome)
            if outcome is not None:
                yield outcome

    def _near(self, miss: _Miss) -> NearMiss:
        line = source_line(miss.node)
        return NearMiss(self.name, self.level, miss.node.name, line, miss.obstacle, miss.reason, 3, 5, miss.fix)

    def _at(self, graph: Graph, squares: _Squares) -> Outcome | _Miss | None:
        root, casts = squares.root, list[Node]()
        while (product := trail.only_reader(root)) is not None and trail.idle(product) and product.args[0] is root:
            casts.append(root := product)
        if product is None:
            return _Miss(root, "user", "the root is read more than once", "compute the norm once")
        others = [a for a in trail.operands(product) if a is not root]
        if trail.named(product) != "mul" or len(others) != 1 or trail.handed_on(others[0]) is not squares.x:
            if _centred(squares.x):
                what = "the mean is subtracted first: this is a layer norm, which Inductor compiles as fast as written"
                return _Miss(product, "cost", what, "leave it, or call torch.nn.functional.layer_norm")
            what = f"{product.name} ({operator_name(product)}) does not multiply the values whose squares were summed"
            return _Miss(product, "operator", what, "an RMS norm multiplies x by rsqrt(mean(x ** 2) + eps)")
        nodes = [*squares.nodes, *casts, product]
        trail.handed_on(others[0], nodes)
        out, weight = _weighted(product, value(squares.x).shape[-1], nodes)
        given, bound = [squares.x, weight, squares.eps], [("x", describe(squares.x)), ("weight", describe(weight))]
        made: torch.dtype = value(out).dtype
        plan = _normed(made)
        return place(graph, self.level, self.name, plan, given, [out], _alone(nodes, out), bound)


def _centred(x: Node) -> bool:
    """Whether ``x`` is ``y - mean(y)``. A layer norm written out takes 119 us and ``layer_norm`` 118 (512 rows of 512,
    float32, one thread of a CPU, torch 2.13, 2026-11-23): nothing is gained by putting one for the other."""
    given = trail.operands(x) if trail.named(x) == "sub" else []
    mean = trail.handed_on(given[1]) if len(given) == 2 else None
    if mean is None or trail.named(mean) != "mean":
        return False
    return trail.handed_on(mean.args[0]) is trail.handed_on(given[0])


def _alone(nodes: list[Node], out: Node) -> list[Node]:
    """Of ``nodes``, those that nobody else reads: a cast of x may serve a residual as well."""
    inside = {*nodes, out}
    changed = True
    while changed:
        kept = {n for n in inside if n is out or all(u in inside for u in n.users)}
        changed, inside = kept != inside, kept
    return [n for n in nodes if n in inside]


def _squares(node: Node) -> _Squares | _Miss | None:
    """The mean of squares whose reciprocal root ``node`` is. None if it is something else."""
    name, given = trail.named(node), trail.operands(node)
    if name != "rsqrt" and not (name == "pow" and len(given) == 2 and given[1] == -0.5):
        return None
    total = given[0]
    if trail.named(total) != "add" or len(sums := trail.operands(total)) != 2:
        return None
    mean, eps = sums if trail.constant(sums[0]) is None else sums[::-1]
    nodes: list[Node] = []
    mean = trail.handed_on(mean, nodes)
    if trail.named(mean) != "mean":
        return None
    square = trail.handed_on(mean.args[0], nodes)
    x = _root(square)
    if x is None:
        return None
    nodes += [square, mean, total, node]
    x = trail.handed_on(x, nodes)
    if not _over_last(mean, value(square)):
        return _Miss(
            mean, "constant", "the mean is not over the last dim alone, with keepdim", "normalise the last dim"
        )
    number = trail.constant(eps)
    if number is None:
        return _Miss(total, "constant", f"eps is {describe(eps)}, not a number", "keep eps as a float of Python")
    return _Squares(node, x, number, nodes)


def _root(square: Any) -> Node | None:
    """``x`` where ``square`` is ``x ** 2``, however it is spelled."""
    name = trail.named(square)
    given = trail.operands(square) if name else []
    if name == "square" or (name == "pow" and len(given) == 2 and given[1] in (2, 2.0)):
        return given[0] if isinstance(given[0], Node) else None
    return given[0] if name == "mul" and len(given) == 2 and given[0] is given[1] else None


def _over_last(mean: Node, held: Tensor) -> bool:
    given: Any = next((a for a in (*mean.args[1:2], mean.kwargs.get("dim")) if a is not None), ())
    dims: list[Any] = [given] if isinstance(given, int) else list(given)
    kept: Any = mean.args[2] if len(mean.args) > 2 else mean.kwargs.get("keepdim", False)
    return [d % held.dim() for d in dims] == [held.dim() - 1] and bool(kept)


def _weighted(product: Node, width: Any, nodes: list[Node]) -> tuple[Node, Node | None]:
    """The last call that belongs to the norm, and the weight, None without one. ``nodes`` grow by what is passed."""
    node, casts = product, list[Node]()
    while (reader := trail.only_reader(node)) is not None and trail.idle(reader) and reader.args[0] is node:
        casts.append(reader)
        node = reader
    reader = trail.only_reader(node)
    if reader is not None and trail.named(reader) == "mul" and len(given := trail.operands(reader)) == 2:
        other = given[1] if given[0] is node else given[0]
        held = value(other) if isinstance(other, Node) else None
        if isinstance(held, Tensor) and held.dim() == 1 and held.is_floating_point() and held.shape[0] == width:
            nodes += [*casts, reader]
            last = reader
            while (after := trail.only_reader(last)) is not None and _narrows(after, last):
                nodes.append(after)
                last = after
            return last, other
    if casts and all(_narrows(c, trail.source(c)) for c in casts):
        nodes += casts
        return node, None
    return product, None


def _narrows(cast: Node, given: Node) -> bool:
    """A cast to the same dtype or to 16 bits."""
    return (
        trail.idle(cast)
        and trail.named(cast) in trail.CASTS
        and cast.args[0] is given
        and (value(cast).dtype == value(given).dtype or not trail.is_wide(value(cast).dtype))
    )


def _normed(out: torch.dtype) -> Callable[[Tensor, Tensor | None, float], Tensor]:
    def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if x.dtype == out and (weight is None or weight.dtype == out):
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        wide = torch.promote_types(out, torch.float32)
        scale = None if weight is None else weight.to(wide)
        return F.rms_norm(x.to(wide), (x.shape[-1],), scale, eps).to(out)

    return norm


def _llama(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def _gemma(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + 1e-5)
    return (normed * (1.0 + weight.float())).type_as(x)


def _bare(x: Tensor, weight: Tensor) -> Tensor:
    return (x * torch.pow(x.square().mean(-1, True) + 1e-5, -0.5)).sin() * weight


def _cast_root(x: Tensor, weight: Tensor) -> Tensor:
    return (x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)).sin() * weight


def _programs() -> Iterator[Program]:
    rng = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        return torch.randn(*shape, generator=rng).to(dtype), torch.randn(shape[-1], generator=rng).to(dtype)

    yield Program(_llama, drawn(3, 5, 16), "of three dims, dynamic", dynamic=True)
    yield Program(_llama, drawn(3, 16, dtype=torch.bfloat16), "bfloat16")
    x, weight = drawn(2, 5, 3, 16)
    yield Program(_gemma, (x.transpose(1, 2), weight), "transposed, with 1 + weight")
    yield Program(_gemma, drawn(3, 16, dtype=torch.float16), "float16, with 1 + weight")
    yield Program(_bare, drawn(4, 16), "without a weight")
    yield Program(_cast_root, drawn(4, 16, dtype=torch.bfloat16), "a root in bfloat16")


rms_norm = RmsNorm()
