"""``shiplap explain``: compile a function and show its kernels, their candidates, and what was not fused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiplap.cli import console
from shiplap.cli.model import load_model

if TYPE_CHECKING:
    from shiplap.fuse import Explanation

__all__ = ["command"]

EPILOG = """\b
Examples:
  shiplap explain examples/fuse.py:layer            its arguments: example_inputs()
  shiplap explain model.py                          the function 'model' of that file
  shiplap explain mylib.model:block --inputs block_inputs --mode max-autotune
  shiplap explain examples/fuse.py:layer --source   with the code that was generated
  shiplap explain examples/fuse.py:layer --json > layer.json

\b
Exit status:
  0  compiled; each candidate that was looked at is right
  1  compiled, but a candidate is wrong or broken (it was not used)
  2  the function does not exist, or nothing of it was compiled"""


def command(
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help="module[:name] or path/to/file.py[:name].")],
    inputs: Annotated[
        str, typer.Option("--inputs", metavar="NAME", help="The function in the same file that returns the arguments.")
    ] = "example_inputs",
    mode: Annotated[
        str | None, typer.Option("--mode", help="Mode of torch.compile; max-autotune measures candidates.")
    ] = None,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Compile for varying sizes.")] = False,
    source: Annotated[bool, typer.Option("--source", help="Show the generated code as well.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what torch.compile made of a function, kernel by kernel.

    For each kernel: what was fused into it, the template candidates of declared ops with their verdicts and times, the
    one that was chosen and why; and for each neighbour that stayed outside a template, Inductor's reason. The function
    is compiled afresh, past all caches, and run once.
    """
    from shiplap.fuse import explain
    from shiplap.report import facts
    from shiplap.rewrite.survey import by_name

    with console.own_stdout():
        _, called, args = load_model(function, inputs)
        if isinstance(args, dict):
            called, args = by_name(called, args)
        options: dict[str, Any] = {k: v for k, v in (("mode", mode), ("dynamic", dynamic)) if v}
        explanation = explain(called, *args, **options)
    _show(explanation, json, source, facts(function=function))
    if not explanation.ok:
        raise typer.Exit(console.FAILED)


def _show(explanation: Explanation, json: bool, source: bool, about: dict[str, str]) -> None:
    from shiplap.fuse.show import explanation_json, print_explanation

    if json:
        console.emit_json(explanation_json(explanation, about, source))
    else:
        from rich.console import Console

        print_explanation(explanation, Console(highlight=False), source)
