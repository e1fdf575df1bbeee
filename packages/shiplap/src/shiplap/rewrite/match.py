"""``Match`` and ``NearMiss``, plain values: the change that a rewrite made to a graph, or the obstacle that prevented
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Level = Literal["pre-grad", "joint", "post-grad"]
# In the order in which the compiler reaches them.
LEVELS: tuple[Level, ...] = ("pre-grad", "joint", "post-grad")

Obstacle = Literal[
    "operator",
    "argument",
    "constant",
    "guard",
    "shape",
    "dtype",
    "device",
    "layout",
    "user",
    "mutation",
    "mode",
    "gradient",
    "cost",
]


@dataclass(frozen=True)
class Saving:
    """The difference that one place makes, before minus after. A negative number is a cost. Kernels and time belong to
    no place, since fusing knows no bounds between places: ``shiplap.rewrite.survey.Step`` has them for each rewrite.

    ``nodes``: calls in the graph; ``bytes``: read and written by the nodes when none is fused.
    """

    nodes: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Match:
    """A place where a rewrite was applied.

    Attributes:
        rewrite: its name. ``level``: where it ran.
        nodes: names of the nodes that it replaced, in graph order. ``made``: of those that it put there.
        where: lines of the user's source (``file:line``) that the replaced nodes come from, each once.
        operators: of the replaced nodes, in graph order.
        args: what the pattern's arguments were bound to: ``("x", "float32[8, 64] of linear_1")``.
        graph: number of the graph within its scope.
        saving: nodes and bytes here.
    """

    rewrite: str
    level: Level
    nodes: tuple[str, ...]
    made: tuple[str, ...]
    where: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    args: tuple[tuple[str, str], ...] = ()
    graph: int = 0
    saving: Saving = field(default_factory=Saving)


@dataclass(frozen=True)
class NearMiss:
    """A place where a rewrite fits but for one thing.

    Attributes:
        rewrite: its name. ``level``: where it ran.
        node: the node that stopped it. ``where``: the line of the user's source that this node comes from.
        obstacle: the kind of thing that stopped it.
        reason: what the graph has and what the rewrite wants, in one sentence.
        fitting: how many of the ``of`` nodes of the pattern fit before.
        fix: one thing to do about it, where there is one.
    """

    rewrite: str
    level: Level
    node: str
    where: str
    obstacle: Obstacle
    reason: str
    fitting: int = 0
    of: int = 0
    fix: str = ""
    graph: int = 0

    def __str__(self) -> str:
        where = f" at {self.where}" if self.where else ""
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.rewrite}: {self.obstacle}{where}: {self.reason} ({self.fitting} of {self.of} nodes fit){fix}"


FIXES: dict[Obstacle, str] = {
    "operator": "write a second pattern with this call, or change the line",
    "argument": "write the call with these arguments in a pattern of its own",
    "constant": "make the constant a float argument of the pattern, or write a pattern with this one",
    "guard": "widen the guard in where=, if the replacement is right there",
    "shape": "annotate the dim with another name, or a leading '*b', if the replacement takes any size",
    "dtype": "annotate the argument with a wider class, such as Float, if the replacement takes this dtype",
    "device": "return a result on the device of the arguments",
    "layout": "return a dense result: its dims can be put in the order of the graph, but not its strides",
    "user": "let the pattern return this value, too",
    "mutation": "write the model without this write, for example x = x + y instead of x += y",
    "mode": "keep all that the pattern covers on one side of the block's border",
    "gradient": "let autograd see every step of the replacement",
}
"""What to do about an obstacle, where nothing better is known at the place."""

Outcome = Match | NearMiss
