"""The two products of attention in models that write them with ``einsum``.

The module finds the roles of their dims, which are batch, tokens and width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import fake_value
from shiplap.rewrite.passthrough_ops import positional_then_named, torch_call_name
from shiplap.rewrite.walk import as_list

DimOrder = tuple[int, ...]


@dataclass(frozen=True)
class EinsumProduct:
    """An einsum of the two operands ``first`` and ``second``, written as a product of matrices.

    ``orders`` holds, for each operand, the dim order that :func:`arrange_dims` gives it. The first operand then has the
    dims ``[..., rows, inner]``, and the second ``[..., inner, columns]``. For attention scores, the second has ``[...,
    columns, inner]``. ``out`` is the permutation from the dims of the product to those of the einsum's result.
    """

    first: Node
    second: Node
    orders: tuple[DimOrder, DimOrder]
    out: DimOrder


def arrange_dims(tensor: Tensor, order: DimOrder) -> Tensor:
    """Return ``tensor`` with its dims permuted to ``order``. Each -1 in ``order`` stands for a new dim of size 1."""
    tensor = tensor.permute([d for d in order if d >= 0])
    for at, dim in enumerate(order):
        if dim < 0:
            tensor = tensor.unsqueeze(at)
    return tensor


def _parse_einsum(node: Node) -> tuple[list[str], str, list[Node]] | None:
    """Return a tuple of the subscripts of the operands of the einsum ``node``, such as ``["bhqd", "bhkd"]``, those of
    its result, and the operand nodes. Return None for any other call, for an einsum of other than two tensors, and for
    one that reads a diagonal.
    """
    given = positional_then_named(node)
    flat = [n for g in given[1:] for n in as_list(g)]
    if torch_call_name(node) != "einsum" or not isinstance(given[0], str) or len(flat) != 2 or "->" not in given[0]:
        return None
    left, _, out = given[0].replace(" ", "").partition("->")
    terms = left.split(",")
    if "..." in left and len(terms) == 2:
        terms, out = _replace_ellipsis(terms, out, flat)
    # A letter twice in one term is a diagonal.
    if len(terms) != 2 or "." in "".join((*terms, out)) or any(len(set(t)) != len(t) for t in (*terms, out)):
        return None
    if not all(isinstance(n, Node) and isinstance(fake_value(n), Tensor) for n in flat):
        return None
    return terms, out, flat


def _replace_ellipsis(terms: list[str], out: str, operands: list[Any]) -> tuple[list[str], str]:
    """Return the subscripts of the operands and of the result of an einsum with letters in place of ``...``. If ``...``
    stands for different numbers of dims in the two operands, return the subscripts unchanged.
    """
    held = [fake_value(n) if isinstance(n, Node) else None for n in operands]
    counts = {
        h.dim() - len(t) + 3 if "..." in t and isinstance(h, Tensor) else -1 for t, h in zip(terms, held, strict=True)
    }
    # Models name dims by small letters, so capitals are free for the dims that dots stand for.
    spare = [c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in "".join((*terms, out))]
    if len(counts) != 1 or not 0 <= (count := counts.pop()) <= len(spare):
        return terms, out
    letters = "".join(spare[:count])
    return [t.replace("...", letters) for t in terms], out.replace("...", letters)


def as_scores_product(node: Any) -> EinsumProduct | None:
    """Return the einsum ``node`` as the product of queries and keys. The last two dims of its result are the tokens of
    queries and of keys. Return None for any other call.
    """
    if not isinstance(node, Node) or (read := _parse_einsum(node)) is None or len(read[1]) < 2:
        return None
    terms, out, nodes = read
    rows, columns = out[-2], out[-1]
    # The order of operands is free in an einsum; queries have the rows of the result.
    if rows in terms[1]:
        terms, nodes = terms[::-1], nodes[::-1]
    batch = out[:-2]
    inner = set(terms[0]) - {*out}
    # Keys that all heads share have no dim of heads. Each dim of the result comes from one of the operands.
    if len(inner) != 1 or rows not in terms[0] or columns in terms[0] or {*terms[1]} - {*batch} != {columns, *inner}:
        return None
    if not {*batch} <= {*terms[0], *terms[1]}:
        return None
    (width,) = inner
    orders = (_find_permutation(terms[0], batch + rows + width), _find_permutation(terms[1], batch + columns + width))
    return EinsumProduct(nodes[0], nodes[1], orders, tuple(range(len(out))))


def as_values_product(node: Any, weights: Node) -> EinsumProduct | None:
    """Return the einsum ``node`` as the product of ``weights`` and the values. The last dim of ``weights`` is summed
    over. Return None for any other call.
    """
    if not isinstance(node, Node) or (read := _parse_einsum(node)) is None:
        return None
    terms, out, nodes = read
    if nodes[1] is weights:
        terms, nodes = terms[::-1], nodes[::-1]
    if nodes[0] is not weights or nodes[1] is weights or len(terms[0]) < 2:
        return None
    batch, rows, summed = terms[0][:-2], terms[0][-2], terms[0][-1]
    width = {*terms[1]} - {*batch, summed}
    if len(width) != 1 or summed not in terms[1] or rows in terms[1] or {*out} != {*batch, rows, *width}:
        return None
    product = batch + rows + "".join(width)
    orders = (tuple(range(len(terms[0]))), _find_permutation(terms[1], batch + summed + "".join(width)))
    return EinsumProduct(nodes[0], nodes[1], orders, _find_permutation(product, out))


def as_transposed_product(product: Node, values: Node) -> EinsumProduct:
    """Return the matrix product ``product`` as a product of weights and values. It is written as ``values @
    weights.mT``, with the tokens of ``values`` in its last dim. The first of the result's ``orders`` is empty, since
    the weights keep their dims.
    """
    ranks = [fake_value(values).dim(), fake_value(product).dim()]
    turned, out = ((*range(n - 2), n - 1, n - 2) for n in ranks)
    return EinsumProduct(product, values, ((), turned), out)


def _find_permutation(given: str, wanted: str) -> DimOrder:
    """Return the permutation that brings the letters of ``given`` into the order of ``wanted``. It holds -1 for a
    letter that ``given`` lacks.
    """
    return tuple(map(given.find, wanted))
