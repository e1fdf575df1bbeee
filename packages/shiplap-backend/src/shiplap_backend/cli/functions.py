"""The command ``shiplap backend functions``: the vendor functions that expressions of the metadata may call."""

from __future__ import annotations

from typing import Annotated

import typer

from shiplap.plugin_api import verbs

EPILOG = """\b
Examples:
  shiplap backend functions openvino          all signatures, as parsed from the installed headers
  shiplap backend functions openvino Pool     those with Pool in their name
  shiplap backend functions ./runtime-mine    those of a runtime of your own

\b
Exit status:
  0  printed
  1  no function has such a name
  2  no such runtime, or its package is not installed"""


def command(
    runtime: Annotated[
        str, typer.Argument(metavar="RUNTIME", help="openvino, onednn, an installed runtime, or a directory.")
    ],
    part: Annotated[str, typer.Argument(metavar="PART", help="Part of a name.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON value: signatures by name.")] = False,
) -> None:
    """List the functions that metadata may use, each with the comment above its declaration."""
    from shiplap_backend.runtimes import find_runtime as find

    by_name = {n: fs for n, fs in find(runtime).functions().items() if part.lower() in n.lower()}
    if json:
        verbs.emit_json({name: [str(f) for f in functions if not f.unusable] for name, functions in by_name.items()})
    else:
        for function in (f for functions in by_name.values() for f in functions):
            comment = function.unusable or function.about
            verbs.out().print(f"{function}  // {comment}" if comment else str(function), markup=False)
    if not by_name:
        raise typer.Exit(verbs.FAILED)
