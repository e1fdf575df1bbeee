"""Find the calls of a graph that can be made as one call.

None of these calls is computed from another, and nothing is written in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.fx import Graph, Node

from shiplap.rewrite.graph import barrier_reason


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
