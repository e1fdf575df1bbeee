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
from shiplap.errors import ShiplapError, writing
from shiplap.errors.base import error_parts
from shiplap.errors.foreign_text import replace_controls
from shiplap.render.console import escape_json, make_console

if TYPE_CHECKING:
    from rich.console import Console

    from shiplap.render.lines import Line, TextTable

# 1: the verb found something wrong. 2: the verb could not run.
FAILED, ERROR = 1, 2
WRITABLE_PATH = "a path in an existing, writable directory"
STDOUT, STDERR = 1, 2  # the descriptors, whatever sys.stdout and sys.stderr are at the moment


def out() -> Console:
    """Return the console that prints results on stdout. It does not wrap lines."""
    return make_console(soft_wrap=True)


def err() -> Console:
    """Return the console that prints progress, notes and errors on stderr. It does not wrap lines."""
    return make_console(stderr=True, soft_wrap=True)


def echo(text: str, *, end: str = "\n") -> None:
    """Write ``text``, a result that is not JSON, and then ``end`` to stdout. Control characters in ``text`` are
    replaced.
    """
    sys.stdout.write(replace_controls(text) + end)
    sys.stdout.flush()


def note(message: str) -> None:
    """Print one line on stderr, so that stdout has only results."""
    err().print(message, markup=False)


def nobody_reads() -> bool:
    """Return whether stdout or stderr is a pipe whose reading process has closed it."""
    # Polling reports an ended reader without a write, which would raise the same error again.
    poll = select.poll()
    for stream in (STDOUT, STDERR):
        poll.register(stream, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


_answered = False  # whether the verb that runs has written its JSON value


def begin_verb() -> None:
    """Reset the record of whether a JSON value has been printed. This is called before each verb (subcommand), which
    prints at most one.
    """
    global _answered
    _answered = False


def emit_json(value: Any) -> None:
    """Print ``value`` on stdout as the one JSON value of a verb (subcommand) with ``--json``. Infinity and NaN become
    null, and objects that JSON does not have become strings.
    """
    global _answered
    _answered = True
    text = json.dumps(_without_infinities(value), indent=2, ensure_ascii=False, default=str)
    sys.stdout.write(escape_json(text) + "\n")
    # A reader of the pipe gets the value even if the process ends abnormally afterwards.
    sys.stdout.flush()


def show(value: Any, lines: Iterable[str | Line | TextTable], *, as_json: bool) -> None:
    """Print the result of a verb (subcommand) on stdout. It is ``value`` as JSON if ``as_json`` is true, and otherwise
    ``lines``. The lines are not wrapped, and markup in strings is printed as it is.
    """
    from shiplap.render.lines import line, print_lines

    if as_json:
        emit_json(value)
    else:
        print_lines((line(each) if isinstance(each, str) else each for each in lines), out())


def _without_infinities(value: Any) -> Any:
    """Return a copy of ``value`` with None in place of infinity and NaN in nested dicts, lists and tuples. Tuples
    become lists. JSON has no such numbers.
    """
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def own_stdout(active: bool = True) -> Iterator[None]:
    """Return a context in which prints to stdout go to stderr. Stdout then has only the result of the verb
    (subcommand). If ``active`` is false, the context changes nothing.
    """
    with contextlib.redirect_stdout(sys.stderr) if active else contextlib.nullcontext():
        yield


def emit_failure(
    *, what: str, id: str | None = None, where: str = "", got: str = "", expected: str = "", fix: str = ""
) -> None:
    """Print the JSON value of a verb (subcommand) that failed. It is an object ``error`` with the arguments as fields,
    which are those of an error of Shiplap. Do nothing if the verb has already printed a value.
    """
    if not _answered:
        emit_json({"error": {"id": id, "what": what, "where": where, "got": got, "expected": expected, "fix": fix}})


def show_error(failure: ShiplapError, *, as_json: bool = False) -> None:
    """Print an error of Shiplap's catalogue on stderr, with its id and each of its fields on a line. If ``as_json`` is
    true, also print the error as JSON on stdout.
    """
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
    """Print an unexpected exception and the advice to use ``--traceback`` on stderr. If ``as_json`` is true, also print
    both as JSON on stdout.
    """
    what, fix = f"unexpected {type(failure).__name__}: {failure}", "run again as 'shiplap --traceback ...' to see where"
    note(f"{what}\n  {fix}")
    if as_json:
        emit_failure(what=what, fix=fix)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to the file ``path``. Raise ``SL602``, with the reason, if it cannot be written."""
    with writing(path, "the file", WRITABLE_PATH):
        safe_io.write_text(path, text)


def write_page(path: Path, template: str, title: str, facts: Mapping[str, str], **values: Any) -> None:
    """Write the HTML report of a verb (subcommand) to the file ``path``, and print on stderr that it was written.

    ``template`` is the name of a template of ``shiplap.render``. ``title`` is the title of the page, ``facts`` are
    facts about the run, and ``values`` are further variables of the template.
    """
    from shiplap.render.html import render_html

    write_text(path, render_html(template, title=title, facts=facts, **values))
    note(f"wrote {path}")


def require_file(path: Path) -> None:
    """Raise ``SL602`` if the file ``path`` cannot be written. This is called before the work begins. An existing file
    keeps its content, and a missing file is created.
    """
    with writing(path, "the file", WRITABLE_PATH):
        os.close(safe_io.open_for_writing(path, append=True))


def require_directory(path: Path) -> None:
    """Create the directory ``path`` if it is missing. Raise ``SL602`` if it cannot be created, or if no file can be
    created in it. This is called before the work begins.
    """
    with writing(path, "the directory", "a writable directory"):
        path.mkdir(parents=True, exist_ok=True)
        # A directory that exists need not be writable, and its mode does not decide that for every file system.
        (path / ".shiplap").touch()
        (path / ".shiplap").unlink()


def require_device(device: str) -> None:
    """Raise ``SL605`` unless torch can allocate a tensor on ``device``."""
    from shiplap.sampling.device import require_device

    require_device(device, f"--device {device}")
