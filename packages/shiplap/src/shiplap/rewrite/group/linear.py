"""Merge linear layers. Layers of one shape become one batched product, and layers of one input one wide product."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from shiplap.rewrite.graph import fake_tensor
from shiplap.rewrite.group.base import GroupRewrite, MergedCall, known_tensor, may_be_returned, tensor_signature
from shiplap.rewrite.group.cost import (
    Machine,
    MergePrice,
    kernels_to_stack,
    linear_arithmetic_ns,
    linear_ns,
    tensor_bytes,
    visible_launch_ns,
)
from shiplap.rewrite.normalize_call import canonical_arguments, canonical_name
from shiplap.rewrite.program import Program
from shiplap.torch_private.dynamo import is_folded


def linear_operands(node: Node) -> tuple[Node, Node, Node | None] | None:
    """Return ``(input, weight, bias)`` if ``node`` is a linear layer whose input has at least two dims. The input, the
    weight and the result must have one floating-point dtype. ``bias`` is None if the layer has none. Return None for
    any other node.
    """
    if node.op not in ("call_function", "call_method") or canonical_name(node) != "linear":
        return None
    given = canonical_arguments(node)
    x, weight, bias = given.get("input"), given.get("weight"), given.get("bias")
    held, matrix, out = fake_tensor(x), fake_tensor(weight), fake_tensor(node)
    # A layer on a vector is left alone: bmm needs rows.
    if held is None or matrix is None or out is None or held.dim() < 2 or matrix.dim() != 2:
        return None
    same = out.dtype == held.dtype == matrix.dtype and held.dtype.is_floating_point  # no autocast around it
    # Only nodes have fake tensors, so the checks above imply it.
    assert isinstance(x, Node), "a tensor of the graph"
    assert isinstance(weight, Node), "a tensor of the graph"
    return (x, weight, bias) if same and (bias is None or fake_tensor(bias) is not None) else None


def _operands_by_kind(members: Sequence[Node]) -> tuple[list[Node], list[Node], list[Node]]:
    """Return the inputs, the weights and the biases of the linear layers ``members`` as three lists, in the order of
    ``members``. The list of biases leaves out layers without a bias.
    """
    parts = [linear_operands(m) for m in members]
    calls = [c for c in parts if c is not None]
    return [c[0] for c in calls], [c[1] for c in calls], [c[2] for c in calls if c[2] is not None]


def find_stacked_tensor(xs: Sequence[Node]) -> Node | None:
    """Return the node of a tensor ``x`` if ``xs`` are exactly its slices ``x[0]``, ``x[1]`` and so on, in this order.
    Return None if there is no such tensor.
    """
    entries = [_entry_and_index(x) for x in xs]
    base = entries[0][0] if entries[0] else None
    held, entry = fake_tensor(base), fake_tensor(xs[0])
    if held is None or entry is None or entries != [(base, i) for i in range(len(xs))] or held.shape[1:] != entry.shape:
        return None
    return base if isinstance(held.shape[0], int) and held.shape[0] == len(xs) else None


def _entry_and_index(node: Node) -> tuple[Any, Any] | None:
    """Return ``(x, i)`` if ``node`` is ``x[i]``, ``x.select(0, i)`` or ``x.unbind()[i]``. ``x`` is a node and ``i`` the
    index. Return None for any other node.
    """
    if not node.op.startswith("call"):
        return None
    if canonical_name(node) == "select":
        given = canonical_arguments(node)
        return (given.get("input"), given.get("index")) if given.get("dim") == 0 else None
    if canonical_name(node) != "getitem":
        return None
    source, index = node.args
    if isinstance(source, Node) and source.op.startswith("call") and canonical_name(source) == "unbind":
        given = canonical_arguments(source)
        # The default dim, 0, is left out of the arguments.
        return None if "dim" in given else (given.get("input"), index)
    return source, index


class StackedLinears(GroupRewrite):
    """A rewrite which replaces independent linear layers of one shape by one ``bmm`` of their stacked inputs and
    weights. Each layer may have its own input.

    If the inputs are the slices of one tensor, that tensor is used directly. Biases are added to the separate results.
    There the addition fuses with the pointwise operators that follow, whereas stacked biases would have to be copied.
    """

    name = "batch_linear"
    anchors = frozenset({"linear"})

    def key(self, node: Node) -> Hashable | None:
        """Return a tuple that is equal for linear layers that can be stacked. It holds the sizes, dtypes and devices of
        input and weight, and whether the layer lacks a bias. Return None for other calls.
        """
        linear = linear_operands(node)
        if linear is None:
            return None
        x, weight, bias = linear
        return (tensor_signature(fake_tensor(x)), tensor_signature(fake_tensor(weight)), bias is None)

    def merge(self, members: Sequence[Node]) -> MergedCall:
        """Return a function that computes all ``members`` as one ``bmm``, and its arguments. These are the inputs, the
        weights and the biases of all members, and for each member whether its result needs memory of its own.
        """
        xs, weights, biases = _operands_by_kind(members)
        return _batched_linears, (find_stacked_tensor(xs) or xs, weights, biases, [may_be_returned(m) for m in members])

    def price(self, members: Sequence[Node], machine: Machine) -> MergePrice | str:
        """Return a ``MergePrice`` with the estimated nanoseconds that merging ``members`` saves by fewer launches and
        adds by stacking their inputs and weights. If the layers share one input, return the reason not to stack them as
        a string.
        """
        xs, weights, _ = _operands_by_kind(members)
        if len(set(xs)) == 1:
            # Stacked copies of one input would be read once per layer, which the wide product avoids.
            return "they share their input: shared_input_linears makes one product of them"
        # Weights that are constants are stacked when the model is compiled, which costs nothing in a call.
        stacks = [[n for n in weights if not is_folded(n)], [] if find_stacked_tensor(xs) else xs]
        added = 2 * tensor_bytes(n for s in stacks for n in s) / machine.copy
        added += kernels_to_stack(machine, *stacks) * machine.launch
        count, pairs = len(members), list(zip(members, weights, strict=True))
        work = sum(linear_ns(machine, m, w) for m, w in pairs)
        saved = (count - 1) * visible_launch_ns(machine, linear_arithmetic_ns(machine, *pairs[0]))
        return MergePrice(count * machine.launch + work, saved, added, "stacking operands costs")

    def programs(self) -> Iterator[Program]:
        """Yield functions with example arguments on which the rewrite is proven. They apply independent linear layers
        to the slices of one tensor, in order and in reverse order.
        """
        kinds = (
            (3, True, (3,), _layers_of_entries),
            (2, False, (2, 2), _layers_of_entries),
            (3, True, (1,), _layers_of_reversed_entries),
        )
        for count, bias, rows, fn in kinds:
            x = torch.randn(count, *rows, 8)
            weights, biases = torch.randn(count, 6, 8) / 8, torch.randn(count, 6)
            args = (x, weights, biases) if bias else (x, weights)
            yield Program(fn, args, f"{count} layers of {[*rows, 8]}, bias={bias}")


def _batched_linears(
    xs: Tensor | list[Tensor], weights: list[Tensor], biases: list[Tensor], own: list[bool]
) -> list[Tensor]:
    """Return the results of linear layers, one for each input with its weight and bias, computed as one ``bmm``.

    ``xs`` is a list of inputs, or a tensor whose slices along the first dim are the inputs. ``biases`` is empty if the
    layers have none. ``own[i]`` is true if result ``i`` must not share memory with the others.
    """
    stacked = torch.stack(xs) if isinstance(xs, list) else xs
    # bmm takes three dims, so that leading dims of the rows become one.
    out = torch.bmm(stacked.flatten(1, -2), torch.stack(weights).mT)
    outs = list(out.view(*stacked.shape[:-1], out.shape[-1]).unbind(0))
    if biases:
        return [o + b for o, b in zip(outs, biases, strict=True)]
    # A result that the caller may get must not share the memory of its neighbours.
    return [o.clone() if copy else o for o, copy in zip(outs, own, strict=True)]


def _layers_of_entries(x: Tensor, weights: Tensor, biases: Tensor | None = None) -> Tensor:
    """Return the concatenated results of one linear layer for each slice of ``x`` along the first dim, each followed by
    a ReLU. If ``biases`` is None, the layers have no bias.
    """
    return _run_layers(x.unbind(0), weights, biases)


def _layers_of_reversed_entries(x: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    """Return the concatenated results of one linear layer for each slice of ``x`` along the first dim, in reverse
    order, each followed by a ReLU. Stacking the inputs of the layers therefore does not give ``x``.
    """
    return _run_layers(x.unbind(0)[::-1], weights, biases)


def _run_layers(xs: Sequence[Tensor], weights: Tensor, biases: Tensor | None) -> Tensor:
    """Return the results of one linear layer for each of the inputs ``xs``, each followed by a ReLU, concatenated along
    the last dim. Layer ``i`` has ``weights[i]`` and ``biases[i]``. If ``biases`` is None, the layers have no bias.
    """
    parts = biases.unbind(0) if biases is not None else [None] * len(xs)
    layers = zip(xs, weights.unbind(0), parts, strict=True)
    return torch.cat([torch.relu(F.linear(*layer)) for layer in layers], -1)


class WideLinears(GroupRewrite):
    """A rewrite which replaces linear layers that read one input by one product with their concatenated weights.
    Examples of such layers are the query, key and value projections of attention.
    """

    name = "shared_input_linears"
    anchors = frozenset({"linear"})

    def key(self, node: Node) -> Hashable | None:
        """Return a tuple that is equal for linear layers that read one input. It holds that input, whether the layer
        lacks a bias, and the dtype of the weight. Return None for other calls.
        """
        linear = linear_operands(node)
        # The input itself is in the key: only layers of one input have one product.
        return None if linear is None else (linear[0], linear[2] is None, str(known_tensor(linear[1]).dtype))

    def merge(self, members: Sequence[Node]) -> MergedCall:
        """Return a function that computes all ``members`` as one product, and its arguments. These are the shared
        input, the list of weights and the list of biases.
        """
        xs, weights, biases = _operands_by_kind(members)
        return _wide_linear, (xs[0], weights, biases)

    def price(self, members: Sequence[Node], machine: Machine) -> MergePrice | str:
        """Return a ``MergePrice`` with the estimated nanoseconds that merging ``members`` saves by fewer launches and
        adds by concatenating the weights and splitting the result.
        """
        _, weights, biases = _operands_by_kind(members)
        # Constants are joined when the model is compiled.
        moved = [n for n in (*weights, *biases) if not is_folded(n)]
        added = (
            2 * tensor_bytes(moved) / machine.copy
            + (machine.launch if moved else 0)
            + 2 * tensor_bytes(members) / machine.copy
        )
        work = sum(linear_ns(machine, m, w) for m, w in zip(members, weights, strict=True))
        what = "putting the weights side by side costs" if moved else "taking the results apart costs"
        return MergePrice(len(members) * machine.launch + work, (len(members) - 1) * machine.launch, added, what)

    def programs(self) -> Iterator[Program]:
        """Yield functions with example arguments on which the rewrite is proven. They apply several linear layers to
        one input, with and without biases.
        """
        for sizes, bias, rows in (((8, 4, 4), True, (3,)), ((6, 6), False, (2, 5)), ((4, 4), True, (1,))):
            x = torch.randn(*rows, 8)
            weights = [torch.randn(n, 8) / 8 for n in sizes]
            biases = [torch.randn(n) for n in sizes] if bias else []
            yield Program(
                _make_projections(len(sizes), bias),
                (x, *weights, *biases),
                f"{list(sizes)} of {[*rows, 8]}, bias={bias}",
            )


def _wide_linear(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """Return a list of the contiguous results of linear layers that read ``x``, computed as one product with the
    concatenated weights. ``biases`` is empty if the layers have none.
    """
    out = F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
    # The parts of the wide product are not contiguous, and the results of the layers were.
    return [o.contiguous() for o in out.split([w.shape[0] for w in weights], -1)]


def _make_projections(count: int, bias: bool) -> Any:
    """Return a function that computes ``count`` linear layers of one input, each followed by a tanh. It takes the input
    and the weights. If ``bias`` is true, it also takes as many biases. Otherwise the layers have none.
    """

    def layers(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Return a tuple of the results of ``count`` linear layers of ``x``, each followed by a tanh. ``parameters``
        are ``count`` weights, followed by as many biases if ``bias`` is true.
        """
        biases = parameters[count:] if bias else [None] * count
        return tuple(torch.tanh(F.linear(x, w, b)) for w, b in zip(parameters[:count], biases, strict=True))

    return layers
