"""``RewriteObstacle``, the reason why a rewrite does not apply at one place. A ``NearMiss`` is made from it."""

from __future__ import annotations

from torch.fx import Node

from shiplap.rewrite.graph import name_and_operator
from shiplap.rewrite.match import Obstacle


class RewriteObstacle(Exception):
    """The obstacle to a rewrite at one node, with its kind, a reason, a fix, and the number of nodes that fit.

    A function returns it if its caller chooses between several obstacles. A function raises it to end the search at
    that node.
    """

    def __init__(self, node: Node, obstacle: Obstacle, reason: str, fix: str = "", fitting: int = 1) -> None:
        """Set the node, the kind of the obstacle, the reason, a fix, and the number of nodes of the pattern that fit
        before it.
        """
        self.node, self.obstacle, self.reason, self.fix, self.fitting = node, obstacle, reason, fix, fitting
        super().__init__(reason)


def obstacle_of_reader(node: Node, reader: Node, fix: str = "", fitting: int = 1) -> RewriteObstacle:
    """Return the obstacle to a replacement which says that ``reader``, a call or the output of the graph, still reads
    the value of ``node``. The replacement would no longer compute that value.

    ``fix`` is the remedy, or an empty string if there is none. ``fitting`` is the number of nodes of the pattern that
    fit.
    """
    who = "the graph returns it" if reader.op == "output" else f"{reader.name} reads it, too"
    what = f"{name_and_operator(node)} would no longer be computed, but {who}"
    return RewriteObstacle(node, "user", what, fix, fitting)
