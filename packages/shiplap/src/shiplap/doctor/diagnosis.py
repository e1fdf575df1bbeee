"""The values that the doctor returns: graph breaks, recompiles, unused CUDA graphs. All views render these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A line of source. ``package`` is the installed package that it belongs to, empty for the user's own code."""

    file: str
    line: int
    function: str = ""
    code: str = ""
    package: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def short(self) -> str:
        """The file and line relative to its package: ``transformers/models/x.py:123``."""
        # From the right: a virtual environment may lie in a folder that has the name of the package.
        _, package, rest = self.file.rpartition(f"/{self.package}/") if self.package else ("", "", "")
        return f"{self.package}/{rest}:{self.line}" if package else str(self)


@dataclass(frozen=True)
class Break:
    """A line at which ``torch.compile`` broke the graph, for one reason. Repetitions are counted.

    Attributes:
        place: the line to change: innermost frame that is neither torch nor Python's standard library.
        user: innermost line of the user's own code; differs from ``place`` inside an installed package.
        chain: frames from the user's script to ``place``, outermost first, torch's own left out.
        cause: id of the cause, a key of ``shiplap.doctor.causes.CAUSES``.
        call: the kernel or call at fault, as far as it can be named.
        reason, explanation, hints, registry: torch's words and the id of torch's graph-break registry.
        fix: one sentence; ``example``: code that does it, where there is some.
        graphs: compiled functions that it cut. Each cut is at least one more graph and one more dispatch.
        seconds: compile time spent on those.
        skipped: torch could not resume after it, so the whole function runs uncompiled.
    """

    place: Place
    user: Place
    chain: tuple[Place, ...]
    cause: str
    call: str
    reason: str
    explanation: str
    hints: tuple[str, ...]
    registry: str
    fix: str
    example: str = ""
    graphs: int = 1
    times: int = 1
    seconds: float = 0.0
    skipped: bool = False

    @property
    def cost(self) -> tuple[bool, int, float]:
        """The sort key by importance: code that runs uncompiled, then number of graphs, then compile time."""
        return self.skipped, self.graphs, self.seconds


@dataclass(frozen=True)
class Recompile:
    """A function that was compiled again because one guard failed; repeated failures of that guard are counted.

    Attributes:
        cause: the kind of variation: ``"size"``, ``"value"``, ``"type"``, ... (``shiplap.doctor.recompiles.VARIED``).
        subject: the argument, dim or attribute that varied; ``values``: its values, in order, as far as torch reports
            them.
        guard: the first failed guard in torch's words.
        limit: torch stopped compiling the function after so many versions. It now runs uncompiled.
    """

    place: Place
    cause: str
    subject: str
    values: tuple[str, ...]
    guard: str
    fix: str
    example: str = ""
    times: int = 1
    seconds: float = 0.0
    limit: bool = False

    @property
    def cost(self) -> tuple[bool, int, float]:
        """The sort key by importance: code that runs uncompiled, then number of recompiles, then compile time."""
        return self.limit, self.times, self.seconds


@dataclass(frozen=True)
class Skip:
    """A reason for which CUDA graphs were requested and not used."""

    reason: str
    place: Place | None = None
    times: int = 1
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The findings of one run of a program, the most costly first.

    Attributes:
        target: the command or function; ``compiled``: functions that torch compiled or tried to.
        graphs: graphs that came out; ``seconds``: compile time of all of them; ``processes``: that compiled anything.
        exit_code: the program's own; ``error``: the exception that ended it, where it was seen.
    """

    target: str
    breaks: tuple[Break, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    skips: tuple[Skip, ...] = ()
    compiled: int = 0
    graphs: int = 0
    seconds: float = 0.0
    processes: int = 0
    exit_code: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether every compiled function became one graph."""
        # A run that compiled nothing proves nothing.
        return bool(self.compiled) and not self.breaks

    @property
    def summary(self) -> str:
        """All counts in one line."""
        if not self.compiled:
            return "nothing was compiled: no call of a torch.compile'd function was seen"
        recompiled, skips = sum(r.times for r in self.recompiles), sum(s.times for s in self.skips)
        parts = [_count(len(self.breaks), "graph break"), _count(recompiled, "recompile")]
        parts += [_count(skips, "CUDA graph skip")] if skips else []
        where = f"{_count(self.compiled, 'compiled function')}, {_count(self.graphs, 'graph')}"
        processes = f", {self.processes} processes" if self.processes > 1 else ""
        return f"{', '.join(parts)} in {where}{processes}; {self.seconds:.1f} s of compilation"


def _count(number: int, thing: str) -> str:
    """Return a number with its noun, in the plural where needed."""
    return f"{number} {thing}" + "s" * (number != 1)
