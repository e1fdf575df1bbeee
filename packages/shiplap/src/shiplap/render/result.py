"""The form of every result that has a verdict: what an audit, a judgement and a tuning return.

A result is read by its ``verdict``, printed as a table in a terminal and shown as one in a notebook.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shiplap.errors import error
from shiplap.render.html import render_html

if TYPE_CHECKING:
    from rich.text import Text

# A verdict, or the outcome of one row -> the style of rich and the class of the style sheet.
STYLES = {
    **dict.fromkeys(("ok", "proven", "accepted", "chosen"), ("green", "ok")),
    **dict.fromkeys(("fail", "failed", "refused"), ("bold red", "fail")),
    **dict.fromkeys(("incomplete", "left out"), ("yellow", "skip")),
    "skip": ("dim", "skip"),
}


@dataclass(frozen=True)
class Row:
    """One line of a table. It holds what the line is about, an outcome such as ``"fail"``, the text, and lines of
    detail below.
    """

    name: str
    outcome: str
    text: str
    details: tuple[str, ...] = ()


class ResultWithVerdict(ABC):
    """The base class of results that have a verdict. A result has no truth value, since a verdict has more than two
    values.
    """

    _good: ClassVar[str]
    """The verdict that a test compares with."""

    @property
    @abstractmethod
    def verdict(self) -> str:
        """The verdict of the result in one word, such as ``accepted``."""

    @property
    @abstractmethod
    def headline(self) -> str:
        """The subject of the result, its verdict and the reason, in one line."""

    @property
    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """The rows of the table that is printed below the headline."""

    def __bool__(self) -> bool:
        """Raise ``SL504``. A verdict has more than two values and must be compared with a text."""
        # ``assert result`` would pass for a failed result, as any object is true.
        raise error(
            "SL504",
            where=type(self).__name__,
            got=f"a truth value of {self.headline!r}",
            expected=f'.verdict, which is "{self._good}" where nothing is wrong and nothing was left out',
            fix=f'write: assert result.verdict == "{self._good}"',
        )

    def __repr__(self) -> str:
        """Return ``<CLASS HEADLINE>``, with the class name and the headline of the result."""
        return f"<{type(self).__name__} {self.headline}>"

    def __str__(self) -> str:
        """Return the result as plain text. The headline comes first, followed by the rows."""
        return "\n".join(text for text, _ in table_lines(self))

    def __rich__(self) -> Text:
        """Return the result as text with styles, for rich."""
        from rich.text import Text

        return Text("\n").join(Text(text, style) for text, style in table_lines(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the result as plain text, for IPython."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Return the result as an HTML table, for a notebook."""
        return render_html("result.html.jinja", result=self, styles=STYLES)


def exit_status(verdicts: Iterable[str]) -> int:
    """Return the exit status of a verb (subcommand) for the verdicts of its results. It is 0 if all are good, and 1 if
    one of them reports a defect. It is 3 if there is no defect and something was left out.
    """
    bad = {v for v in verdicts if STYLES[v][1] != "ok"}
    return 0 if not bad else 3 if bad == {"incomplete"} else 1


def table_lines(result: ResultWithVerdict) -> Iterator[tuple[str, str]]:
    """Yield the lines of a result as text, each with a style of rich. The headline comes first, followed by the rows in
    columns.
    """
    yield result.headline, STYLES.get(result.verdict, ("", ""))[0]
    rows = result.rows
    names = max((len(row.name) for row in rows), default=0)
    outcomes = max((len(row.outcome) for row in rows), default=0)
    for row in rows:
        cells = (row.name.ljust(names), row.outcome.ljust(outcomes), row.text)
        yield "  " + "  ".join(cell for cell in cells if cell), STYLES.get(row.outcome, ("", ""))[0]
        for detail in row.details:
            yield f"    {detail}", "dim"
