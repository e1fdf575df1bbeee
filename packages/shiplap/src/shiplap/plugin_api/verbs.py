"""The tools of a family's verbs, with which they print, write and refuse as the verbs of ``shiplap`` do.

A distribution names its verbs in the entry points ``shiplap.verbs``: a module with ``command`` (a function with typer's
annotations, whose docstring is the help) and ``EPILOG``, or with ``group``, a ``typer.Typer`` of several. An error of
the catalogue that leaves the verb is printed, and the exit status is :data:`ERROR`.

Exit statuses
    ``FAILED`` (1): the verb did its work and found something wrong. ``ERROR`` (2): it could not do its work.
Printing
    ``out()`` for results and ``err()`` for all else are consoles of rich; ``note(text)`` is one line on stderr,
    ``emit_json(value)`` the one value that ``--json`` promises. Within ``own_stdout()`` prints of other code go
    to stderr.
Files and devices, checked before the work
    ``require_file``, ``require_directory`` and ``require_device`` raise SL602 and SL605; ``write_text`` writes a file.
The command line
    ``main()`` is all of it, for a console script of the family's own: every verb under another name.
Targets
    ``load_target("module:name")``, and ``near_miss(wanted, names)`` for a name that was probably meant.
Pages
    ``render_html(template, package=...)`` makes one self-contained page of a template in the family's own
    ``templates/``; ``facts(...)`` is the header for it: versions, processor, date.
"""

from __future__ import annotations

from types import ModuleType

from shiplap.cli.console import (
    ERROR,
    FAILED,
    emit_json,
    err,
    note,
    out,
    own_stdout,
    require_device,
    require_directory,
    require_file,
    write_text,
)
from shiplap.cli.target import import_home, near_miss, split_target
from shiplap.render.facts import facts
from shiplap.render.html import render_html

__all__ = [
    "ERROR",
    "FAILED",
    "emit_json",
    "err",
    "facts",
    "load_target",
    "main",
    "near_miss",
    "note",
    "out",
    "own_stdout",
    "render_html",
    "require_device",
    "require_directory",
    "require_file",
    "write_text",
]


def load_target(target: str) -> tuple[ModuleType, str]:
    """Return a pair of an imported module and a name. ``target`` is ``module[:name]`` or ``path/to/file.py[:name]``.
    Without ``:name``, the name is an empty string.

    Raises:
        ShiplapError: ``SL501`` when there is no such module or file, ``SL601`` when it raises.
    """
    home, name = split_target(target)
    return import_home(home or target), name


def main() -> None:
    """Run the command line of ``shiplap`` with the arguments of this process. A family can use it as the function of a
    console script of its own.
    """
    from shiplap.cli.app import main as run  # imports every verb, and this module is one of theirs

    run()
