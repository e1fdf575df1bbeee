"""The one door for printing with styles: consoles that print no control characters of foreign texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shiplap.errors.foreign_text import NO_LETTERS, REORDERING, replace_controls

if TYPE_CHECKING:
    from rich.console import Console

NO_WIDTH = 80  # characters of a line where the environment says 0
_IN_JSON = re.compile(f"[\x7f-\x9f{REORDERING}{NO_LETTERS}]")  # those that a JSON text may hold as they are


def make_console(*, stderr: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console that prints only the styles that Shiplap gives it.

    Control characters in printed texts are shown as U+FFFD. The console prints to stderr if ``stderr`` is true, and
    otherwise to stdout. If ``soft_wrap`` is true, long lines are not wrapped. Otherwise they are wrapped at the width
    of the terminal.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PlainConsole(Console):
        """A console that shows control characters in texts as U+FFFD, and breaks commands for jobs."""

        # Control characters are replaced in segments, after rich has made its own styles, which must stay.
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            """Yield the segments of a renderable, with its control characters replaced by U+FFFD. Control segments,
            which rich makes itself, are unchanged.
            """
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else replace_controls(text), style, control)

    # highlight would colour numbers and paths in texts that have a style of their own.
    console = PlainConsole(stderr=stderr, highlight=False, soft_wrap=soft_wrap)
    if console.width < 1:  # some programs set COLUMNS to 0, and nothing would be printed
        console.width = NO_WIDTH
    return console


def escape_json(text: str) -> str:
    """Return the JSON ``text`` with an escape in place of each character that a terminal executes, that reorders text,
    or that no stream can print. The escaped JSON represents the same value.
    """
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
