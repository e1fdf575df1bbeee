"""``GroupRewrite``, the base of rewrites that replace independent calls of one kind by one call.

A subclass defines the calls and the merged call. Calls are independent if none is computed from another and nothing is
written in between.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from shiplap.declare.code_digest import code_digest
from shiplap.rewrite.base import Rewrite, short_digest
from shiplap.rewrite.graph import (
    barrier_reason,
    describe_node,
    fake_tensor,
    name_and_operator,
    operator_name,
    place_replacement,
)
from shiplap.rewrite.group.cost import MACHINES, MINIMAL_GAIN, Machine, MergePrice, machine_of_node
from shiplap.rewrite.match import Level, NearMiss, Obstacle, Outcome
from shiplap.rewrite.normalize_call import canonical_name
from shiplap.rewrite.obstacle import RewriteObstacle
from shiplap.rewrite.passthrough_ops import VIEWING_OPERATORS
from shiplap.rewrite.program import proving
from shiplap.rewrite.walk import walk_from


class IndependentCalls:
    """The calls that may be merged, and the first call that may not join them, with the reason.

    Attributes:
        members: the calls that may be merged, at least one, in graph order.
        left: the first call that was left out, or None.
        because: the member from which ``left`` is computed, or the node in between that calls must not be moved past,
            such as a write. It is None if ``left`` is None.
    """

    def __init__(self, members: list[Node], left: Node | None, because: Node | None) -> None:
        """Set the calls that may be merged, the first call that was left out, and the node that is the reason."""
        self.members, self.left, self.because = members, left, because


def independent_calls(graph: Graph, calls: Sequence[Node], most: int) -> IndependentCalls:
    """Return a group of calls that are independent of each other, and the first call that was left out. The group
    consists of the first of ``calls`` and later calls, at most ``most`` in all.

    ``calls`` are in graph order. Merging the returned calls leaves the graph without a cycle. Search again after each
    merge, since a second group that was found before the merge may close a cycle.
    """
    # Sets of calls are integers with a bit per call: each node of the graph needs a set, and large graphs have many
    # nodes.
    bits = {node: 1 << i for i, node in enumerate(calls)}
    above: dict[Node, int] = {}  # node → those of the calls that it is computed from
    members, taken, wall = [calls[0]], bits[calls[0]], None
    left = because = None
    started = False
    for node in graph.nodes:
        started = started or node is calls[0]
        if not started:
            continue  # nothing ahead of the first call is computed from one
        # One union of integers per node, whatever the number of calls.
        reach = _unite_masks(above.get(n, 0) | bits.get(n, 0) for n in node.all_input_nodes)
        above[node] = reach
        if node in bits and node is not calls[0] and len(members) < most:
            # Only the members count. A call that depends on a call which was left out may still join.
            source = next((m for m in members if reach & bits[m]), None)
            if source is None and wall is None:
                members.append(node)
                taken |= bits[node]
            elif left is None:
                left, because = node, source or wall
        # The first write ends the group: calls behind it would be moved to a place ahead of it, or the reverse.
        wall = wall or (node if barrier_reason(node) else None)
    return IndependentCalls(members, left, because)


def _unite_masks(masks: Iterable[int]) -> int:
    """Return the integer in which those bits are set that are set in any of ``masks``."""
    union = 0
    for mask in masks:
        union |= mask
    return union


MergedCall = tuple[Callable[..., Any], Sequence[Any]]
"""A function of plain PyTorch that returns a tensor per member, and its arguments: nodes, constants, lists of them."""

# Operators whose result may be memory of their argument ("to", "contiguous": where there is nothing to do).
ALIASING_OPERATORS = VIEWING_OPERATORS | frozenset(
    {
        "alias",
        "detach",
        "diagonal",
        "dropout",
        "float",
        "getattr",
        "slice",
        "swapaxes",
        "t",
        "to",
        "type_as",
    }
)


class GroupRewrite(Rewrite):
    """A rewrite that merges independent calls for which :meth:`key` returns equal values into one call where that is
    faster.

    Args:
        least: the smallest number of calls that are merged.
        most: the largest number of calls that are merged.
        always: if true, merge even if the estimated times predict no gain.
    """

    level: Level = "pre-grad"

    def __init__(self, *, least: int = 2, most: int = 64, always: bool = False) -> None:
        """Store ``least`` and ``most``, the smallest and the largest number of calls that are merged into one. If
        ``always`` is true, calls are merged even if the estimated times predict no gain. Otherwise they are merged only
        if these predict one.
        """
        self.least, self.most, self.always = least, most, always

    @abstractmethod
    def key(self, node: Node) -> Hashable | None:
        """Return a value that is equal for calls that this rewrite could merge into one, such as linear layers of one
        shape. Return None for a node that is never merged.
        """

    @abstractmethod
    def merge(self, members: Sequence[Node]) -> MergedCall:
        """Return a pair of a function that computes all of ``members`` at once, and a sequence of its arguments. The
        members have equal values of :meth:`key`. The function returns a list of tensors, one for each member. The
        arguments are nodes, constants and lists of these.
        """

    @abstractmethod
    def price(self, members: Sequence[Node], machine: Machine) -> MergePrice | str:
        """Return a ``MergePrice`` with the estimated times that merging the calls ``members`` saves and adds on
        ``machine``. If merging them is never faster, return the reason as a string. ``machine`` holds the measured
        costs of a type of device.
        """

    def nodes(self, member: Node) -> list[Node]:
        """Return all nodes that leave the graph when the call ``member`` is merged. They are ``member`` and, for a
        chain of calls, the earlier calls of the chain.
        """
        return [member]

    @property
    def digest(self) -> str:
        """A digest of everything on which this rewrite's effect depends. It covers the methods of the class and its
        base classes, the options, and the measured costs of devices.
        """
        # The whole class hierarchy counts: a change in a base class may change the merged call.
        methods = [m for c in type(self).__mro__ for m in vars(c).values() if callable(m) or isinstance(m, property)]
        plain = [m.fget if isinstance(m, property) else m for m in methods]
        parts = [code_digest(*(m for m in plain if m is not None))]
        options = (self.least, self.most, self.always, MACHINES, MINIMAL_GAIN, self.describe_options())
        return short_digest(*parts, *options)

    def describe_options(self) -> str:
        """Return a string with the further options of a subclass on which its effect depends, for use in ``digest``.
        The base class has none and returns an empty string.
        """
        return ""

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Merge calls of ``graph``, in place, that have equal values of :meth:`key` and do not depend on each other.
        Yield a ``Match`` for each merged group. Yield a ``NearMiss`` with the reason for calls with equal keys that are
        not merged.
        """
        families: dict[Hashable, list[Node]] = {}
        for node in graph.nodes:
            # Keys are compared by equality, so the calls of one key may be anywhere in the graph.
            if (key := self.key(node)) is not None:
                families.setdefault(key, []).append(node)
        for family in families.values():
            yield from self._merge_family(graph, family)

    def _merge_family(self, graph: Graph, calls: list[Node]) -> Iterator[Outcome]:
        """Merge ``calls``, which all have an equal :meth:`key`, in groups of calls that do not depend on each other.
        Yield a ``Match`` for each merged group, and a ``NearMiss`` for each group that is not worth merging. If no
        group has enough calls, yield one ``NearMiss`` for the first call that cannot join.
        """
        alone = True
        while len(calls) >= self.least:
            # Not all calls of a key are independent, so there may be several groups.
            group = independent_calls(graph, calls, self.most)
            if len(group.members) >= self.least:
                alone = False
                yield self._merge_members(graph, group.members)
            elif alone and group.left is not None and group.because is not None:
                alone = False  # one of them tells the story of the family
                yield self._near_miss(group.left, group.because, group.members)
            # The group is sought anew in the changed graph: merging may have made other calls depend on each other.
            calls = [n for n in calls if n not in group.members]

    def _merge_members(self, graph: Graph, members: list[Node]) -> Outcome:
        """Merge the calls ``members`` into one if the estimated times say that it is faster, or if ``always`` is true
        or a proof is running. Return the ``Match``, or a ``NearMiss`` with the reason if they are not merged.
        """
        # All members are on one device, which is a part of their key.
        machine = machine_of_node(members[0])
        price = self.price(members, machine) if machine else "nothing was measured on this device"
        # A proof merges whatever it costs: it compares results and not times.
        declined = isinstance(price, str) or not price.pays
        if declined and not (self.always or proving.get()):
            reason = f"{len(members)} calls of {operator_name(members[0])}: {price}"
            return self.make_near_miss(members[0], "cost", reason, members)
        fn, args = self.merge(members)
        bound = tuple((f"call {i}", describe_node(n)) for i, n in enumerate(members))
        return place_replacement(
            graph, self.level, self.name, fn, args, members, [n for m in members for n in self.nodes(m)], bound
        )

    def _near_miss(self, node: Node, because: Node, members: Sequence[Node]) -> NearMiss:
        """Return a ``NearMiss`` which says that the call ``node`` was not merged with ``members`` because of the node
        ``because``.

        ``because`` is a member from which ``node`` is computed, a write to a tensor, or the start or end of a
        ``no_grad`` or autocast block.
        """
        if because in members:
            reason = f"{node.name} is computed from {because.name}; only independent calls are merged"
            return self.make_near_miss(node, "argument", reason, members)
        between = f"{members[0].name} and {node.name}"
        obstacle, does = barrier_reason(because) or ("mutation", "")
        reason = f"{name_and_operator(because)} {does} between {between}"
        return self.make_near_miss(node, obstacle, reason, members)

    def make_near_miss(self, node: Node, obstacle: Obstacle, reason: str, members: Sequence[Node]) -> NearMiss:
        """Return a ``NearMiss`` which says that the call ``node`` was not merged with ``members``. It has the given
        kind of obstacle and reason.

        The numbers of nodes that fit, and of nodes in all, are both the number of ``members``.
        """
        count = len(members)
        return self.near_miss(RewriteObstacle(node, obstacle, reason, fitting=count), of=count)


def may_be_returned(node: Node) -> bool:
    """Return whether the output of the graph may contain ``node`` or a view of it. Such a result must not share memory
    with the other results of a merged call.
    """

    def views_of(user: Node) -> Iterable[Node]:
        """Return the users of the node ``user`` if it may return a view of its argument. Otherwise return an empty
        tuple.
        """
        # A view of the result is returned as memory of the stacked tensor, which the caller could see as an alias.
        return user.users if canonical_name(user) in ALIASING_OPERATORS else ()

    return any(user.op == "output" for user in walk_from(node.users, views_of))


def tensor_signature(held: Any) -> tuple[Any, ...] | None:
    """Return a tuple of the properties that the tensors of merged calls must share, namely dtype, device and sizes. The
    device and the sizes are strings. Return None for a value that is no tensor.
    """
    # Symbols by name: a comparison of symbols would add a guard.
    return (held.dtype, str(held.device), *map(str, held.shape)) if isinstance(held, Tensor) else None


def known_tensor(node: Node) -> Tensor:
    """Return the fake tensor of ``node``. Raise ``AssertionError`` if ``node`` stands for no tensor."""
    meta = fake_tensor(node)
    assert meta is not None, f"{node} stands for no tensor"
    return meta
