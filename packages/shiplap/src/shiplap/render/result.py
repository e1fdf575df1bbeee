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
    """One row of a table. It holds the name of what the row is about, an outcome such as ``fail``, the text, and
    further lines that are printed below the row.
    """

    name: str
    outcome: str
    text: str
    details: tuple[str, ...] = ()


class ResultWithVerdict(ABC):
    """The base class of the results of audits, judgements and tunings. A result has a verdict, which has more than two
    values, so its conversion to bool raises ``SL504``.
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
        """One line of text with the subject of the result, its verdict and the reason."""

    @property
    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """The rows of the table that is printed below the headline."""

    def __bool__(self) -> bool:
        """Raise ``SL504``, since a verdict has more than two values. Callers must compare ``verdict`` with a string."""
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
        """Return the result as a string without styles. The headline comes first, followed by the rows."""
        return "\n".join(text for text, _ in table_lines(self))

    def __rich__(self) -> Text:
        """Return the result as a text of rich, in which each line has its style."""
        from rich.text import Text

        return Text("\n").join(Text(text, style) for text, style in table_lines(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the result, without styles, on IPython's ``printer``. ``cycle`` is ignored."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Return the result as an HTML table, in a string, which a notebook displays."""
        return render_html("result.html.jinja", result=self, styles=STYLES)


def exit_status(verdicts: Iterable[str]) -> int:
    """Return the exit status of a verb (subcommand) whose results have these verdicts. It is 0 if all verdicts are
    good, such as ``proven``. It is 3 if all that are not good are ``incomplete``, and 1 otherwise.
    """
    bad = {v for v in verdicts if STYLES[v][1] != "ok"}
    return 0 if not bad else 3 if bad == {"incomplete"} else 1


def table_lines(result: ResultWithVerdict) -> Iterator[tuple[str, str]]:
    """Yield pairs of one line of text and the style that rich prints it in, which may be empty. The headline comes
    first. The rows follow, aligned in columns, each with its lines of detail.
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
