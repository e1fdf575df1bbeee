"""The values of a treatment: for each entry the remedy that was tried and helped, or that none did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shiplap.doctor.diagnosis import Break, Diagnosis, Recompile
from shiplap.render.lines import Line, line, row

if TYPE_CHECKING:
    from shiplap.doctor.remedies import Remedy


@dataclass(frozen=True)
class TriedEntry:
    """A break or recompile and the result of trying remedies for it.

    Attributes:
        where: the line.
        call: the call at fault, or the value that varied.
        cause: the cause in words.
        owner: whose code has that line.
        remedy: the id of the remedy that helped, or an empty string if none did.
        title, caveat: the texts of the remedy.
        diff: the changes of files by the remedy, as a unified diff.
        before, after: the numbers of breaks and recompiles without and with the remedy.
        outputs, gradients: the numbers of tensors that were compared and agreed.
        refused: the ids of the remedies that were tried and did not help, with the reasons.
        with_others: whether a remedy of another break or recompile has removed this one.
        key: the identity of the break or recompile.
        code: the source code of the line.
        times: how often a recompile occurred without and with the remedy. The second number is 0 if it was removed.
        behind: whether the unchanged program has no such break or recompile. It came into view with the remedies of
            earlier entries.
    """

    where: str
    call: str
    cause: str
    owner: str
    remedy: str = ""
    title: str = ""
    caveat: str = ""
    diff: str = ""
    before: int = 0
    after: int = 0
    outputs: int = 0
    gradients: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    with_others: bool = False
    key: tuple[str, ...] = ()
    code: str = ""
    times: tuple[int, int] = (0, 0)
    behind: bool = False

    @classmethod
    def of(cls, entry: Break | Recompile, remedy: Remedy | None = None, **found: Any) -> TriedEntry:
        """Return a record of the trials of remedies for ``entry``, a break or recompile.

        ``remedy`` is the remedy that helped, or None. ``found`` has further fields of the record.
        """
        if remedy is not None:
            found |= {"remedy": remedy.id, "title": remedy.title, "caveat": remedy.caveat}
        at = entry.at
        return cls(at.shown, entry.subject, entry.title, entry.owner, key=entry.key, code=at.code, **found)

    @property
    def removed(self) -> bool:
        """Whether a trial showed that the break or recompile is removed, by its own remedy or by one of another break
        or recompile.
        """
        return bool(self.remedy and not self.times[1]) or self.with_others

    def lines(self, number: int) -> Iterator[Line]:
        """Yield the lines of text that show the break or recompile and its remedy, or say that there is no remedy.

        ``number`` is printed in front of the first line.
        """
        yield line(f"{number}. {self.where}", "bold", (f"  {self.call}", "bold red"))
        yield from row("cause", self.cause)
        yield from row("seen", "with the remedies above, not in the unchanged program" if self.behind else "")
        yield from row("owner", {"yours": "your code"}.get(self.owner, self.owner))
        # The entry went away before its own remedies were tried, or after they had failed.
        if self.with_others:
            yield from row("remedy", "none of its own: it goes with the remedy of another entry", "green")
        elif self.remedy:
            yield from row("remedy", self.title, "green")
            compared = f"{self.outputs} outputs and {self.gradients} gradients agreed"
            if self.times[1]:
                yield from row(
                    "reduced", f"{self.times[0]}x before, {self.times[1]}x after: it is not removed", "yellow"
                )
            yield from row("shown", f"{self.before} entries before, {self.after} after; {compared}")
            yield from row("caveat", self.caveat, "yellow")
            yield line(f"\n{self.diff.rstrip()}")
        else:
            yield from row("remedy", "no remedy: " + self._what_was_tried(), "yellow")
        yield line()

    def _what_was_tried(self) -> str:
        """Return in words which remedies were tried without success, and why each of them failed."""
        if not self.refused:
            return "none in the catalogue fits this cause and owner"
        return "; ".join(f"{id}: {reason}" for id, reason in self.refused.items())


def key_in_any_function(key: tuple[str, ...]) -> tuple[str, ...]:
    """Return the identity of a break or recompile without its function, the second part of ``key``. An edit may have
    moved its statement to another function.
    """
    return key[:1] + key[2:]


def as_first_seen(tried: Sequence[TriedEntry], entries: Sequence[Break | Recompile]) -> list[TriedEntry]:
    """Return ``tried`` with the lines and identities that their breaks and recompiles have in ``entries``, those of the
    unchanged program. Edits move lines, and statements to other functions.

    What came into view only after an edit gets the line of the unchanged file with the same code, if there is one.
    """
    first = {e.key: e for e in reversed(entries)}
    taken = {t.key for t in tried}
    made = list[TriedEntry]()
    for each in tried:
        known = first.get(each.key)
        moved = [e for e in entries if key_in_any_function(e.key) == key_in_any_function(each.key)]
        if known is None:
            known = next((e for e in moved if e.key not in taken), None)
            taken |= {known.key} if known is not None else set()
        shown = known.at.shown if known is not None else _line_of_unchanged_file(each)
        key = known.key if known is not None else each.key
        made.append(replace(each, where=shown, key=key, behind=not moved))
    return made


def _line_of_unchanged_file(tried: TriedEntry) -> str:
    """Return the place of ``tried`` with the number of the only line of its file that has the same code. If there is no
    such line, or several, the number of the line in the edited copy would mislead, and the place has none. Return the
    place as it is if its code is not known.
    """
    file, _, _ = tried.where.rpartition(":")
    path = Path(tried.key[0]) if tried.key else Path()
    rows = path.read_text(encoding="utf-8").splitlines() if tried.key and path.is_file() else []
    same = [n for n, row in enumerate(rows, 1) if tried.code and row.strip() == tried.code.strip()]
    if len(same) == 1:
        return f"{file}:{same[0]}"
    return f"{file}, in code that a remedy changed" if rows and tried.code.strip() else tried.where


@dataclass(frozen=True)
class RunTime:
    """The seconds of a steady call of the function ``function``, which was called ``calls`` times. ``eager`` is the
    time without compilation, ``compiled`` that with it, and ``remedied`` that with all remedies that helped. A time is
    None if there were fewer than three calls or if it was not measured.
    """

    function: str
    calls: int
    eager: float | None
    compiled: float | None
    remedied: float | None

    def lines(self) -> Iterator[Line]:
        """Yield the line of text with the times of one call of the function. They are the times without compilation,
        compiled, and compiled with the remedies.
        """
        if self.compiled is None:
            text = f"called {self.calls}x: a steady call is measured from three calls on"
        else:
            named = (("eager", self.eager), ("compiled", self.compiled), ("with the remedies", self.remedied))
            text = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in named if seconds is not None)
        yield from row("time", f"{self.function}: {text}")


@dataclass(frozen=True)
class Treatment:
    """The results of all trials of remedies for a program.

    Attributes:
        target: the command of the program.
        before: the diagnosis of the unchanged program.
        after: the diagnosis of the program with all remedies that helped.
        tried: what was found for each break and recompile.
        times: the times of each compiled function.
        ignored: Python values that differ in two runs of the unchanged program, and so were not compared.
        diff: the changes of all remedies, as a unified diff.
        changed: the new content of each changed file, by its path.
    """

    target: str
    before: Diagnosis
    after: Diagnosis
    tried: tuple[TriedEntry, ...]
    times: tuple[RunTime, ...] = ()
    diff: str = ""
    changed: dict[str, str] = field(default_factory=dict)
    exit_code: int = 0
    ignored: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether each break and recompile of the first run has been removed by a remedy."""
        return all(t.removed for t in self.tried)

    @property
    def summary(self) -> str:
        """The numbers of breaks and recompiles with a remedy and of those left, in one line of text."""
        removed = sum(t.removed for t in self.tried)
        left = f"{len(self.after.breaks)} breaks and {sum(r.times for r in self.after.recompiles)} recompiles are left"
        return f"{removed} of {len(self.tried)} entries have a remedy that was shown to remove them; {left}"

    def lines(self) -> Iterator[Line]:
        """Yield the lines of text about all trials. They show each break or recompile with its remedy, the times, and
        the summary.
        """
        for number, each in enumerate(self.tried, 1):
            yield from each.lines(number)
        for each_time in self.times:
            yield from each_time.lines()
        yield from row("ignored", "values that vary by themselves: " + ", ".join(self.ignored) if self.ignored else "")
        yield line(self.summary, "bold green" if self.ok else "bold")
