"""Verdicts as lines of text: each verb's result has ``lines()``, and this module prints them in one style."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shiplap.render.console import make_console

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Line:
    """One item of output, as a tuple of pairs ``(text, style)``, where the style is a name that rich defines. The text
    may contain line breaks and is never wrapped.
    """

    parts: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        """Return the text of the line, without its styles."""
        return "".join(text for text, _ in self.parts)


@dataclass(frozen=True)
class TextTable:
    """A table without borders. It holds the headings, and each row as a tuple of cells ``(text, style)``. ``numbers``
    names the columns that are aligned to the right, and ``unwrapped`` those whose text is never wrapped.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[tuple[str, str], ...], ...]
    numbers: tuple[str, ...] = ()
    unwrapped: tuple[str, ...] = ()


def line(text: str = "", style: str = "", *more: tuple[str, str]) -> Line:
    """Return a Line of ``text`` in ``style``, followed by the further pairs ``(text, style)`` in ``more``. An empty
    style stands for none.
    """
    return Line(((text, style), *more))


def row(label: str, value: str, style: str = "") -> Iterator[Line]:
    """Yield one indented line with ``label`` and, to the right of it, ``value`` in ``style``. If ``value`` has several
    lines, the others are indented to the column in which the first one starts. Yield nothing if ``value`` is empty.
    """
    if value:
        # Further lines begin below the value, behind the label.
        yield line(f"  {label:<9}", "dim", (value.replace("\n", "\n" + " " * 11), style or "default"))


def count_phrase(number: int, noun: str) -> str:
    """Return ``number`` with ``noun``, which gets an ``s`` unless the number is 1, such as ``2 graphs``."""
    return f"{number} {noun}" + "s" * (number != 1)


def list_first(names: Sequence[str], most: int = 6) -> str:
    """Return the first ``most`` of ``names`` joined by commas, with the number of the remaining names if there are any,
    such as ``a, b and 3 more``.
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def print_lines(lines: Iterable[Line | TextTable], console: Console | None = None) -> None:
    """Print lines and tables on ``console``, or on stdout if it is None. A blank line follows each table."""
    from rich.text import Text

    console = console or make_console()
    for each in lines:
        if isinstance(each, TextTable):
            console.print(_rich_table(each), "")
        else:
            text = Text()
            for part, style in each.parts:
                text.append(part, style or None)
            # Not wrapped: paths and commands are there to be copied.
            console.print(text, soft_wrap=True)


def _rich_table(table: TextTable) -> object:
    """Return ``table`` as a table of rich. The columns that ``table.numbers`` names are aligned to the right."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="dim")
    for name in table.headings:
        justify: Literal["left", "right"] = "right" if name in table.numbers else "left"
        shown.add_column(name, justify=justify, overflow="fold", no_wrap=name in table.unwrapped)
    for cells in table.rows:
        shown.add_row(*(Text(text, style) for text, style in cells))
    return shown


def value_json(value: Any, facts: Mapping[str, str], **more: object) -> dict[str, Any]:
    """Return a dict that JSON can represent. It has the key ``facts``, each field of the dataclass ``value`` by its
    name, and each value in ``more``.
    """
    return plain_json({"facts": dict(facts), **asdict(value), **more})


def plain_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``value`` after a round trip through JSON, which turns tuples into lists and keys into strings."""
    # By JSON itself, so that no other rule can differ from it.
    plain: dict[str, Any] = json.loads(json.dumps(value))
    return plain


def relative_place(where: str) -> str:
    """Return ``where``, a location ``file:line``, with the path of the file relative to the working folder. If the file
    does not lie below that folder, return ``where`` unchanged.
    """
    try:
        return str(Path(where).relative_to(Path.cwd()))
    except ValueError:
        return where
