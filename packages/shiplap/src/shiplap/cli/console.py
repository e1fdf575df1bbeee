"""The output of all verbs: where text goes, one JSON value on stdout, errors as id/what/got/expected/fix."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shiplap import safe_io
from shiplap.errors import ShiplapError, error, writing
from shiplap.errors.base import error_parts
from shiplap.render.console import escape_json, make_console, replace_controls

if TYPE_CHECKING:
    from rich.console import Console

    from shiplap.render.lines import Line, TextTable

FAILED, ERROR = 1, 2
WRITABLE_PATH = "a path in an existing, writable directory"
STDOUT, STDERR = 1, 2  # the descriptors, whatever sys.stdout and sys.stderr are at the moment


def out() -> Console:
    """Return the console of stdout: results, never wrapped in the middle of a path."""
    return make_console(soft_wrap=True)


def err() -> Console:
    """Return the console of stderr: progress, notes and errors."""
    return make_console(stderr=True, soft_wrap=True)


def echo(text: str, *, end: str = "\n") -> None:
    """Print a result that is no JSON on stdout, as it is but for control characters."""
    sys.stdout.write(replace_controls(text) + end)
    sys.stdout.flush()


def note(message: str) -> None:
    """Print one line for the user on stderr, so that stdout holds only results."""
    err().print(message, markup=False)


def nobody_reads() -> bool:
    """Return whether stdout or stderr is a pipe whose reader has ended."""
    # Polling reports an ended reader without a write, which would raise the same error again.
    poll = select.poll()
    for stream in (STDOUT, STDERR):
        poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


_answered = False  # whether the verb that runs has written its JSON value


def begin_verb() -> None:
    """Reset the module for a verb that has written nothing yet."""
    global _answered
    _answered = False


def emit_json(value: Any) -> None:
    """Print the one JSON value that ``--json`` promises."""
    global _answered
    _answered = True
    text = json.dumps(_without_infinities(value), indent=2, ensure_ascii=False, default=str)
    sys.stdout.write(escape_json(text) + "\n")
    # A reader of the pipe gets the value even if the process ends abnormally afterwards.
    sys.stdout.flush()


def show(value: Any, lines: Iterable[str | Line | TextTable], *, as_json: bool) -> None:
    """Print the result of a verb: its JSON value, or its lines, which no terminal's width and no markup changes."""
    from shiplap.render.lines import line, print_lines

    if as_json:
        emit_json(value)
    else:
        print_lines((line(each) if isinstance(each, str) else each for each in lines), out())


def _without_infinities(value: Any) -> Any:
    """Return ``value`` with null for infinities and NaN, which JSON does not have and most of its readers refuse."""
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def own_stdout(active: bool = True) -> Iterator[None]:
    """Redirect the output of other code to stderr, so that stdout holds the answer of the verb only."""
    with contextlib.redirect_stdout(sys.stderr) if active else contextlib.nullcontext():
        yield


def emit_failure(
    *, what: str, id: str | None = None, where: str = "", got: str = "", expected: str = "", fix: str = ""
) -> None:
    """Print the JSON value of a verb that failed, unless the verb had already printed its value."""
    if not _answered:
        emit_json({"error": {"id": id, "what": what, "where": where, "got": got, "expected": expected, "fix": fix}})


def show_error(failure: ShiplapError, *, as_json: bool = False) -> None:
    """Print a catalogue error, a field a line, with multi-line values aligned. With ``as_json`` on stdout as well."""
    from rich.text import Text

    text = Text()
    text.append(failure.id, style="bold red").append(f": {failure.what}\n")
    rows = ("where", failure.where), ("got", failure.got), ("expected", failure.expected), ("fix", failure.fix)
    for label, value in rows:
        if value:
            style = "green" if label == "fix" else ""
            text.append(f"  {label:<9}", style="dim").append(value.replace("\n", "\n" + " " * 11) + "\n", style=style)
    # The text goes to stderr also with --json, so that a person who redirects stdout reads the error.
    err().print(text, end="")
    if as_json:
        emit_failure(**error_parts(failure))


def show_defect(failure: Exception, *, as_json: bool = False) -> None:
    """Print an unexpected exception in one line, with the way to see its traceback."""
    what, fix = f"unexpected {type(failure).__name__}: {failure}", "run again as 'shiplap --traceback ...' to see where"
    note(f"{what}\n  {fix}")
    if as_json:
        emit_failure(what=what, fix=fix)


def write_text(path: Path, text: str) -> None:
    """Write ``path``. SL602 states why it cannot be written."""
    with writing(path, "the file", WRITABLE_PATH):
        safe_io.write_text(path, text)


def write_page(path: Path, template: str, title: str, facts: Mapping[str, str], **values: Any) -> None:
    """Write the HTML report of a verb, from a template of ``shiplap.render``."""
    from shiplap.render import render_html

    write_text(path, render_html(template, title=title, facts=facts, **values))
    note(f"wrote {path}")


def require_file(path: Path) -> None:
    """Raise SL602 if ``path`` cannot be written, before the work and not after it. An existing file keeps its
    content.
    """
    with writing(path, "the file", WRITABLE_PATH):
        os.close(safe_io.open_for_writing(path, append=True))


def require_directory(path: Path) -> None:
    """Create ``path`` now. SL602 is raised before the work and not after it."""
    with writing(path, "the directory", "a writable directory"):
        path.mkdir(parents=True, exist_ok=True)
        # A directory that exists need not be writable, and its mode does not decide that for every file system.
        (path / ".shiplap").touch()
        (path / ".shiplap").unlink()


def require_device(device: str) -> None:
    """Raise SL605 unless torch can allocate on ``device``."""
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        # torch appends advice of several sentences, which does not apply to a command line.
        reason = str(e).splitlines()[0].split(". ")[0]
        raise error("SL605", where=f"--device {device}", got=reason, expected="a device of this machine") from None
