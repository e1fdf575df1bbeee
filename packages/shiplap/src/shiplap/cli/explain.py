"""``shiplap explain``: compile a function and show its kernels, their candidates, and what was not fused."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiplap.cli import console
from shiplap.cli.target import callables, import_home, near_miss, split
from shiplap.errors import error

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
        str, typer.Option("--inputs", metavar="NAME", help="The function beside it that returns its arguments.")
    ] = "example_inputs",
    mode: Annotated[
        str | None, typer.Option("--mode", help="Of torch.compile; max-autotune measures candidates.")
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
        home, name = split(function)
        module = import_home(home or function)
        called, args = _attribute(module, name or "model"), _arguments(module, inputs)
        if isinstance(args, dict):
            called, args = by_name(called, args)
        options: dict[str, Any] = {k: v for k, v in (("mode", mode), ("dynamic", dynamic)) if v}
        explanation = explain(called, *args, **options)
    _show(explanation, json, source, facts(function=function))
    if not explanation.ok:
        raise typer.Exit(console.FAILED)


def _attribute(module: ModuleType, name: str) -> Any:
    value = getattr(module, name, None)
    if callable(value):
        return value
    names = callables(module)
    expected = near_miss(name, names) if names else "a function; none is defined here"
    got = f"{name} is {type(value).__name__}" if value is not None else name
    raise error(
        "SL501",
        where=module.__name__,
        what="no function has this name",
        got=got,
        expected=expected,
        fix="pass module:function or path/to/file.py:function",
    )


def _arguments(module: ModuleType, name: str) -> tuple[Any, ...] | dict[str, Any]:
    """What ``name()`` of the module returns, by position or by name; a single value is the only argument."""
    if not callable(getattr(module, name, None)):
        raise error(
            "SL613",
            where=module.__name__,
            got=f"no function {name!r}",
            expected=f"def {name}(): return the arguments to compile for",
            fix="define the function, or name another one with --inputs",
        )
    made = getattr(module, name)()
    if isinstance(made, dict):
        return made
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


def _show(explanation: Explanation, json: bool, source: bool, about: dict[str, str]) -> None:
    from shiplap.fuse.show import explanation_json, print_explanation

    if json:
        console.emit_json(explanation_json(explanation, about, source))
    else:
        from rich.console import Console

        print_explanation(explanation, Console(highlight=False), source)
