"""``shiplap build``: compile the native bindings of declared ops, so that no program has to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from shiplap.cli import console
from shiplap.cli.target import resolve_targets
from shiplap.errors import ShiplapError
from shiplap.render.lines import Line, line, row

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

        outcomes = []
        for op in ops:
            outcome = {"op": op.spec.name, "library": "", "why": "", "expected": "", "fix": "", "failed": False}
            try:
                outcome["library"] = str(build_op(op) or "the launcher of templates")
            except ShiplapError as e:
                # SL404 only says that Python serves the op, which is no failure.
                outcome |= {"why": f"{e.id}: {e.what}: {e.got}", "failed": e.id != "SL404"}
                if outcome["failed"]:
                    outcome |= {"expected": e.expected, "fix": e.fix}
            outcomes.append(outcome)
    console.show({"ops": outcomes}, (each for outcome in outcomes for each in _lines(outcome)), as_json=json)
    if any(outcome["failed"] for outcome in outcomes):
        raise typer.Exit(console.FAILED)


def _lines(outcome: dict[str, Any]) -> Iterator[Line]:
    """Yield the lines that show ``outcome``, the JSON object of one op: the library of the op, or the reason why it has
    none. After a failure, lines with what was expected and with the fix follow.
    """
    reason = outcome["why"] if outcome["failed"] else f"Python, {outcome['why']}"
    yield line(f"{outcome['op']}  {outcome['library'] or reason}")
    yield from row("expected", outcome["expected"])
    yield from row("fix", outcome["fix"])
