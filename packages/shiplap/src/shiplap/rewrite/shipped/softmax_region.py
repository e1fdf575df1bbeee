"""Find the places where a graph weighs activations by a softmax, by the flow of values, whatever the calls in between.

A recogniser supports only the ways of writing that its author has read, and reports nothing about others. This module
depends on none. It follows all calls up from a softmax to the products that its scores come from. It follows all calls
down to the products that read its weights, also through writes to parts of a tensor. So each attention that is not
recognised can be named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import fake_value, mutates_argument
from shiplap.rewrite.passthrough_ops import same_shape, skip_idle_calls, tensor_argument, torch_call_name
from shiplap.rewrite.walk import inputs_of, walk_from

# Calls that sum products of two tensors over a dim.
CONTRACTIONS = frozenset(
    {"matmul", "bmm", "mm", "baddbmm", "addmm", "addbmm", "mv", "einsum", "tensordot", "inner", "dot", "linear"}
)
NORM_OPERATORS = frozenset({"layer_norm", "group_norm", "batch_norm", "rms_norm"})
# Values behind these calls are other quantities than scores or weights, so paths end here.
BOUNDARY_OPERATORS = (
    CONTRACTIONS
    | NORM_OPERATORS
    | {
        "conv1d",
        "conv2d",
        "conv3d",
        "bilinear",
        "embedding",
        "softmax",
        "_softmax",
        "log_softmax",
        "topk",
        "argmax",
        "argmin",
        "sort",
        "argsort",
        "multinomial",
        "scaled_dot_product_attention",
    }
)
SOFTMAX_OPERATORS = frozenset({"softmax", "_softmax"})
# Writes through these views change the tensor that they look at.
VIEW_OPERATORS = frozenset(
    {"getitem", "view", "select", "narrow", "transpose", "unsqueeze", "squeeze", "permute", "diagonal"}
)
MOST_VISITED_CALLS = 400  # calls that are looked at in one direction


@dataclass(frozen=True)
class SoftmaxRegion:
    """A softmax in a graph whose result, the weights, is multiplied by an activation.

    Attributes:
        softmax: the node of the softmax.
        scores: the product from which the scores come, or None. A product of two activations is preferred.
        learned: whether an operand of that product is a parameter, or is made of parameters and constants without a
            product.
        above: the calls between that product and the softmax, those nearest to the product first.
        out: the product with the values.
        below: the calls between the softmax and ``out``.
        outs: all products that read the weights, in the order in which they are found.
    """

    softmax: Node
    scores: Node | None
    learned: bool
    above: tuple[Node, ...]
    out: Node
    below: tuple[Node, ...]
    outs: tuple[Node, ...]

    @property
    def attends(self) -> bool:
        """Whether the scores come from a product of two activations, such as queries and keys, as in an attention. In
        other computations, they come from a product of an activation and a weight of the model, or from no product.
        """
        return self.scores is not None and not self.learned


def log_softmax_below(node: Node) -> Node | None:
    """Return the ``log_softmax`` whose exponential is ``node``, which makes ``node`` a softmax. Return None for any
    other node.
    """
    if torch_call_name(node) != "exp" or not node.all_input_nodes:
        return None
    logarithm = skip_idle_calls(node.all_input_nodes[0])
    return logarithm if torch_call_name(logarithm) in ("log_softmax", "_log_softmax") else None


def find_region(softmax: Node) -> SoftmaxRegion | None:
    """Return the calls around ``softmax``, from the product that computes its scores to the product of its result with
    an activation. Return None if its result multiplies no activation, as in a router of a mixture of experts.
    """
    below = list(_paths_to_products(softmax, _readers_and_targets, _weighs_activation))
    if not below:
        return None
    above = [
        p
        for given in (log_softmax_below(softmax) or softmax).all_input_nodes
        for p in _paths_to_products(given, _sources_and_writes, _may_give_scores, first=True)
    ]
    learned = [any(is_made_of_parameters(n) for n in _operands_of_product(path[-1])) for path in above]
    # A product of two activations is preferred: scores also come from the projections of queries and keys.
    best = next((path for path, no in zip(above, learned, strict=True) if not no), above[0] if above else None)
    # Paths come shortest first.
    nearest = below[0]
    return SoftmaxRegion(
        softmax,
        best[-1] if best else None,
        best is not None and all(learned),
        tuple(reversed(best[:-1])) if best else (),
        nearest[-1],
        tuple(nearest[1:-1]),
        tuple(dict.fromkeys(path[-1] for path in below)),
    )


def is_made_of_parameters(node: Node) -> bool:
    """Return whether ``node`` is a parameter, a buffer or a constant, or is computed from these without a matrix
    product, a convolution or a norm. A buffer to which the graph writes, such as a cache of keys, holds activations.
    """
    for at in walk_from([node], inputs_of):
        if torch_call_name(at) in BOUNDARY_OPERATORS - {"embedding"}:
            return False
        if at.op == "placeholder" and (not _is_module_state(at) or next(_values_written_to(at), None) is not None):
            return False
    return True


def _is_module_state(node: Node) -> bool:
    """Return whether ``node``, an input of the graph, is a parameter, a buffer, or no tensor."""
    held = fake_value(node)
    return not isinstance(held, Tensor) or isinstance(held, torch.nn.Parameter) or "_buffers_" in str(node.target)


def _paths_to_products(
    start: Node, step: Callable[[Node], Iterator[Node]], ends: Callable[[Node, set[Node]], bool], *, first: bool = False
) -> Iterator[list[Node]]:
    """Yield lists of nodes that lead from ``start`` to a product, the shortest list first. At most 400 nodes are
    visited.

    ``step`` returns the neighbours of a node. ``ends(node, seen)`` returns whether ``node`` is the product at the end
    of a list, where ``seen`` holds the nodes visited so far. If ``first`` is true, ``start`` itself may be the product.
    """
    seen, queue = {start}, deque([[start]])
    # Breadth first, so that the shortest path comes first.
    while queue and len(seen) < MOST_VISITED_CALLS:
        path = queue.popleft()
        at = path[-1]
        if (first or at is not start) and at.op.startswith("call") and not mixes_heads(at):
            if ends(at, seen):
                yield path
                continue
            if torch_call_name(at) in BOUNDARY_OPERATORS and not _normalizes_weights(at, start):
                continue
        for near in step(at):
            if near not in seen and isinstance(fake_value(near), (Tensor, tuple, list)):
                seen.add(near)
                queue.append([*path, near])


def _normalizes_weights(node: Node, start: Node) -> bool:
    """Return whether ``node`` is a norm over some dims of ``start``, scores or weights of at least four dims. Some
    models normalize them between heads. A norm of hidden states has a tensor of other sizes.
    """
    made, known = fake_value(node), fake_value(start)
    both = isinstance(made, Tensor) and isinstance(known, Tensor) and made.dim() >= 4
    return both and torch_call_name(node) in NORM_OPERATORS and sorted(made.shape) == sorted(known.shape)


def mixes_heads(node: Node) -> bool:
    """Return whether ``node`` multiplies a tensor of at least four dims by a square matrix of parameters and keeps its
    shape. Some models mix the attention scores or weights of their heads in this way.
    """
    name, made = torch_call_name(node), fake_value(node)
    if name not in ("einsum", "matmul", "linear", "conv2d") or not isinstance(made, Tensor) or made.dim() < 4:
        return False
    tensors = [n for n in node.all_input_nodes if isinstance(fake_value(n), Tensor)][:2]
    for given, by in (tensors, tensors[::-1]) if len(tensors) == 2 else ():
        sizes = tuple(fake_value(by).shape)
        square = sizes[:1] == sizes[1:2] and all(n == 1 for n in sizes[2:])
        if square and same_shape(fake_value(given), made) and is_made_of_parameters(by):
            return True
    return False


def _sources_and_writes(node: Node) -> Iterator[Node]:
    """Yield the nodes from which ``node`` is computed. Then yield the nodes whose values are written to ``node`` or to
    a view of it.
    """
    yield from node.all_input_nodes
    yield from _values_written_to(node)


def _values_written_to(node: Node) -> Iterator[Node]:
    """Yield the nodes whose values are written to ``node`` or to a view of it."""
    # A write to a view changes the tensor as well.
    for view in (node, *(u for u in node.users if torch_call_name(u) in VIEW_OPERATORS)):
        for writer in view.users:
            if mutates_argument(writer) and writer.args[:1] == (view,):
                yield from (n for n in writer.all_input_nodes if n is not view)


def _readers_and_targets(node: Node) -> Iterator[Node]:
    """Yield the nodes that are computed from ``node``. For a call that writes ``node`` to another tensor, yield that
    tensor and the tensor of which it is a view, too.
    """
    for user in node.users:
        if mutates_argument(user) and isinstance(user.args[0], Node) and user.args[0] is not node:
            target = user.args[0]
            yield target
            if torch_call_name(target) in VIEW_OPERATORS:
                yield tensor_argument(target)
        yield user


def _product_under_sum(node: Node) -> Node | None:
    """Return the elementwise product of two tensors whose sum over a dim is ``node``, as in ``(q * k).sum(-1)``. Return
    None for any other node.
    """
    if torch_call_name(node) != "sum" or not node.all_input_nodes:
        return None
    made = skip_idle_calls(node.all_input_nodes[0])
    return made if torch_call_name(made) == "mul" and len(made.all_input_nodes) == 2 else None


def _operands_of_product(node: Node) -> list[Node]:
    """Return the tensors that the product ``node`` multiplies. There may be fewer than two, for example if one tensor
    is multiplied by itself.
    """
    tensors = [n for n in (_product_under_sum(node) or node).all_input_nodes if isinstance(fake_value(n), Tensor)]
    if torch_call_name(node) in ("baddbmm", "addmm", "addbmm"):
        return tensors[-2:]
    return tensors[:2]


def _may_give_scores(node: Node, _: set[Node]) -> bool:
    """Return whether ``node`` is a product that can compute attention scores. It may be a matrix product of two
    tensors, a convolution, or an elementwise product that is summed over a dim. The second argument is ignored.
    """
    if _product_under_sum(node) is not None:
        return True
    name = torch_call_name(node)
    return name.startswith("conv") or (name in CONTRACTIONS and len(_operands_of_product(node)) == 2)


def _weighs_activation(node: Node, weights: set[Node]) -> bool:
    """Return whether ``node`` is a matrix product, or a summed elementwise product, of attention weights and an
    activation. ``weights`` are the nodes found so far that are computed from the softmax. The activation must not be
    one of them.
    """
    if torch_call_name(node) not in CONTRACTIONS and _product_under_sum(node) is None:
        return False
    operands = _operands_of_product(node)
    others = [n for n in operands if n not in weights]
    return len(operands) == 2 and len(others) == 1 and not is_made_of_parameters(others[0])
