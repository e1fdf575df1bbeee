"""The one door for printing with styles: consoles that print no control characters of foreign texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# A terminal executes these, or reorders the text behind them. Texts from foreign files may contain them.
_ORDER = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_CONTROL = re.compile(f"[\0-\x08\x0b-\x1f\x7f-\x9f{_ORDER}]")
_IN_JSON = re.compile(f"[\x7f-\x9f{_ORDER}]")  # those that a JSON text may hold as they are
# A line by which a program that prints in a job of GitHub, Azure or TeamCity gives commands to the job, such as to hide
# texts, to show a message at a file, or to set a variable.
_JOB_COMMAND = re.compile(
    r"(?<!\w)(:)(:(?:error|warning|notice|debug|group|endgroup|echo|add-|remove-|stop-|save-|set-|internal-)[^\n]*::)"
    r"|(#)(#(?:vso|teamcity)?\[)",
    re.IGNORECASE,
)


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
    return PlainConsole(stderr=stderr, highlight=False, soft_wrap=soft_wrap)


def escape_json(text: str) -> str:
    """Return the JSON ``text`` with an escape in place of each character that a terminal executes or that reorders
    text. The escaped JSON represents the same value.
    """
    return _IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def replace_controls(text: str) -> str:
    """Return ``text`` with U+FFFD in place of control characters, which a terminal would execute or which would reorder
    the text. Tabs and line feeds stay. A blank is put into commands for the job of a CI service. A text from a foreign
    file can then be printed.
    """
    text = _CONTROL.sub("\ufffd", text)
    return _JOB_COMMAND.sub(r"\1\3 \2\4", text) if "::" in text or "##" in text else text
