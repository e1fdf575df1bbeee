"""``RewriteObstacle``: what keeps a rewrite from one place, on the way to a ``NearMiss``."""

from __future__ import annotations

from torch.fx import Node

from shiplap.rewrite.graph import name_and_operator
from shiplap.rewrite.match import Obstacle


class RewriteObstacle(Exception):
    """The obstacle at one node: its kind, a sentence, a fix, and how many nodes of the pattern fit before it.

    A walk returns it where its caller decides, and raises it where the place is given up.
    """

    def __init__(self, node: Node, obstacle: Obstacle, reason: str, fix: str = "", fitting: int = 1) -> None:
        """Keep the node and kind of the obstacle, the reason, a fix, and the number of nodes of the pattern that fit
        before it.
        """
        self.node, self.obstacle, self.reason, self.fix, self.fitting = node, obstacle, reason, fix, fitting
        super().__init__(reason)


def obstacle_of_reader(node: Node, reader: Node, fix: str = "", fitting: int = 1) -> RewriteObstacle:
    """Return the obstacle to a replacement that ``reader`` reads the value of ``node``, which would no longer be
    computed. ``fix`` is the remedy, and ``fitting`` the number of nodes that fit.
    """
    who = "the graph returns it" if reader.op == "output" else f"{reader.name} reads it, too"
    what = f"{name_and_operator(node)} would no longer be computed, but {who}"
    return RewriteObstacle(node, "user", what, fix, fitting)
