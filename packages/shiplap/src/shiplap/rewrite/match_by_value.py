"""Find out which function a part of a graph computes, by running the part. Two ways of writing a function are then
equal.

A recogniser that follows calls supports only the ways of writing that its author has read. This module takes the calls
between a value ``x`` and a result, whatever they are. They are a function of ``x`` and of the other tensors that they
read. The module runs the function in float64 on random numbers and compares the results. Casts between floating-point
dtypes are left out, because they change the precision and not the function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import fake_value, flat_nodes, is_written, mutates_argument
from shiplap.rewrite.passthrough_ops import (
    CAST_OPERATORS,
    VIEWING_OPERATORS,
    keeps_values,
    same_shape,
    tensor_argument,
    torch_call_name,
)
from shiplap.rewrite.walk import run_call, walk_from
from shiplap.torch_private.graph_nodes import size_hint_of

MOST_CALLS = 24  # calls between a value and a result; published models have at most 12
LARGEST_KEPT_SIZE = 3  # sizes up to which a dim keeps its size while a part is run
MOST_ELEMENTS = 1 << 22  # elements of a part that cannot be run on smaller sizes
# Arithmetic that is exact enough in float64 to be recognised by its numbers.
ARITHMETIC_OPERATORS = frozenset(
    {"add", "sub", "mul", "neg", "negative", "truediv", "div", "rsub", "multiply", "subtract", "addcmul", "einsum"}
    | {"sum"}
)
# Calls that move values without changing them.
VALUE_MOVING_OPERATORS = VIEWING_OPERATORS | frozenset(
    {
        "cat",
        "clone",
        "concat",
        "concatenate",
        "flip",
        "hstack",
        "index_select",
        "repeat",
        "repeat_interleave",
        "reshape_as",
        "roll",
        "stack",
        "tensor_split",
        "tile",
        "view_as_complex",
        "view_as_real",
    }
)


@dataclass(frozen=True)
class GraphPart:
    """The calls of a graph that compute the node ``out`` from the node ``x``. ``nodes`` are these calls in graph order.

    ``sides`` are the other tensors that the calls read, without duplicates. ``same`` maps a tensor that is computed a
    second time to the tensor of ``sides`` that it equals. ``constants`` maps tensors of at most one dim that the graph
    computes from constants to their values.
    """

    x: Node
    out: Node
    nodes: tuple[Node, ...]
    sides: tuple[Node, ...]
    same: Mapping[Node, Node] = field(default_factory=dict)
    constants: Mapping[Node, Tensor] = field(default_factory=dict)

    def run(self, x: Tensor, sides: Sequence[Tensor]) -> Tensor:
        """Return the result that the calls compute from ``x`` and ``sides``, the values of the tensors in the field
        ``sides``. Casts are skipped, so that everything is computed in one dtype. Errors of torch are passed on.
        """
        held: dict[Node, Any] = {self.x: x, **self.constants, **dict(zip(self.sides, sides, strict=True))}
        # Tensors that are computed twice get the values of the side that they equal.
        held.update({other: held[side] for other, side in self.same.items()})
        for node in self.nodes:
            held[node] = _run_call(node, held)
        result = held[self.out]
        assert isinstance(result, Tensor)
        return result

    def draw_inputs(self, rng: torch.Generator) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield pairs of a random value for ``x`` and a list of random values for ``sides``, from ``rng``. They are
        float64, or complex128 where the graph's tensor is complex.

        The tensors of the first pair have small sizes, on which the calls may fail. The tensors of the second pair have
        the graph's sizes. A pair with a tensor of more than 2**22 elements is left out.
        """
        held = [fake_value(n) for n in (self.x, *self.sides)]
        shapes = [tuple(size_hint_of(n) for n in t.shape) for t in held]
        # Small sizes make the run fast. A view with sizes written into it raises on them, and the sizes of the graph
        # follow.
        for small in (True, False):
            sizes = [_shrink_shape(shape, shapes) if small else shape for shape in shapes]
            if max(torch.Size(s).numel() for s in sizes) <= MOST_ELEMENTS:
                x, *sides = [_random_tensor(s, t.is_complex(), rng) for s, t in zip(sizes, held, strict=True)]
                yield x, sides


def _shrink_shape(shape: Sequence[int], shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return ``shape`` with sizes above 3 replaced by small ones, with which a part of a graph runs quickly. The last
    size is kept. Sizes that are equal in ``shapes`` stay equal, and different sizes stay different.
    """
    # The last dim keeps its size: pairs of a rotary embedding lie in it.
    large = sorted({n for s in shapes for n in s[:-1] if n > LARGEST_KEPT_SIZE})
    return (*(LARGEST_KEPT_SIZE + large.index(n) + 1 if n > LARGEST_KEPT_SIZE else n for n in shape[:-1]), *shape[-1:])


def _random_tensor(shape: Sequence[int], imaginary: bool, rng: torch.Generator) -> Tensor:
    """Return a tensor of the given shape with normally distributed numbers from ``rng``. If ``imaginary`` is true, its
    dtype is complex128, and otherwise float64.
    """
    return torch.randn(tuple(shape), dtype=torch.complex128 if imaginary else torch.float64, generator=rng)


def _run_call(node: Node, held: dict[Node, Any]) -> Any:
    """Return the result of the call ``node`` on tensors with data. ``held`` maps the nodes that it reads to their
    values. A cast returns its argument unchanged, so that everything is computed in one dtype.
    """
    if torch_call_name(node) in CAST_OPERATORS:
        return held[tensor_argument(node)]
    # A size that the graph computes is replaced by the number of the call that is compiled for.
    return run_call(node, lambda n: held[n] if n in held else size_hint_of(fake_value(n)))


def part_between(x: Node, out: Node) -> GraphPart | None:
    """Return the calls that compute ``out`` from ``x`` and other tensors. Return None if ``x`` is not found by
    following the inputs of ``out`` over at most 24 calls in a row. Only arithmetic, casts, and calls that move values,
    such as views, are followed.
    """
    reached = _nodes_above(out)
    if x not in reached:
        return None
    # Calls that do not depend on x are sides of the part, not steps of it.
    below = {x}
    # Nodes of a graph compare by their place in it.
    for node in sorted(reached):
        if any(n in below for n in node.all_input_nodes):
            below.add(node)
    between = set(walk_from([out], lambda node: (n for n in node.all_input_nodes if n in below and n is not x)))
    nodes = tuple(sorted(between))
    read = [n for node in nodes for n in flat_nodes((node.args, node.kwargs))]
    first: dict[Any, Node] = {}
    sides, same, constants = list[Node](), dict[Node, Node](), dict[Node, Tensor]()
    for node in dict.fromkeys(n for n in read if n not in between and n is not x):
        if not isinstance(fake_value(node), Tensor):
            continue
        if (number := _written_constant(node)) is not None:
            constants[node] = number
        # Models compute a mask or a table anew in each layer; random sides must agree there.
        elif (side := first.setdefault(_computation_key(node), node)) is node:
            sides.append(node)
        else:
            same[node] = side
    return GraphPart(x, out, nodes, tuple(sides), same, constants)


def _written_constant(node: Node) -> Tensor | None:
    """Return the values of the tensor ``node`` in float64 if it has at most one dim and the graph computes it from
    constants alone. Return None for any other tensor.
    """
    from shiplap.rewrite.shipped.constant_masks import constant_value

    held = fake_value(node)
    value = constant_value(node) if held.dim() <= 1 and held.is_floating_point() else None
    return None if value is None else value.double()


def _computation_key(node: Any, depth: int = 8) -> Any:
    """Return a value that is equal for two nodes that apply the same arithmetic, views and casts to the same values.

    The comparison follows the arguments of a call, their arguments, and so on, over ``depth`` calls in a row. A node
    behind them, a node that is written to, and a node of any other operator equals only itself.
    """
    if isinstance(node, (list, tuple)):
        return tuple(_computation_key(n, depth) for n in node)
    if isinstance(node, slice):
        return "slice", *(_computation_key(n, depth) for n in (node.start, node.stop, node.step))
    if not isinstance(node, Node):
        # As text, since 1, 1.0 and True are equal, as are 0.0 and -0.0, and compute different results.
        return type(node).__name__, repr(node)
    name = torch_call_name(node)
    # A value that is written to differs from reader to reader.
    pure = name in ARITHMETIC_OPERATORS or name in VALUE_MOVING_OPERATORS or name in CAST_OPERATORS
    if not depth or not pure or is_written(node):
        return node
    named = tuple((k, _computation_key(v, depth - 1)) for k, v in sorted(node.kwargs.items()))
    return (
        name,
        str(getattr(fake_value(node), "dtype", "")),
        *(_computation_key(a, depth - 1) for a in node.args),
        named,
    )


def candidate_starts(out: Node) -> list[Node]:
    """Return the nodes from which ``out`` is computed and whose floating-point values have the shape of ``out``. The
    node that comes last in the graph is the first in the list. Each is a candidate for the start of a computation that
    ends in ``out``.
    """
    held = fake_value(out)
    shaped = [
        n for n in _nodes_above(out) - {out} if isinstance(fake_value(n), Tensor) and same_shape(fake_value(n), held)
    ]
    # Nodes compare by their place in the graph, the last being the nearest.
    return sorted((n for n in shaped if fake_value(n).is_floating_point()), reverse=True)  # as in the graph


def operator_names_above(out: Node) -> set[str]:
    """Return the names of the operators of the calls from which ``out`` is computed. At most 24 calls in a row are
    followed. Only arithmetic, casts, and calls that move values, such as views, are followed and named.
    """
    return {torch_call_name(n) for n in _nodes_above(out) if is_understood(n)}


def _nodes_above(out: Node) -> set[Node]:
    """Return ``out`` and the nodes from which it is computed. At most 24 calls in a row are followed. Only arithmetic,
    casts, and calls that move values, such as views, are followed. Any other node is included, but its inputs are not.
    """
    reached, layer = {out}, [out]
    # Layer by layer, so that a graph with many paths is not walked once per path.
    for _ in range(MOST_CALLS):
        layer = list({g for n in layer if is_understood(n) for g in n.all_input_nodes} - reached)
        reached.update(layer)
    return reached


def is_understood(node: Node) -> bool:
    """Return whether a part of a graph that is run to find its function may contain the call ``node``. Such calls are
    arithmetic, casts that keep values, and calls that move values, such as views. They must not write to an argument.
    """
    name = torch_call_name(node)
    # A cast to an integer changes values.
    if name in CAST_OPERATORS:
        return keeps_values(node)
    return (
        (name in ARITHMETIC_OPERATORS or name in VALUE_MOVING_OPERATORS)
        and not mutates_argument(node)
        and "out" not in node.kwargs
    )


def agree_but_for_rounding(got: Tensor, wanted: Tensor) -> bool:
    """Return whether ``got`` and ``wanted``, two results in float64, have one shape and differ by at most 1e-9,
    absolute or relative.
    """
    return got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-9, atol=1e-9)
