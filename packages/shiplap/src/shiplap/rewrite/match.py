"""``Match`` and ``NearMiss``, the records of what a rewrite changed in a graph, and of what prevented a change."""

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
    """The work that the replacement of a part of a graph saves, as the work before minus the work after. A negative
    number means that the replacement adds work.

    ``nodes`` counts the calls in the graph. ``bytes`` counts what the calls read and write if each runs as a kernel of
    its own. Kernels and time are measured for a whole rewrite by ``shiplap.rewrite.survey.SurveyStep``, because the
    compiler fuses calls of several replacements.
    """

    nodes: int = 0
    bytes: int = 0

    def __add__(self, other: Saving) -> Saving:
        """Return the sum of two savings, of nodes and of bytes."""
        return Saving(self.nodes + other.nodes, self.bytes + other.bytes)

    def __str__(self) -> str:
        """Return the saving in words, such as ``3 nodes fewer, 1.2 MB less to move``."""
        nodes, traffic = abs(self.nodes), _bytes(abs(self.bytes))
        fewer = f"{nodes} node{'s' * (nodes != 1)} {'more' if self.nodes < 0 else 'fewer'}"
        return f"{fewer}, {traffic} {'more' if self.bytes < 0 else 'less'} to move"


def _bytes(number: int) -> str:
    """Return a number of bytes as text with its unit, such as ``1.5 kB``."""
    size = float(number)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


@dataclass(frozen=True)
class Match:
    """A record of a part of a graph that a rewrite has replaced.

    Attributes:
        rewrite: the name of the rewrite.
        level: the stage of compilation at which it ran.
        nodes: the names of the replaced nodes, in graph order.
        made: the names of the nodes that replaced them.
        where: lines of the user's source (``file:line``) that the replaced nodes come from, without duplicates.
        operators: the operators of the replaced nodes, in graph order.
        args: what the pattern's arguments were bound to, such as ``("x", "float32[8, 64] of linear_1")``.
        graph: the number of the graph within its set of rewrites.
        saving: the nodes and bytes that the replacement saves here.
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
        """The match in one line, with the replaced operators, the last line of user code and the saving."""
        return f"{' + '.join(_joined(self.operators))}{_at_line(self.where[-1] if self.where else '')}: {self.saving}"


@dataclass(frozen=True)
class NearMiss:
    """A record of a part of a graph that a rewrite would have replaced if there were not one obstacle.

    Attributes:
        rewrite: the name of the rewrite.
        level: the stage of compilation at which it ran.
        node: the name of the node at which the obstacle was found.
        where: the line of the user's source that this node comes from.
        obstacle: the kind of the obstacle.
        reason: what the graph has and what the rewrite expects, in one sentence.
        fitting: how many nodes of the pattern fit before the obstacle.
        of: how many nodes the pattern has.
        fix: one remedy, or an empty string.
        graph: the number of the graph within its set of rewrites.
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
        """The near miss in one line, with the kind of obstacle, the line of source, the reason and the remedy."""
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.obstacle}{_at_line(self.where)}: {self.reason} ({self.fitting} of {self.of} nodes fit){fix}"

    def __str__(self) -> str:
        """Return one line with the rewrite's name, the obstacle, the line of source, the reason and the remedy."""
        return f"{self.rewrite}: {self.text}"


def _joined(operators: Sequence[str]) -> list[str]:
    """Return ``operators`` in order, with each run of equal names written as one string such as ``3 x linear``."""
    return [f"{n} x {op}" if (n := len(list(same))) > 1 else op for op, same in groupby(operators)]


def _at_line(where: str) -> str:
    """Return the string `` at file:line`` for the source line ``where``, with the file relative to the working folder.
    Return an empty string if ``where`` is empty.
    """
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
