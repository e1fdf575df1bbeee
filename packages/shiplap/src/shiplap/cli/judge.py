"""``shiplap judge``: a verdict on a kernel that is not trusted, and its speed-up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shiplap.cli import console
from shiplap.errors import error

EPILOG = """\b
Examples:
  shiplap judge problem.py generated.py                  Model of the one, ModelNew of the other
  shiplap judge ref.py:softmax fast.py:softmax --json    get_inputs() lies beside the reference
  shiplap judge mylib.ops:rms_norm fast.py:rms --sizes n=4096,c=1024
  shiplap judge ref.py fast.py --seconds 20 --fixed-shapes --html verdict.html
  shiplap judge ref.py fast.py --statement verdict.json    digests and verdict, for others to sign
  shiplap judge --suite KernelBench/level1 --candidates runs/mine --out verdicts.jsonl

\b
Exit status:
  0  accepted
  1  refused: the reasons are printed
  2  the reference cannot be loaded or has no inputs
  3  incomplete: nothing is wrong, and something was not looked at
With --suite: 0 if every problem is accepted, 1 if one is refused, else 3.
Ctrl-C ends a suite with 130, and a later run with the same --out goes on."""


def command(
    reference: Annotated[
        str, typer.Argument(metavar="REFERENCE", help="file.py[:name] or module[:name]; trusted.", show_default=False)
    ] = "",
    candidate: Annotated[
        str,
        typer.Argument(metavar="CANDIDATE", help="In the same form; imported in a sandbox only.", show_default=False),
    ] = "",
    inputs: Annotated[
        str | None,
        typer.Option("--inputs", metavar="TARGET", help="Function that returns the arguments; by default get_inputs."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="How long the whole judgement may take.")] = 60.0,
    rounds: Annotated[int, typer.Option("--rounds", help="Timed batches of calls a shape, of new values.")] = 12,
    sizes: Annotated[
        list[str] | None, typer.Option("--sizes", metavar="N=V,...", help="Sizes to time an op at; repeatable.")
    ] = None,
    tolerance: Annotated[float, typer.Option("--tolerance", help="Relative error to admit beyond rounding.")] = 0.0,
    fixed_shapes: Annotated[
        bool, typer.Option("--fixed-shapes", help="Judge no other shapes than those of get_inputs.")
    ] = False,
    fixed_layouts: Annotated[
        bool, typer.Option("--fixed-layouts", help="Judge contiguous, aligned arguments alone.")
    ] = False,
    compiled: Annotated[bool, typer.Option("--compiled", help="Time torch.compile of the reference, too.")] = False,
    gradients: Annotated[bool, typer.Option("--gradients", help="Compare gradients, too.")] = False,
    device: Annotated[str, typer.Option("--device", help="Device of the arguments.")] = "cpu",
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the verdict as one page.")] = None,
    statement: Annotated[
        Path | None,
        typer.Option("--statement", metavar="FILE", help="Write the verdict as an in-toto statement, with digests."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON value: the verdict.")] = False,
    suite: Annotated[
        Path | None,
        typer.Option("--suite", metavar="DIR", help="Judge all problems of a folder, of a known benchmark's format."),
    ] = None,
    candidates: Annotated[
        str,
        typer.Option("--candidates", metavar="DIR", help="Their candidates, or torch.compile; by default beside them."),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Append the verdicts of a suite as JSON lines, and resume there."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="Candidates of a suite checked side by side.")] = 2,
    sample: Annotated[
        str, typer.Option("--sample", metavar="N[:SEED]", help="Judge N problems of the suite, drawn by a seed.")
    ] = "",
) -> None:
    """Judge whether an untrusted kernel is right, honest and fast.

    The candidate runs in a sandboxed process. Seeds, inputs, clock and comparison stay outside of that process.
    """
    if suite is None and not (reference and candidate):
        got = "neither a suite, nor a reference and a candidate"
        raise error("SL613", where="shiplap judge", got=got, expected="REFERENCE CANDIDATE, or --suite DIR")
    if suite is not None and (reference or inputs or html or statement):
        got = "--suite with REFERENCE, --inputs, --html or --statement"
        raise error("SL613", where="shiplap judge", got=got, expected="REFERENCE CANDIDATE, or --suite DIR alone")
    if suite is None and (candidates or output or sample):
        got = "--candidates, --out or --sample without --suite"
        raise error("SL613", where="shiplap judge", got=got, expected="REFERENCE CANDIDATE, or --suite DIR")
    if jobs < 1:
        raise error("SL613", where="shiplap judge", got=f"--jobs {jobs}", expected="a positive number")
    # All that can fail early is checked before the candidate starts, because a judgement may take a minute.
    from shiplap.judge.options import JudgeOptions

    JudgeOptions(seconds=seconds, rounds=rounds, tolerance=tolerance)
    console.require_device(device)
    for file in (html, statement, output):
        if file is not None:
            console.require_file(file)
    from shiplap.cli.tune import values_of
    from shiplap.judge import judge
    from shiplap.render.facts import facts
    from shiplap.render.result import STYLES, exit_status
    from shiplap.tuning.engine import tuning_progress

    changes: dict[str, Any] = {
        "seconds": seconds,
        "rounds": rounds,
        "sizes": [values_of(text) for text in sizes or []],
        "tolerance": tolerance,
        "vary_shapes": not fixed_shapes,
        "vary_layouts": not fixed_layouts,
        "compiled": compiled,
        "gradients": True if gradients else None,
        "device": device,
    }
    if suite is not None:
        from shiplap.cli.judge_suite import judge_suite

        raise typer.Exit(judge_suite(suite, candidates, output, jobs, sample, changes, as_json=json))
    with console.own_stdout(), tuning_progress(False if json else None) as report:
        result = judge(reference, candidate, inputs=inputs, report=report, **changes)
    if html is not None:
        title = f"shiplap judge {result.candidate}"
        console.write_page(html, "judge.html.jinja", title, facts(), result=result, styles=STYLES)
    if statement is not None:
        from shiplap.judge.target import write_judge_statement

        write_judge_statement(statement, result, reference, candidate)
    if json:
        console.emit_json(result.as_json())
    else:
        console.out().print(result, soft_wrap=True)
    raise typer.Exit(exit_status([result.verdict]))
