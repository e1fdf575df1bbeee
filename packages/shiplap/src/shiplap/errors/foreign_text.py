"""Texts of foreign files, in which a terminal or a job of a CI service may find commands."""

from __future__ import annotations

import re

# A terminal executes these, or reorders the text behind them.
REORDERING = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
NO_LETTERS = "\ud800-\udfff"  # bytes of a name that is not encoded in UTF-8, which no stream can print
_CONTROL = re.compile(f"[\0-\x08\x0b-\x1f\x7f-\x9f{REORDERING}{NO_LETTERS}]")
# A line by which a program that prints in a job of GitHub, Azure or TeamCity gives commands to the job, such as to hide
# texts, to show a message at a file, or to set a variable.
_JOB_COMMAND = re.compile(
    r"(?<!\w)(:)(:(?:error|warning|notice|debug|group|endgroup|echo|add-|remove-|stop-|save-|set-|internal-)[^\n]*::)"
    r"|(#)(#(?:vso|teamcity)?\[)",
    re.IGNORECASE,
)


def replace_controls(text: str) -> str:
    """Return ``text`` with U+FFFD in place of control characters, which a terminal would execute or which would reorder
    the text, and of bytes that are no text. Tabs and line feeds stay. A blank is put into commands for the job of a CI
    service. A text from a foreign file can then be printed.
    """
    text = _CONTROL.sub("\ufffd", text)
    return _JOB_COMMAND.sub(r"\1\3 \2\4", text) if "::" in text or "##" in text else text
