"""Write the pages that follow from code: the catalogue of errors, the help of the verbs, the checks of the audit.

Usage: ``generate_docs.py [--check] [PAGE ...]``, by default all pages; with ``--check`` nothing is written, and exit
status 1 means that a page is stale.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import Counter
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shiplap.audit.check import Check

ROOT = Path(__file__).resolve().parents[1]

NOTE = "<!-- Written by tools/generate_docs.py: do not edit. -->"

# Where a page of prose has a table that is counted, and on which torch.
NATIVE, END_NATIVE = "<!-- native: tools/generate_docs.py writes this table -->\n", "<!-- native: end -->\n"
RUNS, END_RUNS = "<!-- runs: tools/generate_docs.py writes these tables -->\n", "<!-- runs: end -->\n"
PRIVATE = ROOT / "packages/shiplap/src/shiplap/torch_private"
COUNTED_ON = "2.13"
TARGETS = {"openvino": "OpenVINO 2026.4.1", "onednn": "oneDNN 3.2"}

ERRORS = """\
# Errors

Every error has a stable id. Its text states what failed, where it failed, what it got, what it expected, and one fix:

```text
SL202: sizes disagree
  where    first::rms_norm, argument 'weight', dim 'c' (axis 0)
  got      c = 4
  expected c = 3, in 'x'
  fix      pass tensors with the sizes under 'expected'
```

Every error is a `shiplap.ShiplapError`. Its attributes are `.id`, `.what`, `.where`, `.got`, `.expected` and `.fix`.
Each group below is a subclass of `ShiplapError` and also of the built-in exception that fits. A `ShiplapNotice` is no
error but a warning that the process takes a slower path. Each process issues such a warning once for each reason.
"""

CLI = """\
# Command line

Every verb accepts `--json`. It then prints exactly one JSON value on stdout, and everything else on stderr. If a verb
fails, it prints the error on stderr in the form of the [catalogue](errors.md), and ends with exit status 2. With
`--json` it also prints `{"error": {"id", "what", "where", "got", "expected", "fix"}}` on stdout; `id` is null for a
wrong option and for a defect of Shiplap. `shiplap --traceback VERB ...` shows where the error was raised, and prints no
JSON for it. A verb whose output nobody reads any more, as in `shiplap env | head -1`, ends with exit status 141.

A `TARGET` is one of the following:

* `module` or `module:op`;
* `path/to/file.py` or `path/to/file.py:op`;
* `namespace::name` of an op that an installed package of Shiplap declares;
* `module:namespace::name` for any other op.

Modules in the current directory are found. A verb imports its target, so the top level of the module or file runs.

`shiplap --install-completion` adds the completion of verbs and options to the start file of your shell (bash, zsh, fish
or PowerShell). `shiplap --show-completion zsh` prints the script instead. A completion imports torch, and so takes as
long as `shiplap --help`.

The list below ends with the exit statuses that all verbs share. The help of each verb says what each status means.
"""


CHECKS = """\
# Checks of the audit

`sl.audit(op)` and `shiplap audit` run these checks on each op, in this order. [Audit](audit.md) explains how samples
are made, what the verdicts mean and what each check has found in kernel libraries. `--check NAME` runs one check alone.

A check *waits for* other checks where it would only repeat their finding: while one of them fails, it is *incomplete*.
"""


def checks_page() -> str:
    """The checks in the order of an audit, each with its own description."""
    from shiplap.audit.checks import CHECKS as NAMES
    from shiplap.audit.checks import ON_REQUEST, load_check

    requested = dict.fromkeys(name.partition(":")[0] for name in ON_REQUEST)
    parts = [NOTE, CHECKS, *map(_check, map(load_check, NAMES))]
    parts += [
        "## On request",
        "These checks take minutes, and run only if they are named.",
        *map(_check, map(load_check, requested)),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _check(check: Check) -> str:
    told = (
        (sys.modules[check.observe.__module__].__doc__ or "")
        .strip()
        .replace("``", "`")
        .removeprefix(f"`{check.name}`: ")
    )
    rows = [
        *([("waits for", ", ".join(f"[`{name}`](#{name})" for name in check.needs))] if check.needs else []),
        ("usual fix", _cell(check.fix)),
    ]
    return "\n\n".join(
        [
            f"{'##' if check.order else '###'} {check.name}",
            told[:1].upper() + told[1:],
            f"*Observes:* {_cell(check.observes)}.",
            *(f"*{name.capitalize()}:* {text}." for name, text in rows),
        ]
    )


LEDGER = """\
# The ledger of a proof

The verdicts of Shiplap rest on samples, which are generated calls. Shiplap records which kinds of samples were looked
at in a *ledger*, a table with a row for each *axis* and a column for each *obligation*. An axis is a property of
calls that samples vary, such as a size. An obligation is a property of the op that a check observes, such as its
gradient. A *cell* combines an axis with an obligation: the cell of size and gradient stands for the gradients of
calls at other sizes.

A cell is in one of three states:

* It is *covered* if the check has looked at one sample of it or more. This does not say that the samples suffice.
* It is *untouched* if the check has looked at none.
* It *does not apply* if the declaration admits no such sample, or if the check does not apply to the op. The ledger
  has the reason.

`shiplap audit` prints the number of samples in each cell, and `--json` and `--html` have the table as well.

Three verdicts have a ledger. The [audit](audit.md#what-proven-means) calls an op *proven*, the [judge](judge.md)
calls a candidate *accepted*, and [tuning](tune.md#how-candidates-are-compared) calls a kernel *verified*. Each of
them requires that the cells in its table below are covered or do not apply. One untouched required cell makes the
verdict of an audit or of the judge *incomplete*, and a tuned choice *unverified*. The verdict names the cell. A cell
also stays untouched if the machine lacks what its check needs, such as a compiler or the sandbox.
"""
NOT_REQUIRED = "An untouched cell of this table does not make an audit incomplete."


def ledger_page() -> str:
    """The axes, the obligations, and the cells that each verdict requires, with the reasons for the others."""
    from shiplap.sampling.ledger import AUDIT, AXES, JUDGE, OBLIGATIONS, TUNE, optional_reason

    def table(heads: str, rows: list[tuple[str, ...]]) -> str:
        columns = heads.split("|")
        lines = [heads, "|".join(["---"] * len(columns)), *(" | ".join(map(_cell, row)) for row in rows)]
        return "\n".join(f"| {line} |" for line in lines)

    def required(cells: dict[tuple[str, str], str]) -> list[tuple[str, ...]]:
        return [(axis, obligation, by) for (axis, obligation), by in cells.items()]

    optional = [(a, o, optional_reason(a, o)) for a in AXES for o in OBLIGATIONS if (a, o) not in AUDIT]
    parts = [NOTE, LEDGER, "## Axes", table("axis | what varies", list(AXES.items()))]
    parts += ["## Obligations", table("obligation | what is observed", list(OBLIGATIONS.items()))]
    parts += ["## What *proven* requires", table("axis | obligation | looked at by the check", required(AUDIT))]
    parts += ["## What *accepted* requires", table("axis | obligation | looked at by", required(JUDGE))]
    parts += ["## What *verified* requires", table("axis | obligation | looked at by", required(TUNE))]
    parts += ["## What an audit does not require", NOT_REQUIRED, table("axis | obligation | reason", optional)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def errors_page() -> str:
    """The catalogue, a table for each class of errors."""
    from shiplap.cli.families import installed_verbs, load_families
    from shiplap.errors import CATALOGUE

    load_families()  # errors of theirs are on the page, too
    installed_verbs()
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


COLUMNS = 88  # of a page's code, without a scroll bar


def fold(text: str) -> str:
    """The help of a verb with its examples folded, so that no line is wider than a page."""
    lines: list[str] = []
    column = 0  # where the remarks of the examples above stand
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        gap = re.match(r"\s*\S.*?\s{2,}(?=\S)", line)
        if indent > 12:
            column = indent
        elif gap and not (gap.end() < column and line[column - 1 : column] == " " and line[column:].strip()):
            column = gap.end()
        if len(line) <= COLUMNS:
            lines.append(line)
        elif column and line[column - 2 : column] == "  ":
            start, at = line[:column].rstrip(), column
            lines += textwrap.wrap(line[column:], COLUMNS, initial_indent=start.ljust(at), subsequent_indent=" " * at)
        else:  # a command goes on behind a backslash, and a sentence in the next line
            command = line.lstrip().startswith("shiplap ")
            more = " " * (indent + 4 if command else indent)
            words = re.sub(r" (-[\w-]+) ", " \\1\0", line) if command else line  # with its value
            parts = textwrap.wrap(words, COLUMNS - 2, subsequent_indent=more, break_on_hyphens=False)
            lines.append((" \\\n" if command else "\n").join(parts).replace("\0", " "))
    return "\n".join(lines)


def cli_page() -> str:
    """The help of every verb, as a user sees it."""
    from typer.testing import CliRunner

    from shiplap.cli.app import app

    def shown(*arguments: str) -> str:
        environment = {"COLUMNS": "92", "NO_COLOR": "1", "TERM": "dumb"}
        result = CliRunner().invoke(
            app, [*arguments, "--help"], env=environment, prog_name="shiplap", terminal_width=COLUMNS
        )
        return f"```text\n{fold(result.stdout.strip())}\n```"

    verbs = [[command.name or ""] for command in app.registered_commands]
    for group in app.registered_groups:  # a verb with verbs of its own
        verbs += [[group.name or "", command.name or ""] for command in group.typer_instance.registered_commands]
    parts = [NOTE, CLI, shown(), *(part for verb in verbs for part in (f"## shiplap {' '.join(verb)}", shown(*verb)))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def backend_page() -> str:
    """The page as it is, with the table of native overloads counted anew."""
    text = (ROOT / "docs" / "backend.md").read_text(encoding="utf-8")
    before, rest = text.split(NATIVE)
    _, after = rest.split(END_NATIVE)
    table = native_table()
    return text if table is None else "".join([before, NATIVE, table, END_NATIVE, after])


def native_table() -> str | None:
    """The counts of each target on the torch of the record; None where they cannot be counted."""
    import torch

    if find_spec("openvino") is None or not torch.__version__.startswith(f"{COUNTED_ON}."):
        return None
    from shiplap_backend.coverage import place_overloads
    from shiplap_backend.generate import generate_wrappers
    from shiplap_backend.metadata import load_metadata, shipped_metadata
    from shiplap_backend.runtimes import find_runtime

    rows = []
    for name, called in TARGETS.items():
        metadata, target = load_metadata(shipped_metadata(name)), find_runtime(name)
        covered = place_overloads(metadata, target, generate_wrappers(metadata, target)).as_json()
        owed = [covered["required"][state] for state in ("native", "expected", "gap")]
        rows.append((called, len(covered["native"]), *owed))
    total = sum(rows[0][2:])
    head = (
        f"| target | overloads | of the {total} that torch {COUNTED_ON} owes a dense CPU kernel's equal "
        "| on the CPU with a stated reason | without an entry |\n|---|---|---|---|---|\n"
    )
    return head + "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)


# Why tests fail on a version, by a part of the name of the file.
EXPLAINED: dict[str, str] = {}


def stability_page() -> str:
    """The page as it is, with the tables of what runs have verified and tested."""
    text = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    before, rest = text.split(RUNS)
    return "".join([before, RUNS, "\n", *_capability_rows(), "\n", *_cell_rows(), END_RUNS, rest.split(END_RUNS)[1]])


def _capability_rows() -> list[str]:
    """The rows of ``verified.json``, each of which a run has written."""
    names = re.findall(r"\bCapability\(\s*\"(.+?)\"", (PRIVATE / "__init__.py").read_text("utf-8"))
    rows = ["| torch | Python | GPU | capabilities verified | not verified |", "|---|---|---|---|---|"]
    for row in json.loads((PRIVATE / "verified.json").read_text(encoding="utf-8")).values():
        missing = ", ".join(name for name in names if name not in row["verified"])
        cells = (row["torch"], row["python"], row["gpu"] or "none", f"{len(row['verified'])} on {row['date']}", missing)
        rows.append(f"| {' | '.join(cells)} |")
    return [f"{row}\n" for row in rows]


def _room_of_tests(file: str) -> str:
    """Return the folder below the tests of the core in which the test file with the path ``file`` lies, such as
    ``audit`` or ``kernels/c``. Elsewhere return the package, or the first folder of the path.
    """
    room = re.match(r"packages/shiplap/tests/((?:kernels/)?\w+)/", file) or re.match(r"(?:packages/)?([\w-]+)/", file)
    return room[1] if room else file


def _cell_rows() -> list[str]:
    """The rows of ``tests/matrix.json``, and the tests that failed with the reason."""
    rows, failures = [], []
    for cell in json.loads((ROOT / "tests" / "matrix.json").read_text(encoding="utf-8")):
        counts = Counter[str]()
        for said in cell["files"].values():
            counts.update({kind: int(number) for number, kind in re.findall(r"(\d+) (\w+)", said)})
        rooms = Counter(map(_room_of_tests, cell["files"]))
        named = ", ".join(f"{room} {number}" for room, number in sorted(rooms.items()))
        told = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped") if counts[kind])
        versions = [cell["versions"][key] for key in ("torch", "python", "numpy", "triton", "compiler", "user")]
        earlier = Counter(cell.get("earlier", {}).values())
        older = [f"; {number} files on {commit}" for commit, number in earlier.items()]
        when = f"{cell['date']}, {cell.get('commit', 'unknown')}{''.join(older)}"
        rows.append(f"| {' | '.join([*versions, told, named, when])} |")
        for file, names in cell.get("failures", {}).items():
            why = next((text for part, text in EXPLAINED.items() if part in file), "**not explained**")
            failures.append(f"* {len(names)} in `{file}` on torch {versions[0]}, Python {versions[1]}: {why}.")
    heads = [
        "torch",
        "Python",
        "NumPy",
        "Triton",
        "compiler",
        "user",
        "tests",
        "files of tests by folder",
        "date, commit",
    ]
    table = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *rows]
    return [f"{line}\n" for line in [*table, *(["", "Failed:", "", *failures] if failures else [])]]


PAGES = {
    "docs/errors.md": errors_page,
    "docs/cli.md": cli_page,
    "docs/checks.md": checks_page,
    "docs/ledger.md": ledger_page,
    "docs/backend.md": backend_page,
    "docs/stability.md": stability_page,
}


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them; return the exit status."""
    stale = []
    for name in [a for a in arguments if a != "--check"] or PAGES:
        page = PAGES[name]
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
