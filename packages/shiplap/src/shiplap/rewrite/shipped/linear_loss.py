"""Rewrite the cross entropy of a linear layer to a function that computes it without the logits of all rows.

From each loss the pass follows the logits up to the layer. It supports casts, views, slices, swaps of other dims, a
constant factor and a cap by ``tanh``. The calls that the model applies to rows of logits are applied to rows of the
layer's input. The function comes from a family of ops, since it needs kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    remove_dead_calls,
)
from shiplap.rewrite.match import Level, Outcome
from shiplap.rewrite.normalize_call import canonical_arguments
from shiplap.rewrite.obstacle import RewriteObstacle, obstacle_of_reader
from shiplap.rewrite.passthrough_ops import keeps_values, tensor_and_factor, tensor_argument, torch_call_name
from shiplap.rewrite.program import Program, proving
from shiplap.torch_private.symbolic_sizes import size_in_call

LOSSES = frozenset({"cross_entropy", "cross_entropy_loss", "nll_loss"})
VIEWS = frozenset({"view", "flatten", "unflatten", "squeeze", "unsqueeze", "contiguous", "clone"})
CAP_DIFFERENCE = 1e-6  # relative, of the number by which a cap divides from the one by which it multiplies
SMALL_LOGITS = 64 << 20  # bytes of float32 logits that are worth no chunks
FAR = 12  # calls between a loss and a layer, for a near miss


@dataclass
class _LossOfLayer:
    """A cross entropy loss, the linear layer that computes its logits, and the calls between them.

    Attributes:
        loss: the node of the loss.
        target: the node of the targets.
        given: the arguments of the loss by name.
        class_dim: the dim of the classes in the result of the call that the search has reached.
        nodes: the nodes from the loss up to the layer, which the replacement removes.
        moves: the calls on rows between layer and loss, as functions of the layer's input, the last call first.
        scale: the factor of the logits.
        softcap: the number at which ``tanh`` caps the logits, or None.
        layer: the arguments of the layer by name.
    """

    loss: Node
    target: Node
    given: dict[str, Any]
    class_dim: int
    nodes: list[Node] = field(default_factory=list)
    moves: list[Callable[[Tensor], Tensor]] = field(default_factory=list)
    scale: float = 1.0
    softcap: float | None = None
    layer: dict[str, Any] = field(default_factory=dict)


class LinearLoss(Rewrite):
    """A rewrite that replaces ``cross_entropy(linear(hidden, weight, bias), target)``, in the ways in which models
    write it, by one function.

    Args:
        name: the name of the rewrite.
        loss: a function ``loss(hidden, weight, target, bias, *, reduction, ignore_index, label_smoothing, softcap)``
            that returns the loss in float32. It takes hidden states ``[..., h]`` and targets ``[...]``.
        always: if true, replace small losses, too.
    """

    level: Level = "pre-grad"
    anchors = LOSSES

    def __init__(self, name: str, loss: Callable[..., Tensor], *, always: bool = False) -> None:
        """Set the rewrite's name and the function that computes the loss of a layer. If ``always`` is true, small
        losses are replaced, too.
        """
        self.name, self.loss, self.always = name, loss, always

    @property
    def code_is_fully_hashed(self) -> bool:
        """Always false, because the results also depend on the kernels of an op, which ``digest`` does not cover."""
        return False  # the kernels of an op decide as well

    @property
    def digest(self) -> str:
        """A digest of the code that finds layers and losses, of the loss function, and of the option ``always``."""
        return short_digest(
            code_digest(LinearLoss.apply, LinearLoss._replace_loss, _find_layer, self.loss), self.always
        )

    def programs(self) -> Iterator[Program]:
        """Return an iterator over the programs on which the rewrite is proven. A program is a function with arguments.
        Each computes the loss of a linear layer in one of the ways in which models write it.
        """
        return _programs()

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Replace cross entropies of linear layers in ``graph``, in place, by the loss function of this rewrite. Yield
        a ``Match`` for each replaced loss, and a ``NearMiss`` with the reason for each that is not replaced. A loss of
        which no linear layer is found is passed over.
        """
        remove_dead_calls(graph)
        # A list, since replacements add nodes to the graph and remove others.
        for node in list(graph.nodes):
            if torch_call_name(node) in LOSSES:
                try:
                    outcome = self._replace_loss(graph, node)
                except RewriteObstacle as e:
                    if _has_layer_above(e.node):
                        yield self.near_miss(e, of=2)
                else:
                    yield outcome

    def _replace_loss(self, graph: Graph, node: Node) -> Outcome:
        """Replace the loss ``node`` and the linear layer that computes its logits, and return the ``Match`` or
        ``NearMiss``. Raise ``RewriteObstacle`` if no layer is found, if a call between layer and loss is not supported,
        or if the logits are too small.
        """
        found = _find_layer(node)
        hidden, weight = fake_value(found.layer["input"]), fake_value(found.layer["weight"])
        # Read from the call that is compiled, since a comparison of symbols would add a guard.
        logits = size_in_call(math.prod(hidden.shape[:-1]) * weight.shape[0] * 4)
        if not (self.always or proving.get()) and logits is not None and logits < SMALL_LOGITS:
            what = f"the logits take {logits / 1e6:.3g} MB in float32: less than chunks of them cost"
            raise RewriteObstacle(node, "cost", what)
        tensors = [found.layer["input"], found.layer["weight"], found.target, found.layer.get("bias")]
        bound = [(k, describe_node(v)) for k, v in zip(("hidden", "weight", "target"), tensors, strict=False)]
        return place_replacement(
            graph, self.level, self.name, self._replacement(found), tensors, [node], found.nodes, bound
        )

    def _replacement(self, found: _LossOfLayer) -> Callable[..., Tensor]:
        """Return the function that is traced in place of the layer and the loss in ``found``. It takes the layer's
        input and weight, the targets, and the layer's bias or None. It calls the rewrite's loss function with the
        options of the loss.
        """
        names = ("reduction", "ignore_index", "label_smoothing")
        options = {name: found.given[name] for name in names if name in found.given} | {"softcap": found.softcap}
        dtype = fake_value(found.loss).dtype

        def loss_of_layer(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
            """Return the loss of the linear layer, computed by the rewrite's loss function. The calls in
            ``found.moves``, which the graph applies to rows of the logits, are first applied to ``hidden``, the layer's
            input. ``bias`` is None for a layer without one.
            """
            # They were found from the loss upwards.
            for move in reversed(found.moves):
                hidden = move(hidden)
            if found.scale != 1:
                hidden = hidden * found.scale
                bias = None if bias is None else bias * found.scale
            return self.loss(hidden.movedim(1, -1), weight, target, bias, **options).to(dtype)

        return loss_of_layer


def _find_layer(node: Node) -> _LossOfLayer:
    """Return the linear layer that computes the logits of the loss ``node``, with the calls in between. Raise
    ``RewriteObstacle`` if there is no layer, or if the rewrite's loss function does not support the loss or a call in
    between.
    """
    given = canonical_arguments(node)
    logits, target = given.get("input"), given.get("target")
    held, wanted = (fake_value(n) if isinstance(n, Node) else None for n in (logits, target))
    if not (isinstance(held, Tensor) and isinstance(wanted, Tensor) and held.dim() > 1):
        raise RewriteObstacle(node, "shape", "the loss is of one row")
    # The function of a family takes no weights of classes.
    if given.get("weight") is not None:
        raise RewriteObstacle(node, "argument", "classes have weights", "leave out weight=, or keep this loss as it is")
    if {"size_average", "reduce"} & given.keys():
        raise RewriteObstacle(
            node, "argument", "size_average= and reduce= are deprecated", "pass reduction= in their place"
        )
    if fake_value(node).dtype == torch.float64:
        raise RewriteObstacle(node, "dtype", "the loss is float64, which would be computed in float32")
    if wanted.dtype != torch.int64:
        raise RewriteObstacle(node, "dtype", f"targets are {wanted.dtype}: probabilities", "pass int64 classes")
    assert isinstance(logits, Node)
    assert isinstance(target, Node)
    found = _LossOfLayer(node, target, given, 1, [node])
    at = logits
    if torch_call_name(node) == "nll_loss":
        if torch_call_name(at) != "log_softmax" or canonical_arguments(at).get("dim") != 1:
            raise RewriteObstacle(at, "operator", f"{name_and_operator(at)} is no log_softmax over the classes")
        _add_replaced_call(found, at)
        at = tensor_argument(at)
    numbers: list[float] = []  # the factors so far, from the loss upward
    while not _reads_layer(found, at):
        _add_replaced_call(found, at)
        at = _step_above(found, at, numbers)
    _read_numbers(found, at, numbers)
    return found


def _add_replaced_call(found: _LossOfLayer, at: Node) -> None:
    """Append the call ``at`` to ``found.nodes``, the nodes that the replacement removes. Raise ``RewriteObstacle`` if a
    node outside of them reads ``at``.
    """
    for reader in at.users:
        if reader not in found.nodes:
            raise obstacle_of_reader(at, reader, "return the loss alone: whoever needs the logits keeps all of them")
    found.nodes.append(at)


def _reads_layer(found: _LossOfLayer, at: Node) -> bool:
    """Return whether the call ``at`` is a linear layer. If so, store its arguments in ``found``. Raise
    ``RewriteObstacle`` if the loss is over another dim than the layer's output features.
    """
    if torch_call_name(at) != "linear":
        return False
    if found.class_dim != fake_value(at).dim() - 1:
        raise RewriteObstacle(at, "shape", "the loss is over another dim than the classes of the layer")
    _add_replaced_call(found, at)
    found.layer = canonical_arguments(at)
    return True


def _step_above(found: _LossOfLayer, at: Node, numbers: list[float]) -> Node:
    """Return the tensor that ``at``, a call between the layer and the loss, reads. Append to ``found.moves`` what the
    call does to rows of the logits, and update ``found.class_dim``.

    If the call multiplies by a constant, append the constant to ``numbers``. If it is ``tanh``, append NaN. Raise
    ``RewriteObstacle`` for a call that the rewrite does not support.
    """
    name = torch_call_name(at)
    above = at.args[0] if at.args else None
    before, after = fake_value(above) if isinstance(above, Node) else None, fake_value(at)
    if (scaled := tensor_and_factor(at)) is not None:
        numbers.append(scaled[1])
        return scaled[0]
    if isinstance(above, Node) and isinstance(before, Tensor):
        if name == "tanh":
            numbers.append(math.nan)  # stands for the cap
            return above
        if keeps_values(at):
            return above
        last = before.dim() - 1
        if name == "transpose":
            dims = canonical_arguments(at)
            first, second = int(dims["dim0"]), int(dims["dim1"])
            found.class_dim = {first: second, second: first}.get(found.class_dim, found.class_dim)
            found.moves.append(lambda t: t.transpose(first, second))
            return above
        # Compared as text, symbolic sizes add no guard to the graph.
        if found.class_dim == after.dim() - 1 and str(after.shape[-1]) == str(before.shape[-1]):
            if name in VIEWS:
                lead = after.shape[:-1]
                found.moves.append(lambda t: t.reshape(*lead, t.shape[-1]))
                found.class_dim = last
                return above
            if name == "getitem" and (index := _index_of_rows(at.args[1], before.dim())) is not None:
                found.moves.append(lambda t: t[index])
                found.class_dim = last
                return above
    what = f"{name_and_operator(at)} lies between the layer and the loss"
    raise RewriteObstacle(at, "operator", what, "do to the hidden states what is done to the rows of the logits")


def _index_of_rows(index: Any, rank: int) -> tuple[Any, ...] | None:
    """Return ``index`` as a tuple if it consists of slices, integers and ``...`` and leaves the last of ``rank`` dims
    unchanged. Return None for any other index.
    """
    parts = index if isinstance(index, tuple) else (index,)
    plain = all(
        part is Ellipsis
        or type(part) is int
        or (isinstance(part, slice) and all(type(p) in (int, type(None)) for p in (part.start, part.stop, part.step)))
        for part in parts
    )
    touches = Ellipsis in parts[:-1] or sum(part is not Ellipsis for part in parts) == rank
    return parts if plain and (not touches or parts[-1] == slice(None)) else None


def _read_numbers(found: _LossOfLayer, at: Node, numbers: list[float]) -> None:
    """Set ``found.scale``, the factor of the logits, and ``found.softcap``, the number at which ``tanh`` caps them.
    ``numbers`` are the factors from the loss up to the layer, in which NaN stands for a ``tanh``. Raise
    ``RewriteObstacle`` at ``at`` if the logits are capped in another way than ``cap * tanh(logits / cap)``.
    """
    caps = [i for i, number in enumerate(numbers) if math.isnan(number)]
    if not caps:
        found.scale = math.prod(numbers)
        return
    cap, inner = math.prod(numbers[: caps[0]]), math.prod(numbers[caps[0] + 1 :])
    if len(caps) > 1 or cap <= 0:
        raise RewriteObstacle(at, "operator", "logits are capped in a way that is not cap * tanh(logits / cap)")
    scale = inner * cap
    found.softcap, found.scale = cap, 1.0 if abs(scale - 1) < CAP_DIFFERENCE else scale


def _has_layer_above(node: Node) -> bool:
    """Return whether ``node`` is computed from a linear layer. The first tensor input of ``node``, its first tensor
    input, and so on are followed over fewer than 12 calls. Otherwise there is nothing to replace or to report.
    """
    at: Any = node
    for _ in range(FAR):
        if torch_call_name(at) == "linear":
            return True
        at = next((a for a in at.all_input_nodes if isinstance(fake_value(a), Tensor)), None)
        if at is None:
            return False
    return False


# --- how models spell it ----------------------------------------------------------------------------------------------


def _padded_labels(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of the logits of a linear layer. The labels are shifted by one position. The last
    label is padded with -100, which the loss ignores.
    """
    logits = F.linear(hidden, weight).float()
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, weight.shape[0]), shifted.view(-1), ignore_index=-100, reduction="mean")


def _shifted_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return three times the mean cross entropy of the logits of a linear layer. The logits are shifted against the
    labels by one position.
    """
    logits = F.linear(hidden, weight)[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, weight.shape[0]), labels[..., 1:].contiguous().view(-1)) * 3


def _summed_with_bias(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor) -> Tensor:
    """Return a seventh of the summed cross entropy of the logits of a linear layer with a bias. The logits are halved,
    the labels smoothed, and rows with label 2 ignored.
    """
    logits = F.linear(hidden, weight, bias) * 0.5
    rows = logits.view(-1, weight.shape[0])
    return F.cross_entropy(rows, labels.view(-1), ignore_index=2, label_smoothing=0.1, reduction="sum") / 7


def _classes_second(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of the squared cross entropies of all rows of the logits of a linear layer. The second dim of the
    logits is the classes.
    """
    return F.cross_entropy(F.linear(hidden, weight).transpose(1, 2), labels, reduction="none").square().mean()


def _by_log_softmax(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of the logits of a linear layer, written as ``log_softmax`` followed by
    ``nll_loss``.
    """
    logarithms = F.log_softmax(F.linear(hidden, weight).float().flatten(0, 1), dim=-1)
    return F.nll_loss(logarithms, labels.flatten())


def _capped(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of the logits of a linear layer. ``tanh`` limits them to the range -3 to 3."""
    logits = F.linear(hidden, weight)
    logits = torch.tanh(logits / 3.0) * 3.0
    return F.cross_entropy(logits.float().view(-1, weight.shape[0]), labels.view(-1))


def _programs() -> Iterator[Program]:
    """Yield the programs on which the rewrite is proven. A program is a function with arguments. Together they compute
    the loss of a linear layer in the ways in which models write it.
    """
    # With a fixed seed, the proof of one digest has one result.
    rng = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 5, 6, generator=rng), torch.randn(11, 6, generator=rng)
    labels, bias = torch.randint(0, 11, (2, 5), generator=rng), torch.randn(11, generator=rng)
    short = (hidden.bfloat16(), weight.bfloat16(), labels)
    yield Program(_padded_labels, (hidden, weight, labels), "labels shifted, float32", dynamic=(0,))
    yield Program(_padded_labels, short, "labels shifted, bfloat16")
    yield Program(_shifted_logits, (hidden, weight, labels), "logits shifted")
    yield Program(_summed_with_bias, (hidden, weight, labels, bias), "a sum, a bias, a factor and smooth labels")
    yield Program(_classes_second, (hidden, weight, labels), "a loss of each row, the classes second")
    yield Program(_by_log_softmax, (hidden, weight, labels), "log_softmax and nll_loss")
    yield Program(_capped, short, "capped, bfloat16")
