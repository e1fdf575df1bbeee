"""The command ``shiplap backend coverage``: which overloads are native, and which ones a program needs next."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shiplap.plugin_api import verbs

EPILOG = """\b
Examples:
  shiplap backend coverage torch-openvino                       counts; --json lists the overloads
  shiplap backend coverage torch-openvino --model run_bert.py   what this program called, gaps first
  shiplap backend coverage torch-openvino --html cover.html     the same as one page
  shiplap backend coverage torch-openvino --json                "native": the list of native overloads

\b
Exit status:
  0  reported
  1  the program fell back where no entry or reason expects it
  2  no project there, or the program cannot be run"""


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that 'shiplap backend new' wrote.")],
    model: Annotated[Path | None, typer.Option("--model", help="A script to run on the device (after build).")] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Write one self-contained page here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> None:
    """Place every overload of the installed torch: native, composite, expected on the CPU, or a gap."""
    from shiplap_backend.coverage import place_overloads, render_coverage, run_program
    from shiplap_backend.generate import generate_wrappers
    from shiplap_backend.project import open_project

    project = open_project(directory)
    metadata = project.metadata()
    cover = place_overloads(
        metadata, project.runtime, generate_wrappers(metadata, project.runtime, units=project.units)
    )
    called = run_program(project, model, cover) if model else []
    if page:
        verbs.write_text(page, render_coverage(cover, called))
    # A fallback for which the metadata gives a reason does not fail the command.
    unexpected = [n for n in called if n.fallback and not n.expected]
    if json:
        verbs.emit_json({**cover.as_json(), "called": [asdict(n) for n in called]})
    else:
        report = cover.as_json()
        verbs.out().print(f"{cover.target} on torch {cover.torch}", markup=False)
        for state, n in report["counts"].items():
            verbs.out().print(f"  {state:10}{n:5}  ({report['required'].get(state, 0)} owed)", markup=False)
        for need in called:
            where = f"{need.fallback} on the CPU: {need.why}" if need.fallback else "native"
            mark = "  <- needs an entry" if need in unexpected else ""
            verbs.out().print(f"  {need.op:42}{need.native:6} native  {where}{mark}", markup=False)
    if unexpected:
        raise typer.Exit(verbs.FAILED)
