"""The doctor's values: graph breaks, recompiles, unused CUDA graphs. Text, JSON and HTML render these."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from shiplap.render.lines import Line, TextTable, count_phrase, line, relative_place, row


@dataclass(frozen=True)
class SourcePlace:
    """A line of a source file, with its source code and the name of the function around it. ``package`` is the
    installed package to which it belongs, or an empty string for the user's own code.
    """

    file: str
    line: int
    function: str = ""
    code: str = ""
    package: str = ""

    def __str__(self) -> str:
        """Return ``file:line``."""
        return f"{self.file}:{self.line}"

    @property
    def short(self) -> str:
        """The file relative to its installed package, and the line, such as ``transformers/models/x.py:123``. For the
        user's own code it has the file's whole path.
        """
        # From the right: a virtual environment may lie in a folder that has the name of the package.
        _, package, rest = self.file.rpartition(f"/{self.package}/") if self.package else ("", "", "")
        return f"{self.package}/{rest}:{self.line}" if package else str(self)

    @property
    def shown(self) -> str:
        """The file and line as a string for display. The file is relative to its installed package, or to the current
        directory for the user's own code.
        """
        return self.short if self.package else relative_place(str(self))

    def around(self, radius: int = 1) -> list[tuple[int, str, bool]]:
        """Return ``(number, source code, is_self)`` for this line and ``radius`` lines on each side. ``is_self`` is
        true for this line. Return an empty list if the source cannot be read.
        """
        lines = linecache.getlines(self.file)
        numbers = range(max(1, self.line - radius), min(len(lines), self.line + radius) + 1)
        return [(n, lines[n - 1].rstrip(), n == self.line) for n in numbers] if self.line <= len(lines) else []


@dataclass(frozen=True)
class Break:
    """A line at which ``torch.compile`` broke the graph, for one reason. If the line breaks it several times for that
    reason, one record counts them all.

    Attributes:
        place: the line to change, which is the innermost frame outside torch and Python's standard library.
        user: the innermost line of the user's own code. It differs from ``place`` inside an installed package.
        chain: the frames from the user's script to ``place``, from the outermost on, without torch's own.
        cause: the id of the cause, a key of ``shiplap.doctor.causes.BREAK_CAUSES``.
        title, why: the texts of that cause in ``BREAK_CAUSES``.
        call: the kernel or call at fault, or the source code of the statement if neither can be named.
        reason, explanation, hints: torch's message in parts.
        registry: the id of the message in torch's registry of graph breaks.
        page: the address of the registry's web page about the message, or an empty string.
        fix: one sentence that says how to remove the break.
        example: code that removes it, or an empty string.
        graphs: the number of compiled functions that it cut. Each cut is at least one more graph and one more dispatch.
        times: the number of its occurrences.
        seconds: the compile time of the graphs that it ended.
        skipped: whether torch could not resume after it, so that the whole function runs uncompiled.
        owner: whose code has to change. It is ``"yours"``, the name of a library, or ``"torch"``.
        before, after: the numbers of operations in the compiled graphs before and after the break.
        follows: the break or recompile that causes it, or an empty string.
        observers: the names of the frames of observed calls in which its graphs were compiled (see ``Compilation``).
        frames: the first lines of the functions in whose compilation it came. A function that they call is traced as a
            part of them.
    """

    place: SourcePlace
    user: SourcePlace
    chain: tuple[SourcePlace, ...]
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
    title: str = ""
    why: str = ""
    page: str = ""
    owner: str = "yours"
    before: int = 0
    after: int = 0
    follows: str = ""
    observers: tuple[str, ...] = ()
    frames: tuple[SourcePlace, ...] = ()

    @property
    def subject(self) -> str:
        """The call that breaks the graph. A ``Recompile`` has an attribute of the same name, which is the value that
        varied.
        """
        return self.call

    @property
    def headline(self) -> str:
        """The first line of torch's message about the break."""
        return self.reason

    @property
    def words(self) -> str:
        """Torch's whole message about the break, which is its reason, explanation and hints."""
        return "\n".join((self.reason, self.explanation, *self.hints))

    @property
    def at(self) -> SourcePlace:
        """The source line to change in order to remove the break."""
        return self.place

    @property
    def key(self) -> tuple[str, ...]:
        """The identity of the break, by which breaks of two runs are compared. It is a tuple of the file, the function,
        the cause, the call and torch's reason. It has no line number, since edits move lines.
        """
        return self.place.file, self.place.function, self.cause, self.call, self.reason

    @property
    def cost(self) -> tuple[bool, int, float]:
        """The sort key of graph breaks by importance. It is a tuple of whether the function runs uncompiled, the number
        of functions that it cut, and the compile time in seconds.
        """
        return self.skipped, self.graphs, self.seconds

    @property
    def effect(self) -> str:
        """The consequences of the break in words. They say what the break cuts, how often, and how much compile time
        that takes.
        """
        cut = "runs uncompiled" if self.skipped else f"cuts {count_phrase(self.graphs, 'function')}"
        graphs = f"; {count_phrase(self.before, 'operation')} in front of it, {self.after} behind it"
        return f"{cut}, seen {self.times}x, {self.seconds:.2f} s of compilation{graphs}"

    def lines(self, number: int) -> Iterator[Line]:
        """Yield the lines of text that show the graph break.

        They show its source code, cause, cost, torch's message and the fix. ``number`` is printed in front of the first
        line.
        """
        yield line(f"{number}. {self.place.shown}", "bold", (f"  {self.call}", "bold red"))
        for n, text, here in self.place.around():
            mark = f"  {'>' if here else ' '} {n:>5}  "
            yield line(mark, "red" if here else "dim", (text, "" if here else "dim"))
        yield from row("cause", f"{self.title}. {self.why}")
        yield from row("owner", {"yours": "your code", "torch": "torch itself"}.get(self.owner, self.owner))
        yield from row("follows", self.follows)
        if self.user != self.place:
            yield from row("reached", "\n".join(f"{p.shown}  {p.code}" for p in self.chain[:-1]))
        yield from row("cost", self.effect)
        yield from row("torch", f"{self.registry} {self.reason}\n{self.explanation}".strip())
        for hint in self.hints:
            yield from row("hint", hint)
        yield from row("fix", self.fix, "green")
        if self.example:  # flush left: it is there to be copied
            yield line(f"\n{self.example}")
        yield line()


@dataclass(frozen=True)
class Recompile:
    """A function that was compiled again because one guard failed. If that guard failed several times, one record
    counts them all. A guard is torch's condition for reusing compiled code.

    Attributes:
        cause: the kind of the varied value, such as ``"size"`` or ``"type"`` (a key of
            ``shiplap.doctor.recompiles.VARIATION_KINDS``).
        title: the cause in words.
        subject: the argument, dim or attribute that varied.
        values: the values that it had, in order, as far as torch says.
        guard: the condition of the first failed guard, in torch's syntax.
        reason: torch's whole text about the guard.
        reader: the line that read the varied value, or None if torch does not name it.
        owner: whose code has that line. It is ``"yours"`` or the name of a library.
        follows: the break that causes it, or an empty string.
        limit: whether torch stopped compiling the function after so many versions. It then runs uncompiled.
        observers: the names of the frames of observed calls in which it was compiled again (see ``Compilation``).
    """

    place: SourcePlace
    cause: str
    subject: str
    values: tuple[str, ...]
    guard: str
    fix: str
    example: str = ""
    times: int = 1
    seconds: float = 0.0
    limit: bool = False
    title: str = ""
    reason: str = ""
    reader: SourcePlace | None = None
    owner: str = "yours"
    follows: str = ""
    observers: tuple[str, ...] = ()

    @property
    def headline(self) -> str:
        """The condition of the first guard that failed, in torch's syntax. A guard is a condition for reusing compiled
        code.
        """
        return self.guard

    @property
    def words(self) -> str:
        """Torch's whole message about the recompile."""
        return self.reason

    @property
    def at(self) -> SourcePlace:
        """The source line that read the varied value. If it is not known, it is the first line of the function."""
        return self.reader or self.place

    @property
    def key(self) -> tuple[str, ...]:
        """The identity of the recompile, by which recompiles of two runs are compared. It is a tuple of the file, the
        function, ``"recompile"``, the cause and the varied value. It has no line number, since edits move lines.
        """
        return self.place.file, self.place.function, "recompile", self.cause, self.subject.partition(", dim ")[0]

    @property
    def cost(self) -> tuple[bool, int, float]:
        """The sort key of recompiles by importance. It is a tuple of whether torch's limit was reached, the number of
        recompiles, and the compile time in seconds.
        """
        return self.limit, self.times, self.seconds

    @property
    def effect(self) -> str:
        """The consequences of the recompile in words. They are how often the function was compiled again, the compile
        time, and the values that varied.
        """
        values = f"; values {', '.join(self.values)}" if self.values else ""
        limit = "; torch has stopped compiling it" if self.limit else ""
        return f"{self.times}x, {self.seconds:.2f} s of compilation{values}{limit}"

    def lines(self) -> Iterator[Line]:
        """Yield the lines of text that show the recompile.

        They show its function, cause, cost, the failed guard (torch's condition for reusing compiled code) and the fix.
        """
        yield line(f"recompiled: {self.place.shown}", "bold", (f"  {self.place.function}", "bold red"))
        yield from row("cause", f"{self.title}: {self.subject}")
        if self.reader:
            yield from row("read at", f"{self.reader.shown}  {self.reader.code}")
        yield from row("follows", self.follows)
        yield from row("cost", self.effect)
        yield from row("torch", self.guard)
        yield from row("fix", self.fix, "green")
        yield from row("", self.example)
        yield line()


@dataclass(frozen=True)
class Skip:
    """A reason for which torch did not use CUDA graphs that were requested. ``place`` is the source line that torch
    names, or None. ``times`` is the number of cases, and ``fix`` is the remedy.
    """

    reason: str
    place: SourcePlace | None = None
    times: int = 1
    fix: str = ""

    def lines(self) -> Iterator[Line]:
        """Yield the lines of text that show the skipped CUDA graph, with its reason and fix."""
        at = f" at {self.place.shown}" if self.place else ""
        yield line(f"CUDA graph skipped {self.times}x{at}: {self.reason}", "bold")
        yield from row("fix", self.fix, "green")
        yield line()


@dataclass(frozen=True)
class Diagnosis:
    """The graph breaks, recompiles and skipped CUDA graphs of one run of a program, the most costly first.

    Attributes:
        target: the command or function.
        compiled: the number of functions that torch compiled or tried to compile.
        graphs: the number of resulting graphs.
        operations: the number of operations in them. Of the graphs of a function the largest one counts.
        seconds: the compile time of all of them.
        processes: the number of processes that compiled anything.
        exit_code: the exit status of the program.
        error: the exception that ended it, or an empty string if none was seen.
    """

    target: str
    breaks: tuple[Break, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    skips: tuple[Skip, ...] = ()
    compiled: int = 0
    graphs: int = 0
    operations: int = 0
    seconds: float = 0.0
    processes: int = 0
    exit_code: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether something was compiled and no graph break was found."""
        # A run that compiled nothing proves nothing.
        return bool(self.compiled) and not self.breaks

    @property
    def summary(self) -> str:
        """The numbers of graph breaks, recompiles, skipped CUDA graphs, functions and graphs in one line of text."""
        if not self.compiled:
            return "nothing was compiled: no call of a torch.compile'd function was seen"
        recompiled, skips = sum(r.times for r in self.recompiles), sum(s.times for s in self.skips)
        parts = [count_phrase(len(self.breaks), "graph break"), count_phrase(recompiled, "recompile")]
        parts += [count_phrase(skips, "CUDA graph skip")] if skips else []
        where = f"{count_phrase(self.compiled, 'compiled function')}, {count_phrase(self.graphs, 'graph')}"
        processes = f", {self.processes} processes" if self.processes > 1 else ""
        return f"{', '.join(parts)} in {where}{processes}; {self.seconds:.1f} s of compilation"

    @property
    def by_cause(self) -> list[tuple[str, str, list[Break]]]:
        """The graph breaks grouped by cause, as ``(title, explanation, breaks)``. The most costly cause comes first."""
        order = list(dict.fromkeys(b.cause for b in self.breaks))
        ranked = sorted(self.breaks, key=lambda b: order.index(b.cause))
        groups = (list(group) for _, group in groupby(ranked, key=lambda b: b.cause))
        return [(group[0].title, group[0].why, group) for group in groups]

    def lines(self) -> Iterator[Line | TextTable]:
        """Yield the text of the diagnosis, as lines and a table.

        The table ranks the breaks. Then follow each break, recompile and skipped CUDA graph with its code and fix, then
        the summary.
        """
        if self.breaks:
            yield self._table()
        for number, each in enumerate(self.breaks, 1):
            yield from each.lines(number)
        for recompile in self.recompiles:
            yield from recompile.lines()
        for skip in self.skips:
            yield from skip.lines()
        # An exception names the end of a function more exactly than the exit status does.
        if self.error:
            yield line(f"it ended with {self.error}", "red")
        elif self.exit_code:
            yield line(f"the program ended with exit status {self.exit_code}", "red")
        yield line(self.summary, "bold green" if self.ok else "bold")

    def _table(self) -> TextTable:
        """Return the table of graph breaks, with one numbered row for each."""
        rows = tuple(
            (
                (str(number), ""),
                (b.place.shown, ""),
                (b.call, ""),
                (b.title, ""),
                (b.registry, "dim"),
                ("all", "bold red") if b.skipped else (str(b.graphs), ""),
                (f"{b.seconds:.2f}", ""),
            )
            for number, b in enumerate(self.breaks, 1)
        )
        headings = ("", "where", "call", "cause", "torch", "cuts", "s")
        return TextTable(headings, rows, numbers=("", "cuts", "s"), unwrapped=("torch",))
