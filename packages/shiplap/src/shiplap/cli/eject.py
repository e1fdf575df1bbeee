"""``shiplap eject``: write declared ops as plain sources of torch, which need Shiplap no longer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shiplap.cli import console
from shiplap.cli.target import resolve_targets

EPILOG = """\b
Examples:
  shiplap eject mylib.ops -o mylib_plain          every op of a module, as the package mylib_plain
  shiplap eject mylib/ops.py:norm -o norm_plain   one op, and the ops that its gradient calls
  pytest mylib_plain                              test what was written, without Shiplap
  shiplap eject mylib.ops -o mylib_plain --accept-loss
                                                  with default configs, and without templates

\b
Exit status:
  0  written
  2  the target does not exist, an op has no plain form (nothing is written), or a file exists
     (see --force)"""


def command(
    targets: Annotated[
        list[str], typer.Argument(metavar="TARGET...", help="module[:op], path/to/file.py[:op] or namespace::name.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The folder to write: it becomes a Python package.")
    ],
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Eject ops that lose templates or choices among configs.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files in DIR.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object: folder, files, ops, losses.")] = False,
) -> None:
    """Write declared ops as plain sources of torch, without a dependency on Shiplap.

    Kernels in C, C++ and CUDA C++ become a TORCH_LIBRARY that uses torch's stable ABI. Python and Triton kernels become
    functions of torch.library. Checks of arguments, shapes for tracing, gradients, autocast and tests are included.
    """
    with console.own_stdout():
        ops = resolve_targets(targets)
        from shiplap.packaging.eject import eject

        made = eject(ops, output.resolve().name, lossy=accept_loss)
        files = made.write(output, force)
    lines = [f"{output}: {len(made.ops)} ops, {len(files)} files"]
    for name in dict.fromkeys((*made.ops, *made.lost)):
        lost = f"  without {'; '.join(made.lost[name])}" if name in made.lost else ""
        lines.append(f"  {name}{lost}")
    result = {"folder": str(output), "files": files, "ops": list(made.ops), "lost": made.lost}
    console.show(result, lines, as_json=json)
