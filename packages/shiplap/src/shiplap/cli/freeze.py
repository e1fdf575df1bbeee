"""``shiplap freeze``: write the choices that are valid on this machine to one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shiplap.cli import console
from shiplap.cli.target import resolve_targets

EPILOG = """\b
Examples:
  shiplap freeze -o tuned.json                 every choice that holds here and now
  shiplap freeze mylib.ops -o tuned.json       of one module, whose kernels are compared, too
  SHIPLAP_TUNED=tuned.json python serve.py     with these choices; nothing is measured

\b
Exit status:
  0  written
  1  written, but without any choice: tune first
  2  no such target, or the file cannot be written"""


def command(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write the table.")],
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="TARGET", help="module[:op], path/to/file.py[:op] or name.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON value: the choices written.")] = False,
) -> None:
    """Write the tuned choices that are valid on this machine to a file.

    A choice is valid for this device, these library versions and these kernels.

    A program that is given the file measures nothing. A call that is not in it runs its declared default, with one
    notice. With SHIPLAP_STRICT=1 it raises SL607 instead.
    """
    with console.own_stdout():
        ops = resolve_targets(targets) if targets else None
        from shiplap.tuning.frozen_table import write_frozen_table

        choices = write_frozen_table(output, ops)
    lines = (f"{choice.op}  {choice.bucket}  {choice.dtypes}  {choice.label}" for choice in choices)
    console.show({"file": str(output), "choices": [c.as_json() for c in choices]}, lines, as_json=json)
    if not json:
        console.note(f"wrote {output}: {len(choices)} choices")
    if not choices:
        raise typer.Exit(console.FAILED)
