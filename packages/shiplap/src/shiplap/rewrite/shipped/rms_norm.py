"""Rewrite an RMS norm written out, ``weight * x * rsqrt(mean(x ** 2) + eps)``, to torch's ``rms_norm``.

The norm is recognised by its computation. From each root of a mean of squares (``shipped/mean_square_root.py``) the
pass follows the scaled values down, through casts, to the product with a weight of one dim. The weight may be computed
from a parameter (``1 + weight``), and may also come first. A value that is scaled by its own root mean square in
another way is a near miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from shiplap.declare.code_digest import code_digest
from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.graph import (
    describe_node,
    fake_value,
    name_and_operator,
    place_replacement,
    remove_dead_calls,
)
from shiplap.rewrite.match import Level, NearMiss, Outcome
from shiplap.rewrite.obstacle import RewriteObstacle
from shiplap.rewrite.passthrough_ops import (
    CAST_OPERATORS,
    is_32_bit_or_wider,
    keeps_values,
    positional_then_named,
    single_user,
    skip_idle_calls,
    tensor_argument,
    torch_call_name,
)
from shiplap.rewrite.program import Program
from shiplap.rewrite.shipped.mean_square_root import (
    DIVISION_NAMES,
    PRODUCT_NAMES,
    MeanSquareRoot,
    find_mean_square_root,
    is_root_not_reciprocal,
    restores_last_dim,
)
from shiplap.rewrite.shipped.rms_missed import explain_unmatched_norm
from shiplap.rewrite.shipped.rms_norm_programs import rms_norm_programs
from shiplap.rewrite.walk import without_other_readers


class RmsNorm(Rewrite):
    """A rewrite that puts ``torch.nn.functional.rms_norm`` where a graph computes an RMS norm step by step."""

    name = "rms_norm"
    level: Level = "pre-grad"
    anchors = frozenset({"rsqrt", "sqrt", "pow", "norm", "vector_norm", "linalg_vector_norm", "normalize"})

    @property
    def digest(self) -> str:
        """A digest of the code that finds and replaces RMS norms."""
        return code_digest(
            RmsNorm.apply,
            RmsNorm._replace_norm,
            find_mean_square_root,
            _find_scaling_call,
            _find_later_weight,
            _make_rms_norm,
            explain_unmatched_norm,
        )

    def programs(self) -> Iterator[Program]:
        """Return an iterator over the programs on which the rewrite is proven. A program is a function with arguments.
        Each computes an RMS norm in one of the ways in which models write it.
        """
        return rms_norm_programs()

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Replace RMS norms that ``graph`` computes by several calls, in place, by torch's function. Yield a ``Match``
        for each replaced norm, and a ``NearMiss`` with the reason for each that is not replaced.
        """
        known: set[Node] = set()
        remove_dead_calls(graph)
        for node in list(graph.nodes):
            squares = find_mean_square_root(node)
            outcome = self._replace_norm(graph, squares) if isinstance(squares, MeanSquareRoot) else squares
            if isinstance(outcome, RewriteObstacle):
                if is_root_not_reciprocal(node):  # that of an error or a deviation may be meant: what reads it decides
                    continue
                outcome = self._near(outcome)
            if outcome is not None:
                known.add(node)
                yield outcome
        for node in list(graph.nodes):
            # A second walk, since only now all roots with an outcome are known.
            if (missed := explain_unmatched_norm(node, known)) is not None:
                yield self._near(missed)

    def _near(self, miss: RewriteObstacle) -> NearMiss:
        """Return a ``NearMiss`` for the obstacle ``miss`` in the scaling by a root or in the weight. It counts 3 of 5
        nodes as fitting, namely the square, the mean and the root.
        """
        miss.fitting = 3
        return self.near_miss(miss, of=5)

    def _replace_norm(self, graph: Graph, squares: MeanSquareRoot) -> Outcome | RewriteObstacle:
        """Replace the RMS norm that scales by ``squares``, a root of a mean of squares. Return the ``Match``, or a
        ``NearMiss`` with the reason if torch's call cannot be placed. Return the obstacle if the scaling is not that of
        an RMS norm.
        """
        nodes = list(squares.nodes)
        scaled = _find_scaling_call(squares, nodes)
        if isinstance(scaled, RewriteObstacle):
            return scaled
        product, weight = scaled
        out = product
        if weight is None:
            out, weight = _find_later_weight(product, fake_value(squares.x).shape[-1], nodes)
        given, bound = (
            [squares.x, weight, squares.eps],
            [("x", describe_node(squares.x)), ("weight", describe_node(weight))],
        )
        made: torch.dtype = fake_value(out).dtype
        plan = _make_rms_norm(made)
        return place_replacement(
            graph, self.level, self.name, plan, given, [out], without_other_readers(nodes, out), bound
        )


def _find_scaling_call(squares: MeanSquareRoot, nodes: list[Node]) -> tuple[Node, Node | None] | RewriteObstacle:
    """Return the call that multiplies ``x`` by the root in ``squares``, and the weight by which ``x`` was multiplied
    before. The weight is None if there is none.

    Return the obstacle if no such call follows the root. Append the call, and the calls between it and the root, to
    ``nodes``.
    """
    root, kept = squares.root, squares.kept
    while (product := single_user(root)) is not None:
        if not kept and torch_call_name(product) in ("unsqueeze", "getitem", "view"):
            kept = restores_last_dim(product, fake_value(squares.x))
        elif not (keeps_values(product) and product.args[0] is root):
            break
        nodes.append(root := product)
    if product is not None and not kept:
        what = f"{name_and_operator(product)} reads a root whose last dim is gone"
        return RewriteObstacle(product, "shape", what, "take the mean with keepdim=True")
    if product is None:
        return RewriteObstacle(root, "user", "the root is read more than once", "compute the norm once")
    name, given = torch_call_name(product), positional_then_named(product)
    fits = len(given) == 2 and (
        (name in DIVISION_NAMES and given[1] is root) if squares.divides else (name in PRODUCT_NAMES and root in given)
    )
    other = next((a for a in given if a is not root), None) if fits else None
    passed = [product]
    if other is not None and skip_idle_calls(other, passed) is squares.x:
        nodes += passed
        return product, None
    if other is not None and (first := _find_earlier_weight(other, squares.x)) is not None:
        nodes += [product, *first[1]]
        return product, first[0]
    # Named apart, since a layer norm is no spelling that could be corrected.
    if _is_centred(squares.x):
        what = "the mean is subtracted first: this is a layer norm, which Inductor compiles as fast as written"
        return RewriteObstacle(product, "cost", what, "leave it, or call torch.nn.functional.layer_norm")
    what = f"{name_and_operator(product)} does not multiply the values whose squares were summed"
    return RewriteObstacle(product, "operator", what, "an RMS norm multiplies x by rsqrt(mean(x ** 2) + eps)")


def _find_earlier_weight(scaled: Any, x: Node) -> tuple[Node, list[Node]] | None:
    """Return the weight and a list of the calls that apply it, if ``scaled`` is ``x * weight``. Return None for any
    other value, and if a node outside of the norm reads that product.
    """
    passed: list[Node] = []
    product = skip_idle_calls(scaled, passed)
    if torch_call_name(product) not in PRODUCT_NAMES or len(given := positional_then_named(product)) != 2:
        return None
    passed.append(product)
    for one, weight in (given, given[::-1]):
        more: list[Node] = []
        alone = all(len(n.users) == 1 for n in passed)
        if alone and skip_idle_calls(one, more) is x and _is_weight_of_norm(weight, fake_value(x).shape[-1]):
            return weight, [*passed, *more]
    return None


def _is_weight_of_norm(other: Any, width: Any) -> bool:
    """Return whether ``other`` is a node of a floating-point tensor of one dim with ``width`` elements, as the weight
    of a norm is.
    """
    held = fake_value(other) if isinstance(other, Node) else None
    return isinstance(held, Tensor) and held.dim() == 1 and held.is_floating_point() and held.shape[0] == width


# A layer norm that is written out takes 119 us, and ``layer_norm`` 118 us (512 rows of 512, float32, one CPU thread,
# torch 2.13, 2026-11-23).
def _is_centred(x: Node) -> bool:
    """Return whether ``x`` is ``y - mean(y)``, as in a layer norm. Replacing a layer norm gains nothing."""
    given = positional_then_named(x) if torch_call_name(x) == "sub" else []
    mean = skip_idle_calls(given[1]) if len(given) == 2 else None
    if mean is None or torch_call_name(mean) != "mean":
        return False
    return skip_idle_calls(mean.args[0]) is skip_idle_calls(given[0])


def _find_later_weight(product: Node, width: Any, nodes: list[Node]) -> tuple[Node, Node | None]:
    """Return the last call of the norm and the weight by which the norm is multiplied after the scaling. The weight is
    None if there is none.

    The search starts at ``product``, which is ``x`` times the root, and follows casts. ``width`` is the size that the
    weight must have. The calls of the norm behind ``product`` are appended to ``nodes``.
    """
    node, casts = product, list[Node]()
    while (reader := single_user(node)) is not None and keeps_values(reader) and reader.args[0] is node:
        casts.append(reader)
        node = reader
    reader = single_user(node)
    if (
        reader is not None
        and torch_call_name(reader) in PRODUCT_NAMES
        and len(given := positional_then_named(reader)) == 2
    ):
        other = given[1] if given[0] is node else given[0]
        if _is_weight_of_norm(other, width):
            nodes += [*casts, reader]
            last = reader
            # Casts behind the weight belong to the norm, so that the result has the dtype that the model reads.
            while (after := single_user(last)) is not None and _is_narrowing_cast(after, last):
                nodes.append(after)
                last = after
            return last, other
    if casts and all(_is_narrowing_cast(c, tensor_argument(c)) for c in casts):
        nodes += casts
        return node, None
    return product, None


def _is_narrowing_cast(cast: Node, given: Node) -> bool:
    """Return whether ``cast`` is a cast of the node ``given`` to a 16-bit dtype, or to the dtype that ``given`` already
    has.
    """
    return (
        keeps_values(cast)
        and torch_call_name(cast) in CAST_OPERATORS
        and cast.args[0] is given
        and (fake_value(cast).dtype == fake_value(given).dtype or not is_32_bit_or_wider(fake_value(cast).dtype))
    )


def _make_rms_norm(out: torch.dtype) -> Callable[[Tensor, Tensor | None, float], Tensor]:
    """Return the function ``norm(x, weight, eps)`` that is traced in place of a norm. Its result has dtype ``out``."""

    def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Return the RMS norm of ``x`` over the last dim in the dtype ``out``. It is multiplied by ``weight`` unless
        that is None. If ``x`` or ``weight`` has another dtype, the norm is computed in float32 or a wider dtype and
        cast once.
        """
        if x.dtype == out and (weight is None or weight.dtype == out):
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        # Where dtypes differ, all is computed in float32 or wider and rounded once, as the steps of the model do it.
        wide = torch.promote_types(out, torch.float32)
        scale = None if weight is None else weight.to(wide)
        return F.rms_norm(x.to(wide), (x.shape[-1],), scale, eps).to(out)

    return norm


rms_norm = RmsNorm()
