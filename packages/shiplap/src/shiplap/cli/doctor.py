"""``shiplap doctor``: run a program, name its graph breaks, return an exit status for CI."""

from __future__ import annotations

import time
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
  shiplap doctor --try -- python infer.py      try remedies in a copy, show those that helped
  shiplap doctor --apply -- python infer.py    the same, then write them into the files

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
    attempt: Annotated[
        bool, typer.Option("--try", help="Try remedies in a scratch copy, and show those that removed an entry.")
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Try remedies, show them as a diff, and write them into the files.")
    ] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML report as well.")] = None,
) -> None:
    """Run a program and explain its graph breaks, recompiles and unused CUDA graphs.

    The program runs as it would alone, with torch's structured trace switched on. Each break is shown with its line,
    its cause, the call that caused it, torch's own explanation and a remedy. The most expensive breaks come first.
    """
    from shiplap.doctor import diagnose_command
    from shiplap.render.facts import facts
    from shiplap.render.lines import value_json

    if attempt or apply:
        _treat_program(program, json, html, fail_on_break, apply)
        return

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
    about = facts(program=diagnosis.target)
    _write_page(diagnosis, html, about)
    value = value_json(diagnosis, about, ok=diagnosis.ok, summary=diagnosis.summary)
    console.show(value, diagnosis.lines(), as_json=json)
    if diagnosis.exit_code or (fail_on_break and diagnosis.breaks):
        raise typer.Exit(console.FAILED)


def _treat_program(program: list[str], json: bool, html: Path | None, fail_on_break: bool, apply: bool) -> None:
    """Run the command ``program`` with remedies in a copy of its files, and print those that helped. If ``apply`` is
    true, also write them into the program's files. Otherwise leave these unchanged. ``json`` chooses JSON in place of
    text, and ``html`` is the file for a report of the unchanged program.

    Exit with status 1 if the program failed. If ``fail_on_break`` is true, exit with status 1 also if graph breaks are
    left.
    """
    from shiplap.doctor import try_remedies
    from shiplap.doctor.scratch import with_own_newlines
    from shiplap.render.facts import facts
    from shiplap.render.lines import print_lines, value_json

    if html is not None:
        console.require_file(html)
    started = time.time()
    treated = try_remedies(program, stdout=console.STDERR if json else None)
    about = facts(program=treated.target)
    _write_page(treated.before, html, about)
    if not json:
        print_lines(treated.before.lines())
        print_lines(treated.lines())
    if apply:
        # The diff comes first: a reader sees what is written even if a file cannot be.
        if not json:
            console.echo(treated.diff)
        for file, text in treated.changed.items():
            # The trials take minutes, in which the file may have been saved by its author.
            if Path(file).stat().st_mtime > started:
                console.note(f"{file} was changed while remedies were tried; it is left as it is")
                continue
            console.write_text(Path(file), with_own_newlines(Path(file), text))
            console.note(f"wrote {file}")
    if json:
        console.emit_json(value_json(treated, about, ok=treated.ok, summary=treated.summary))
    if treated.exit_code or (fail_on_break and treated.after.breaks):
        raise typer.Exit(console.FAILED)


def _write_page(diagnosis: Diagnosis, html: Path | None, about: dict[str, str]) -> None:
    """Write an HTML report of ``diagnosis`` to ``html``, unless it is None. ``about`` has facts about the run."""
    if html is not None:
        console.write_page(html, "diagnosis.html.jinja", "shiplap doctor", about, found=diagnosis)
