"""The root of a mean of squares in any way of writing it. An RMS norm multiplies or divides by it.

``rsqrt(m)``, ``m ** -0.5``, ``1 / sqrt(m)`` and ``sqrt(m).reciprocal()`` are one root. ``mean(x ** 2, -1, True)``, ``(x
* x).sum(-1, keepdim=True) / n`` and ``x.square().mean(-1).unsqueeze(-1)`` are one mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import describe_node, fake_value
from shiplap.rewrite.normalize_call import canonical_arguments, reduced_dims
from shiplap.rewrite.obstacle import RewriteObstacle
from shiplap.rewrite.passthrough_ops import (
    as_constant,
    keeps_values,
    positional_then_named,
    skip_idle_calls,
    tensor_and_factor,
    torch_call_name,
)
from shiplap.rewrite.walk import as_list

# In-place products are left out: they write to the value that the norm reads.
PRODUCT_NAMES = frozenset({"mul", "multiply"})
DIVISION_NAMES = frozenset({"div", "divide", "truediv", "true_divide"})
# Calls of one argument that are a power, with its exponent.
ROOT_EXPONENTS = {"rsqrt": -0.5, "sqrt": 0.5, "reciprocal": -1.0}
RELATIVE_ERROR = 1e-6  # relative: two numbers that Python computed in different ways


@dataclass(frozen=True)
class MeanSquareRoot:
    """The root of a mean of squares, ``(mean(x ** 2, -1, keepdim=True) + eps) ** p``, as computed in a graph.

    Attributes:
        root: the node of the result.
        x: the node whose squares are averaged.
        eps: the number that is added to the mean.
        divides: whether a norm divides by the root. Then ``p`` is 0.5, otherwise it is -0.5.
        kept: whether the result has a last dim of size 1. Otherwise the mean has removed that dim.
        nodes: the nodes that compute the root from ``x``, including ``root``.
    """

    root: Node
    x: Node
    eps: float
    divides: bool
    kept: bool
    nodes: list[Node]


@dataclass
class _MeanOfSquare:
    """A mean or a sum over dims of a tensor, as computed in a graph.

    Attributes:
        square: the node whose values are averaged or summed.
        nodes: the nodes that compute the mean or sum from ``square``.
        kept: whether the last dim stays with size 1.
        wrong: the reducing call if it is not over the last dim alone, or None.
    """

    square: Node
    nodes: list[Node]
    kept: bool
    wrong: Node | None = None

    @property
    def held(self) -> Tensor:
        """The fake tensor of ``x`` if ``square`` computes ``x ** 2``. Otherwise the fake tensor of ``square``."""
        tensor: Tensor = fake_value(base_of_square(self.square) or self.square)
        return tensor


def find_mean_square_root(node: Node) -> MeanSquareRoot | RewriteObstacle | None:
    """Return the root ``(mean(x ** 2) + eps) ** 0.5``, or its reciprocal, if ``node`` computes one.

    Return the obstacle if ``node`` differs from the root of an RMS norm in one point. Examples are a mean over other
    dims and an eps that is no constant. Return None for any other node, and for a node of which a further root or
    reciprocal is taken.
    """
    if root_base_and_exponent(node) is None or any(
        root_base_and_exponent(reader) is not None for reader in _readers_past_casts(node)
    ):
        return None
    nodes: list[Node] = []
    base, exponent = _strip_roots(node, nodes)
    if exponent not in (0.5, -0.5):
        return None
    mean, eps = _split_eps(base, nodes)
    if (averaged := _parse_mean(skip_idle_calls(mean, nodes))) is None:
        return None
    x = base_of_square(averaged.square)
    if x is None:
        return None
    if averaged.wrong is not None:
        what = "the mean is not over the last dim alone"
        return RewriteObstacle(
            averaged.wrong, "constant", what, "normalise the last dim: torch's rms_norm has no other"
        )
    number = as_constant(eps)
    if number is None:
        reason, fix = f"eps is {describe_node(eps)}, not a number", "keep eps as a float of Python"
        return RewriteObstacle(base, "constant", reason, fix)
    nodes += [*averaged.nodes, averaged.square]
    return MeanSquareRoot(node, skip_idle_calls(x, nodes), number, exponent > 0, averaged.kept, nodes)


def root_base_and_exponent(node: Any) -> tuple[Any, float] | None:
    """Return the base and the exponent of the power if ``node`` is one call that computes a root or a reciprocal. For
    example, return ``(x, -0.5)`` for ``rsqrt(x)`` and ``x ** -0.5``. Return None for any other node.
    """
    name = torch_call_name(node)
    given = positional_then_named(node) if name else []
    if name in ROOT_EXPONENTS and given:
        return given[0], ROOT_EXPONENTS[name]
    if len(given) != 2:
        return None
    if name == "pow" and (exponent := as_constant(given[1])) in (0.5, -0.5, -1.0):
        return given[0], float(exponent)
    return (given[1], -1.0) if name in DIVISION_NAMES and as_constant(given[0]) == 1 else None


def is_root_not_reciprocal(node: Node) -> bool:
    """Return whether the nested roots and reciprocals that ``node`` computes have a positive exponent. This is true for
    ``sqrt(x)`` and false for ``rsqrt(x)``.
    """
    return _strip_roots(node, [])[1] > 0


def _base_of_summed_square(node: Any) -> Node | None:
    """Return ``x`` if ``node`` is one call that computes the sum of ``x ** 2`` over the last dim. Examples are
    ``vecdot(x, x)`` and an einsum of ``x`` with itself. Return None for any other call.
    """
    name = torch_call_name(node)
    given = positional_then_named(node) if name in ("vecdot", "linalg_vecdot", "einsum") else []
    if name == "einsum":
        formula, *rest = given
        # torch.einsum accepts its operands in one list, too.
        given = [n for g in rest for n in as_list(g)]
        left, _, out = str(formula).replace(" ", "").partition("->")
        first, _, second = left.partition(",")
        if first != second or not first or "->" not in str(formula) or out != first[:-1] or first[-1] in out:
            return None
    bases = [skip_idle_calls(g) for g in given[:2]]
    if len(bases) != 2 or bases[0] is not bases[1] or not isinstance(bases[0], Node):
        return None
    dim = given[2] if len(given) > 2 else -1
    last = isinstance(dim, int) and dim in (-1, fake_value(bases[0]).dim() - 1)
    plain: Node = given[0]
    return (plain if given[1] is plain else bases[0]) if last else None


def base_of_square(node: Any) -> Node | None:
    """Return ``x`` if ``node`` computes ``x ** 2`` in any way of writing it. Return ``x`` also if ``node`` is one call
    that sums ``x ** 2`` over the last dim. Return None for any other node.
    """
    name = torch_call_name(node)
    if (summed := _base_of_summed_square(node)) is not None:
        return summed
    given = positional_then_named(node) if name else []
    if name == "square" or (name == "pow" and len(given) == 2 and as_constant(given[1]) == 2):
        return given[0] if isinstance(given[0], Node) else None
    if name not in PRODUCT_NAMES or len(given) != 2 or not all(isinstance(g, Node) for g in given):
        return None
    plain: Node = given[0]
    first: Node = skip_idle_calls(plain)
    if skip_idle_calls(given[1]) is not first:
        return None
    # Two casts of one tensor multiply as its square; the tensor itself is then ahead of the casts.
    return plain if given[1] is given[0] else first


def _readers_past_casts(node: Node) -> list[Node]:
    """Return the nodes that read ``node`` directly or through calls that keep its values, such as casts. These calls
    are left out.
    """
    readers: list[Node] = []
    for reader in node.users:
        readers += _readers_past_casts(reader) if keeps_values(reader) and reader.args[0] is node else [reader]
    return readers


def _strip_roots(node: Any, nodes: list[Node]) -> tuple[Any, float]:
    """Return the base and the exponent of the power that ``node`` computes by nested roots and reciprocals. For ``1 /
    sqrt(x)`` they are ``(x, -0.5)``. The exponent is 1 for any other node. The calls are appended to ``nodes``.
    """
    exponent = 1.0
    while (step := root_base_and_exponent(node)) is not None:
        nodes.append(node)
        # A reciprocal of a root multiplies the exponents: 0.5 * -1.
        exponent *= step[1]
        node = skip_idle_calls(step[0], nodes)
    return node, exponent


def _split_eps(node: Any, nodes: list[Node]) -> tuple[Any, Any]:
    """Return the terms of the sum ``node`` as ``(mean, eps)``, where ``eps`` is the constant term, and append ``node``
    to ``nodes``. For any other node, return the node and 0.0. If no term is constant, the first one is ``mean``.
    """
    given = positional_then_named(node) if torch_call_name(node) == "add" else []
    if len(given) != 2:
        return node, 0.0
    nodes.append(node)
    # eps may stand on either side of the sum.
    return (given[0], given[1]) if as_constant(given[0]) is None else (given[1], given[0])


def _parse_mean(node: Any) -> _MeanOfSquare | None:
    """Return the mean that ``node`` computes in any way of writing it, such as a sum divided by the size. A mean over
    other dims than the last is marked as wrong. Return None if ``node`` computes no mean.
    """
    name = torch_call_name(node)
    if name == "mean":
        return _parse_reduction(node)
    if name in ("unsqueeze", "getitem", "view"):
        made = _parse_mean(skip_idle_calls(node.args[0])) if isinstance(node.args[0], Node) else None
        return None if made is None else _restore_last_dim(node, made)
    total = _parse_sum_by_size(node)
    return None if total is None else _MeanOfSquare(total.square, [node, *total.nodes], total.kept, total.wrong)


def _restore_last_dim(node: Node, made: _MeanOfSquare) -> _MeanOfSquare | None:
    """Return ``made`` with ``kept`` set if the view ``node`` of it appends the last dim of size 1 that the reduction
    removed. Return None for any other view, and if that dim was kept.
    """
    if made.kept or not restores_last_dim(node, made.held):
        return None
    return _MeanOfSquare(made.square, [node, *made.nodes], True, made.wrong)


def _parse_sum(node: Any) -> _MeanOfSquare | None:
    """Return the sum that ``node`` computes in any way of writing it, with the tensor that is summed. A sum over other
    dims than the last is marked as wrong. Return None if ``node`` computes no sum.
    """
    name = torch_call_name(node)
    if name == "sum":
        return _parse_reduction(node)
    if name in ("unsqueeze", "getitem", "view") and isinstance(node.args[0], Node):
        passed: list[Node] = []
        made = _parse_sum(skip_idle_calls(node.args[0], passed))
        if made is not None:
            made.nodes += passed
            return _restore_last_dim(node, made)
    return _MeanOfSquare(node, [node], False) if _base_of_summed_square(node) is not None else None


def _parse_sum_by_size(node: Any) -> _MeanOfSquare | None:
    """Return the sum that ``node`` divides by the size of the last dim, so that ``node`` computes a mean. Return None
    for any other node.
    """
    given = positional_then_named(node) if torch_call_name(node) in PRODUCT_NAMES | DIVISION_NAMES else []
    if len(given) != 2:
        return None
    total, by = given if isinstance(given[0], Node) and as_constant(given[0]) is None else given[::-1]
    passed: list[Node] = []
    total = skip_idle_calls(total, passed)
    if (made := _parse_sum(total)) is None:
        return None
    made.nodes += passed
    size: Any = made.held.shape[-1] if made.held.dim() else 1
    held = fake_value(by) if isinstance(by, Node) else by
    # A symbolic size is compared by its text, since the reciprocal of a symbol is not known.
    if isinstance(held, torch.SymInt) or isinstance(size, torch.SymInt):
        return made if torch_call_name(node) in DIVISION_NAMES and by is given[1] and str(held) == str(size) else None
    factor = tensor_and_factor(node)
    return made if factor is not None and abs(factor[1] * size - 1) < RELATIVE_ERROR else None


def _parse_reduction(node: Node) -> _MeanOfSquare | None:
    """Return the mean or sum that the call ``node`` of ``mean`` or ``sum`` computes, as a ``_MeanOfSquare``. If the
    call reduces any dim but the last, the field ``wrong`` holds the call, and otherwise None. Return None if the call
    reduces no tensor.
    """
    passed: list[Node] = []
    square = skip_idle_calls(node.args[0] if node.args else node.kwargs.get("input"), passed)
    if not isinstance(square, Node) or not isinstance(fake_value(square), Tensor):
        return None
    kept = bool(canonical_arguments(node).get("keepdim", False))
    return _MeanOfSquare(square, [*passed, node], kept, None if reduces_last_dim(node) else node)


def reduces_last_dim(node: Node) -> bool:
    """Return whether the call ``node`` of ``mean`` or ``sum`` reduces the last dim of its argument and no other dim."""
    rank = fake_value(node.all_input_nodes[0]).dim()
    return [int(d) % rank for d in reduced_dims(node)] == [rank - 1]


def restores_last_dim(node: Node, square: Tensor) -> bool:
    """Return whether ``node`` is a view with the shape of ``square``, but with 1 as the last size. It thereby restores
    the dim that a mean of ``square`` over the last dim removed.
    """
    if torch_call_name(node) == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        if not all(i is None or i is Ellipsis or i == slice(None) for i in index):
            return False
    made = fake_value(node)
    wanted = (*square.shape[:-1], 1)
    # Compared as text, symbolic sizes add no guard to the graph.
    return isinstance(made, Tensor) and [*map(str, made.shape)] == [*map(str, wanted)]
