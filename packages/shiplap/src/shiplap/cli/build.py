"""``shiplap build``: compile the native bindings of declared ops, so that no program has to."""

from __future__ import annotations

from typing import Annotated

import typer

from shiplap.cli import console
from shiplap.cli.target import resolve_targets
from shiplap.errors import ShiplapError

EPILOG = """\b
Examples:
  shiplap build mylib.ops            every op that the module declares
  shiplap build mylib/ops.py:norm    one op of a file
  shiplap build mylib.ops --json     the library of each op, or why it has none

\b
Exit status:
  0  every op whose kernels can have a native binding has one
  1  a binding could not be built: the reason is printed
  2  the target does not exist"""

Targets = Annotated[
    list[str], typer.Argument(metavar="TARGET...", help="module[:op], path/to/file.py[:op] or namespace::name.")
]


def command(
    targets: Targets,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON value: the library of each op.")] = False,
) -> None:
    """Compile the native bindings of declared ops into the cache.

    Programs attach a binding at the first call of its op. An op whose kernels are Python functions has none.
    """
    with console.own_stdout():
        ops = resolve_targets(targets)
        from shiplap.kernels.build import build_op

        rows = []
        for op in ops:
            row = {"op": op.spec.name, "library": "", "why": "", "fix": "", "failed": False}
            try:
                row["library"] = str(build_op(op) or "the launcher of templates")
            except ShiplapError as e:
                # SL404 only says that Python serves the op, which is no failure.
                row |= {"why": f"{e.id}: {e.what}: {e.got}", "failed": e.id != "SL404"}
                row["fix"] = e.fix if row["failed"] else ""
            rows.append(row)
    texts = (str(row["library"] or ("" if row["failed"] else "Python, ") + str(row["why"])) for row in rows)
    fixes = (f"\n  fix  {row['fix']}" if row["fix"] else "" for row in rows)
    lines = (f"{row['op']}  {text}{fix}" for row, text, fix in zip(rows, texts, fixes, strict=True))
    console.show({"ops": rows}, lines, as_json=json)
    if any(row["failed"] for row in rows):
        raise typer.Exit(console.FAILED)
