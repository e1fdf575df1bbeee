"""Merge chains of pointwise operators of one form and size into one chain of stacked operands."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import fake_tensor
from shiplap.rewrite.group.base import GroupRewrite, MergedCall, known_tensor, may_be_returned, tensor_signature
from shiplap.rewrite.group.cost import HORIZONTAL_REASON, Machine, MergePrice, tensor_bytes
from shiplap.rewrite.match import Level
from shiplap.rewrite.program import Program

SHORTEST_CHAIN = 2  # operators; a chain of one is not worth stacking its operands


class StackedChains(GroupRewrite):
    """A rewrite which replaces independent chains of equal pointwise operators by one chain on stacked operands. The
    operands of all calls have one shape.

    A chain ends where its result has several users, or a user that is not pointwise. The rewrite runs after autograd,
    on ATen operators.
    """

    name = "batch_pointwise"
    level: Level = "post-grad"

    def key(self, node: Node) -> Hashable | None:
        """Return a tuple that is equal for chains of the same pointwise calls, if a chain of two or more calls ends at
        ``node``. In a chain, the result of each call but the last is read only by the next call. Return None for other
        nodes.
        """
        chain = self.nodes(node) if _ends_chain(node) else []
        if len(chain) < SHORTEST_CHAIN:
            return None
        # Chains are equal if their steps read each other at the same places, whatever the names of the nodes.
        place = {n: i for i, n in enumerate(chain)}
        steps = [(str(n.target), _step_form([n.args, n.kwargs], place)) for n in chain]
        return (tensor_signature(fake_tensor(node)), tuple(steps))

    def nodes(self, member: Node) -> list[Node]:
        """Return the nodes of the chain of pointwise calls that ends at ``member``, from the first call to the last. In
        a chain, the result of each call but the last is read only by the next call.
        """
        chain = [member]
        while inner := next((n for n in chain[0].all_input_nodes if _is_chain_step(n, chain[0])), None):
            chain.insert(0, inner)
        return chain

    def merge(self, members: Sequence[Node]) -> MergedCall:
        """Return a function that computes the chains which end at ``members`` as one chain on stacked operands, and its
        arguments. The arguments include the operands of all chains.
        """
        chains = [self.nodes(m) for m in members]
        operands = [list(row) for row in zip(*map(_chain_operands, chains), strict=True)]
        return _make_stacked_chain(chains[0]), (operands, [may_be_returned(m) for m in members])

    def price(self, members: Sequence[Node], machine: Machine) -> MergePrice | str:
        """Return a ``MergePrice`` with the estimated nanoseconds that merging ``members`` saves by fewer launches and
        adds by stacking operands. If the code generator of ``machine`` fuses independent loops anyway, return that
        reason as a string.
        """
        if machine.horizontal:
            return HORIZONTAL_REASON
        operands = [n for m in members for n in _chain_operands(self.nodes(m))]
        moved = 2 * tensor_bytes(operands) / machine.copy
        work = (tensor_bytes(operands) + tensor_bytes(members)) / machine.copy
        count = len(members)
        return MergePrice(count * machine.launch + work, (count - 1) * machine.launch, moved, "stacking operands costs")

    def programs(self) -> Iterator[Program]:
        """Yield functions with example arguments on which the rewrite is proven. They compute four independent chains
        of pointwise operators.
        """
        for rows in ((3, 8), (5,)):
            yield Program(_run_chains, (torch.randn(4, *rows), torch.randn(4, *rows)), f"4 chains of {list(rows)}")


def _is_dense_pointwise(node: Node) -> bool:
    """Return whether ``node`` is a pointwise call that can be stacked. Its result must be contiguous, and all tensors
    that it reads must have the shape of the result.
    """
    held = fake_tensor(node)
    if held is None or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return False
    operands = [fake_tensor(n) for n in node.all_input_nodes]
    # A chain of other layouts would need a copy per operand, which costs more than its launches.
    return held.is_contiguous() and all(t is not None and t.shape == held.shape for t in operands)


def _is_chain_step(node: Node, user: Node) -> bool:
    """Return whether ``node`` may precede ``user`` in a chain of pointwise calls. ``node`` must be a pointwise call
    whose result is contiguous and has the shape of the result of ``user``. ``user`` must be its only reader.
    """
    return (
        _is_dense_pointwise(node)
        and list(node.users) == [user]
        and known_tensor(node).shape == known_tensor(user).shape
    )


def _ends_chain(node: Node) -> bool:
    """Return whether ``node`` is the last call of a chain of pointwise calls. It must be pointwise itself. Its result
    has no or several readers, or its only reader does not continue the chain.
    """
    if not _is_dense_pointwise(node):
        return False
    users = list(node.users)
    return len(users) != 1 or not _is_dense_pointwise(users[0]) or _previous_chain_step(users[0]) is not node


def _previous_chain_step(user: Node) -> Node | None:
    """Return the first input of the call ``user`` that may precede it in a chain. Such an input is a pointwise call of
    the same shape that only ``user`` reads. Return None if there is none.
    """
    return next((n for n in user.all_input_nodes if _is_chain_step(n, user)), None)


def _step_form(given: Any, place: dict[Node, int]) -> str:
    """Return a string for the argument ``given`` of a call in a chain. Two chains compute the same if the strings of
    all their arguments are equal.

    An earlier call of the chain is written as its number in ``place``. Any other node is written as its dtype, device
    and sizes, and a constant as its ``repr``.
    """
    if isinstance(given, Node):
        return f"step {place[given]}" if given in place else f"operand {tensor_signature(fake_tensor(given))}"
    if isinstance(given, (list, tuple)):
        return f"[{', '.join(_step_form(v, place) for v in given)}]"
    if isinstance(given, dict):
        return str({k: _step_form(v, place) for k, v in given.items()})
    return repr(given)


def _chain_operands(chain: Sequence[Node]) -> list[Node]:
    """Return the nodes that calls of ``chain`` read and that are not in ``chain``, in the order in which they are read.
    A node that is read twice is listed twice.
    """
    return [n for step in chain for n in _nodes_read(step) if n not in chain]


def _nodes_read(step: Node) -> list[Node]:
    """Return the nodes among the arguments of the call ``step``. A node that the call reads twice is listed twice."""
    reads: list[Node] = []
    torch.fx.node.map_arg([step.args, step.kwargs], lambda n: reads.append(n))
    return reads


def _make_stacked_chain(chain: Sequence[Node]) -> Callable[..., list[Tensor]]:
    """Return a function that computes the chain of pointwise calls once for several members, on stacked tensors. It
    returns a list with the result of each member.

    Its first argument holds, for each operand of the chain, a list with one tensor per member. Its second argument
    ``own`` states for each result whether it must not share memory with the other results.
    """
    inside = set(chain)

    def run(operands: list[list[Tensor]], own: list[bool]) -> list[Tensor]:
        """Return the results of the chain as a list with one tensor per member. They are computed once on stacked
        tensors. ``operands`` holds, for each operand of the chain, a list with one tensor per member. ``own[i]`` is
        true if result ``i`` must not share memory with the others.
        """
        # In the order in which the steps read their operands.
        given = iter([torch.stack(each) for each in operands])
        made: dict[Node, Tensor] = {}
        for step in chain:
            args, kwargs = torch.fx.node.map_arg(
                (step.args, step.kwargs), lambda n: made[n] if n in inside else next(given)
            )
            made[step] = step.target(*args, **kwargs)  # type: ignore[operator]
        outs = made[chain[-1]].unbind(0)
        return [o.clone() if copy else o for o, copy in zip(outs, own, strict=True)]

    return run


def _run_chains(x: Tensor, y: Tensor) -> Tensor:
    """Return the results of one chain of pointwise operators for each slice of ``x`` and ``y`` along the first dim. A
    cumulative sum follows each chain, and the sums are stacked.
    """
    chains = [torch.tanh(a * b + 1.0) for a, b in zip(x.unbind(0), y.unbind(0), strict=True)]
    # A cumulative sum is not pointwise, so each chain ends ahead of it.
    return torch.stack([c.cumsum(0) for c in chains])
