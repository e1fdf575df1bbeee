"""``shiplap doctor``: run a program, name its graph breaks, return an exit status for CI."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shiplap.cli import console
from shiplap.errors import error

if TYPE_CHECKING:
    from shiplap.doctor import Diagnosis

EPILOG = """\b
Examples:
  shiplap doctor -- python infer.py --batch 8      run it, then say where the graph broke
  shiplap doctor --html doctor.html -- python -m mylib.train
  shiplap doctor --json -- python infer.py > doctor.json
  shiplap doctor --fail-on-break -- python -m pytest tests/test_model.py
  shiplap doctor -- torchrun --nproc-per-node 2 train.py    all ranks together

\b
Exit status:
  0  the program ran; breaks are listed (with --fail-on-break: there are none)
  1  a graph broke and --fail-on-break was given, or the program itself failed
  2  it could not be started, or nothing in it was compiled"""


def command(
    program: Annotated[list[str], typer.Argument(metavar="-- PROGRAM...", help="The program and its arguments.")],
    fail_on_break: Annotated[
        bool, typer.Option("--fail-on-break", help="Exit with status 1 when a graph broke.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; what the program prints goes to stderr.")
    ] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML report as well.")] = None,
) -> None:
    """Run a program and explain its graph breaks, recompiles and unused CUDA graphs.

    The program runs as it would alone, with torch's structured trace switched on. Each break is shown with its line,
    its cause, the call at fault, torch's own explanation and what removes it; the dearest come first.
    """
    from shiplap.doctor import diagnose_command
    from shiplap.render import facts

    if html is not None:
        console.require_file(html)
    # The program inherits the descriptor, so its prints go to stderr without a pipe in between.
    diagnosis = diagnose_command(program, stdout=console.STDERR if json else None)
    if not diagnosis.compiled:
        # A program that fails early may not have reached its compiled code, which is then the first thing to correct.
        status = f"; the program failed with exit status {diagnosis.exit_code}" if diagnosis.exit_code else ""
        raise error(
            "SL702",
            where=diagnosis.target,
            got=f"no compiled function was called{status}",
            expected="a program that calls torch.compile",
            fix="correct the error that the program shows above" if status else "",
        )
    _show_diagnosis(diagnosis, json, html, facts(program=diagnosis.target))
    if diagnosis.exit_code or (fail_on_break and diagnosis.breaks):
        raise typer.Exit(console.FAILED)


def _show_diagnosis(diagnosis: Diagnosis, json: bool, html: Path | None, about: dict[str, str]) -> None:
    from shiplap.render import print_lines, render_html, value_json

    if html is not None:
        page = render_html("diagnosis.html.jinja", title="shiplap doctor", facts=about, found=diagnosis)
        console.write_text(html, page)
    if json:
        console.emit_json(value_json(diagnosis, about, ok=diagnosis.ok, summary=diagnosis.summary))
    else:
        print_lines(diagnosis.lines())
    if html is not None:
        console.note(f"wrote {html}")
