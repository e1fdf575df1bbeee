"""Write the pages that follow from code: ``docs/errors.md`` from the catalogue, ``docs/cli.md`` from the verbs' help.

Usage: ``generate_docs.py [--check]``; with ``--check`` nothing is written, and exit status 1 means a page is stale.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

NOTE = "<!-- Written by tools/generate_docs.py: do not edit. -->"

ERRORS = """\
# Errors

Every error has a stable id. Its text states what failed, where it failed, what it got, what it expected, and one fix:

```text
SL202: sizes disagree
  where    first::rms_norm, argument 'weight', dim 'c' (axis 0)
  got      c = 4
  expected c = 3, in 'x'
  fix      pass tensors whose named dims agree
```

Every error is a `shiplap.ShiplapError`. Its attributes are `.id`, `.what`, `.where`, `.got`, `.expected` and `.fix`.
Each group below is a subclass of `ShiplapError` and also of the built-in exception that fits. A `ShiplapNotice` is no
error but a warning that the process takes a slower path. Each process issues such a warning once for each reason.
"""

CLI = """\
# Command line

Every verb accepts `--json`. It then prints exactly one JSON value on stdout, and everything else on stderr. If a verb
fails, it prints the error on stderr in the form of the [catalogue](errors.md), prints nothing on stdout, and ends with
exit status 2. `shiplap --traceback VERB ...` also shows where the error was raised.

A `TARGET` is one of the following:

* `module` or `module:op`;
* `path/to/file.py` or `path/to/file.py:op`;
* `namespace::name` of an op that an installed package of Shiplap declares;
* `module:namespace::name` for any other op.

Modules in the current directory are found. A verb imports its target, so the top level of the module or file runs.
"""


def errors_page() -> str:
    """The catalogue, a table for each class of errors."""
    from shiplap.cli.families import load_families, verbs
    from shiplap.errors import CATALOGUE

    load_families()  # errors of theirs are on the page, too
    verbs()
    parts = [NOTE, ERRORS]
    for kind, entries in groupby(sorted(CATALOGUE.values(), key=lambda e: e.id), key=lambda e: e.kind):
        builtin = next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")
        parts += [
            f"## {kind.__name__}",
            f"{(kind.__doc__ or '').strip()} Also a `{builtin}`.",
            "| id | what failed | why it is an error | usual fix |\n|---|---|---|---|\n"
            + "\n".join(
                f"| <span id='{e.id}'>{e.id}</span> | {_cell(e.title)} | {_cell(e.why)} | {_cell(e.fix)} |"
                for e in entries
            ),
        ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _cell(text: str) -> str:
    for raw, safe in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("*", "\\*"), ("[", "\\[")):
        text = text.replace(raw, safe)
    return text


def cli_page() -> str:
    """The help of every verb, as a user sees it."""
    from typer.testing import CliRunner

    from shiplap.cli.app import app

    def shown(*arguments: str) -> str:
        environment = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
        result = CliRunner().invoke(
            app, [*arguments, "--help"], env=environment, prog_name="shiplap", terminal_width=96
        )
        return f"```text\n{result.stdout.strip()}\n```"

    verbs = [command.name or "" for command in app.registered_commands]
    parts = [NOTE, CLI, shown(), *(part for verb in verbs for part in (f"## shiplap {verb}", shown(verb)))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


PAGES = {"docs/errors.md": errors_page, "docs/cli.md": cli_page}


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them; return the exit status."""
    stale = []
    for name, page in PAGES.items():
        path, text = ROOT / name, page()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    verb = "is stale; run tools/generate_docs.py" if "--check" in arguments else "written"
    print("".join(f"{name} {verb}\n" for name in stale), end="")
    return bool(stale) if "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
