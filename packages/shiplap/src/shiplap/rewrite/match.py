"""``Match`` and ``NearMiss``, plain values: the change that a rewrite made to a graph, or the obstacle that prevented
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from shiplap.render.lines import relative_place

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
    no place, since fusing knows no bounds between places: ``shiplap.rewrite.survey.SurveyStep`` has them for each
    rewrite.

    ``nodes``: calls in the graph; ``bytes``: read and written by the nodes when none is fused.
    """

    nodes: int = 0
    bytes: int = 0

    def __add__(self, other: Saving) -> Saving:
        """Return the sum of two savings, of nodes and of bytes."""
        return Saving(self.nodes + other.nodes, self.bytes + other.bytes)

    def __str__(self) -> str:
        """Return the saving in words: ``3 nodes fewer, 1.2 MB less to move``."""
        nodes, traffic = abs(self.nodes), _bytes(abs(self.bytes))
        fewer = f"{nodes} node{'s' * (nodes != 1)} {'more' if self.nodes < 0 else 'fewer'}"
        return f"{fewer}, {traffic} {'more' if self.bytes < 0 else 'less'} to move"


def _bytes(number: int) -> str:
    """Return a number of bytes as text with its unit: ``1.5 kB``."""
    size = float(number)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


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

    @property
    def text(self) -> str:
        """The match in one line: the replaced operators, the line of source and the saving."""
        return f"{' + '.join(_joined(self.operators))}{_at_line(self.where[-1] if self.where else '')}: {self.saving}"


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

    @property
    def text(self) -> str:
        """One line about this place where a rewrite almost fits: the kind of obstacle, the line of source, the reason
        and the remedy.
        """
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.obstacle}{_at_line(self.where)}: {self.reason} ({self.fitting} of {self.of} nodes fit){fix}"

    def __str__(self) -> str:
        """Return one line: the rewrite's name, then the obstacle, line of source, reason and remedy."""
        return f"{self.rewrite}: {self.text}"


def _joined(operators: Sequence[str]) -> list[str]:
    """Return operators with equal neighbours joined: ``3 x linear``."""
    return [f"{n} x {op}" if (n := len(list(same))) > 1 else op for op, same in groupby(operators)]


def _at_line(where: str) -> str:
    """Return `` at file:line``, relative to the working folder, or an empty text for no place."""
    return f" at {relative_place(where)}" if where else ""


OBSTACLE_FIXES: dict[Obstacle, str] = {
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
