"""RMS norm written out, ``weight * x * rsqrt(mean(x ** 2) + eps)``: torch's ``rms_norm``.

Recognised by what is computed: from each root of a mean of squares (``shipped/roots.py``) the pass follows the scaled
values down, through casts, to the product with a weight of one dim, which may be computed from a parameter
(``1 + weight``) and may also come first. What is scaled by its own root mean square in another way is a near miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from shiplap.declare.code_digest import code_digest
from shiplap.rewrite import passthrough_ops
from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.graph import describe, operator_name, place, source_line, value
from shiplap.rewrite.match import Level, NearMiss, Outcome
from shiplap.rewrite.program import Program
from shiplap.rewrite.shipped.mean_square_root import (
    DIVISIONS,
    PRODUCTS,
    Missed,
    Squares,
    puts_back,
    squares_of,
    takes_root,
)
from shiplap.rewrite.shipped.rms_missed import otherwise
from shiplap.rewrite.shipped.rms_norm_programs import programs


class RmsNorm(Rewrite):
    """Puts ``torch.nn.functional.rms_norm`` where a graph computes it step by step."""

    name = "rms_norm"
    level: Level = "pre-grad"
    anchors = frozenset({"rsqrt", "sqrt", "pow", "norm", "vector_norm", "linalg_vector_norm", "normalize"})

    @property
    def digest(self) -> str:
        return code_digest(RmsNorm.apply, RmsNorm._at, squares_of, _scaled, _weighted, _normed, otherwise)

    def programs(self) -> Iterator[Program]:
        return programs()

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        known: set[Node] = set()
        for node in list(graph.nodes):
            squares = squares_of(node)
            outcome = self._at(graph, squares) if isinstance(squares, Squares) else squares
            if isinstance(outcome, Missed):
                if takes_root(node):  # that of an error or a deviation may be meant: what reads it decides
                    continue
                outcome = self._near(outcome)
            if outcome is not None:
                known.add(node)
                yield outcome
        for node in list(graph.nodes):
            if (missed := otherwise(node, known)) is not None:
                yield self._near(missed)

    def _near(self, miss: Missed) -> NearMiss:
        line = source_line(miss.node)
        return NearMiss(self.name, self.level, miss.node.name, line, miss.obstacle, miss.reason, 3, 5, miss.fix)

    def _at(self, graph: Graph, squares: Squares) -> Outcome | Missed:
        nodes = list(squares.nodes)
        scaled = _scaled(squares, nodes)
        if isinstance(scaled, Missed):
            return scaled
        product, weight = scaled
        out = product
        if weight is None:
            out, weight = _weighted(product, value(squares.x).shape[-1], nodes)
        given, bound = [squares.x, weight, squares.eps], [("x", describe(squares.x)), ("weight", describe(weight))]
        made: torch.dtype = value(out).dtype
        plan = _normed(made)
        return place(graph, self.level, self.name, plan, given, [out], _alone(nodes, out), bound)


def _scaled(squares: Squares, nodes: list[Node]) -> tuple[Node, Node | None] | Missed:
    """The call that scales ``x`` by the root, and the weight, if ``x`` was multiplied by one before.

    ``nodes`` grow by that call, and by those between it and what is known.
    """
    root, kept = squares.root, squares.kept
    while (product := passthrough_ops.only_reader(root)) is not None:
        if not kept and passthrough_ops.named(product) in ("unsqueeze", "getitem", "view"):
            kept = puts_back(product, value(squares.x))
        elif not (passthrough_ops.idle(product) and product.args[0] is root):
            break
        nodes.append(root := product)
    if product is not None and not kept:
        what = f"{product.name} ({operator_name(product)}) reads a root whose last dim is gone"
        return Missed(product, "shape", what, "take the mean with keepdim=True")
    if product is None:
        return Missed(root, "user", "the root is read more than once", "compute the norm once")
    name, given = passthrough_ops.named(product), passthrough_ops.operands(product)
    fits = len(given) == 2 and (
        (name in DIVISIONS and given[1] is root) if squares.divides else (name in PRODUCTS and root in given)
    )
    other = next((a for a in given if a is not root), None) if fits else None
    passed = [product]
    if other is not None and passthrough_ops.handed_on(other, passed) is squares.x:
        nodes += passed
        return product, None
    if other is not None and (first := _weighted_first(other, squares.x)) is not None:
        nodes += [product, *first[1]]
        return product, first[0]
    if _centred(squares.x):
        what = "the mean is subtracted first: this is a layer norm, which Inductor compiles as fast as written"
        return Missed(product, "cost", what, "leave it, or call torch.nn.functional.layer_norm")
    what = f"{product.name} ({operator_name(product)}) does not multiply the values whose squares were summed"
    return Missed(product, "operator", what, "an RMS norm multiplies x by rsqrt(mean(x ** 2) + eps)")


def _weighted_first(scaled: Any, x: Node) -> tuple[Node, list[Node]] | None:
    """The weight and the calls where ``scaled`` is ``x * weight``, which nothing else reads."""
    passed: list[Node] = []
    product = passthrough_ops.handed_on(scaled, passed)
    if passthrough_ops.named(product) not in PRODUCTS or len(given := passthrough_ops.operands(product)) != 2:
        return None
    passed.append(product)
    for one, weight in (given, given[::-1]):
        more: list[Node] = []
        alone = all(len(n.users) == 1 for n in passed)
        if alone and passthrough_ops.handed_on(one, more) is x and _is_weight(weight, value(x).shape[-1]):
            return weight, [*passed, *more]
    return None


def _is_weight(other: Any, width: Any) -> bool:
    held = value(other) if isinstance(other, Node) else None
    return isinstance(held, Tensor) and held.dim() == 1 and held.is_floating_point() and held.shape[0] == width


def _centred(x: Node) -> bool:
    """Whether ``x`` is ``y - mean(y)``. A layer norm written out takes 119 us and ``layer_norm`` 118 (512 rows of 512,
    float32, one thread of a CPU, torch 2.13, 2026-11-23): nothing is gained by putting one for the other."""
    given = passthrough_ops.operands(x) if passthrough_ops.named(x) == "sub" else []
    mean = passthrough_ops.handed_on(given[1]) if len(given) == 2 else None
    if mean is None or passthrough_ops.named(mean) != "mean":
        return False
    return passthrough_ops.handed_on(mean.args[0]) is passthrough_ops.handed_on(given[0])


def _alone(nodes: list[Node], out: Node) -> list[Node]:
    """Of ``nodes``, those that nobody else reads: a cast of x may serve a residual as well."""
    inside = {*nodes, out}
    changed = True
    while changed:
        kept = {n for n in inside if n is out or all(u in inside for u in n.users)}
        changed, inside = kept != inside, kept
    return [n for n in nodes if n in inside]


def _weighted(product: Node, width: Any, nodes: list[Node]) -> tuple[Node, Node | None]:
    """The last call that belongs to the norm, and the weight, None without one. ``nodes`` grow by what is passed."""
    node, casts = product, list[Node]()
    while (
        (reader := passthrough_ops.only_reader(node)) is not None
        and passthrough_ops.idle(reader)
        and reader.args[0] is node
    ):
        casts.append(reader)
        node = reader
    reader = passthrough_ops.only_reader(node)
    if (
        reader is not None
        and passthrough_ops.named(reader) in PRODUCTS
        and len(given := passthrough_ops.operands(reader)) == 2
    ):
        other = given[1] if given[0] is node else given[0]
        if _is_weight(other, width):
            nodes += [*casts, reader]
            last = reader
            while (after := passthrough_ops.only_reader(last)) is not None and _narrows(after, last):
                nodes.append(after)
                last = after
            return last, other
    if casts and all(_narrows(c, passthrough_ops.source(c)) for c in casts):
        nodes += casts
        return node, None
    return product, None


def _narrows(cast: Node, given: Node) -> bool:
    """A cast to the same dtype or to 16 bits."""
    return (
        passthrough_ops.idle(cast)
        and passthrough_ops.named(cast) in passthrough_ops.CASTS
        and cast.args[0] is given
        and (value(cast).dtype == value(given).dtype or not passthrough_ops.is_wide(value(cast).dtype))
    )


def _normed(out: torch.dtype) -> Callable[[Tensor, Tensor | None, float], Tensor]:
    def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if x.dtype == out and (weight is None or weight.dtype == out):
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        wide = torch.promote_types(out, torch.float32)
        scale = None if weight is None else weight.to(wide)
        return F.rms_norm(x.to(wide), (x.shape[-1],), scale, eps).to(out)

    return norm


rms_norm = RmsNorm()
