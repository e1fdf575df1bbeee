"""The command ``shiplap slidesparse report``: the effect of structured sparsity and 8 bits on a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from shiplap.plugin_api import error, verbs
from shiplap_slidesparse.cli.inputs import model_of, tokens_of
from shiplap_slidesparse.cli.show import print_report, write_page

__all__ = ["EPILOG", "command"]

EPILOG = """\b
Examples:
  shiplap slidesparse report ./llama --pattern 6:8 --dtype fp8 --device cuda --tune
                                  a directory of Hugging Face transformers
  shiplap slidesparse report ./llama --text article.txt --html report.html
                                  with perplexity and drift of logits on a text
  shiplap slidesparse report model.py:net --tokens tokens.json --rows 1,16,256
                                  a module, or a function that returns one; tokens as numbers
  shiplap slidesparse report ./llama --no-measure --json

\b
Exit status:
  0  the converted form wins somewhere (with --no-measure: is predicted to, or nothing is)
  1  it wins nowhere: the layers as they are, or dense ones, are faster here
  2  no such model, nothing to convert, or tokens that do not fit"""


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A directory of transformers, or module[:name] or file.py[:name] of a torch module."
        ),
    ],
    pattern: Annotated[str, typer.Option("--pattern", help="dense, 2:4, 4:6, 6:8, ...")] = "dense",
    dtype: Annotated[str, typer.Option("--dtype", help="int8, fp8, bf16 or fp16.")] = "int8",
    rows: Annotated[str, typer.Option("--rows", metavar="M,...", help="Numbers of rows (tokens of a call).")] = "1,16,"
    "64,256,1024,4096",
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="NAME", help="Layers to keep; repeatable. By default lm_head.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option("--tokens", metavar="FILE", help="Numbers of tokens: JSON, or separated by spaces.")
    ] = None,
    text: Annotated[Path | None, typer.Option("--text", metavar="FILE", help="Text, for its tokenizer.")] = None,
    device: Annotated[str, typer.Option("--device", help="Where to measure.")] = "cpu",
    tune: Annotated[bool, typer.Option("--tune", help="Choose algorithms first, and store the choices.")] = False,
    measure: Annotated[bool, typer.Option("--measure/--no-measure", help="Or only predict.")] = True,
    seconds: Annotated[float, typer.Option("--seconds", help="For one size and number of rows.")] = 2.0,
    html: Annotated[Path | None, typer.Option("--html", metavar="PATH", help="Write one self-contained page.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show per layer and number of rows which form is fastest, by how much, and what accuracy it costs.

    The form base is the unchanged layer. The form dense has pruned weights of 8 or 16 bits. The form slide has the same
    weights, packed for sparse units. With the pattern dense, no weight is pruned and there is no form slide.

    The predicted speed is the limit that arithmetic and memory set, if the device is known. The measured speed is that
    of the device.
    """
    from shiplap_slidesparse.convert import SKIPPED
    from shiplap_slidesparse.report import check_form, survey_model

    wanted = _parse_rows(rows)
    check_form(pattern, dtype)  # before a model is loaded
    _require_time(seconds)
    verbs.require_device(device)
    if html is not None:
        verbs.require_file(html)
    with verbs.own_stdout():
        given = tokens_of(tokens, text, model)
        report = survey_model(
            model_of(model).to(device),
            pattern,
            dtype,
            rows=wanted,
            skip=skip or SKIPPED,
            tokens=given,
            measure=measure,
            tune=tune,
            seconds=seconds,
            progress=False if json else None,
        )
    about = verbs.facts(model=model, device=report.device)
    if html is not None:
        write_page(html, f"slidesparse: {model}", about, report)
    print_report(report) if not json else verbs.emit_json({"facts": about, **report.as_json()})
    if not report.pays and (measure or report.peaks):
        raise typer.Exit(verbs.FAILED)


def _parse_rows(text: str) -> list[int]:
    """Return the distinct numbers of rows in ``text``, such as ``1,16,256``, in ascending order. Raise ``SL613`` if
    ``text`` is not a list of positive integers between commas.
    """
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise error("SL613", where="--rows", got=text, expected="positive numbers: 1,16,256")
    return numbers


def _require_time(seconds: float) -> None:
    """Raise ``SL613`` if ``seconds`` is not positive and finite."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise error(
            "SL613",
            where="--seconds",
            got=f"{seconds}",
            expected="more than 0",
            fix="pass --no-measure to measure nothing",
        )
