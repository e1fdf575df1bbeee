"""``shiplap explain``: compile a function and show its kernels, their candidates, and what was not fused.

With the id of an error, such as SL202, it shows the entry of the catalogue.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Annotated, Any

import typer

from shiplap.cli import console
from shiplap.cli.families import load_families
from shiplap.cli.model import load_model
from shiplap.errors import CATALOGUE, Entry, error

EPILOG = """\b
Examples:
  shiplap explain examples/fuse.py:layer            its arguments: example_inputs()
  shiplap explain model.py                          the function 'model' of that file
  shiplap explain mylib.model:block --inputs block_inputs --mode max-autotune
  shiplap explain examples/fuse.py:layer --source   with the code that was generated
  shiplap explain examples/fuse.py:layer --json > layer.json
  shiplap explain SL202                             what this error means

\b
Exit status:
  0  compiled; each candidate that was looked at is right
  1  compiled, but a candidate is wrong or broken (it was not used)
  2  the function or the error does not exist, or nothing of the function was compiled"""
ERROR_ID = re.compile(r"SL\d+", re.IGNORECASE)
# Each error has a section on this page, with its id as the anchor.
PAGE = "docs/errors.md"


def command(
    function: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION", help="module[:name] or path/to/file.py[:name]; or the id of an error, such as SL202."
        ),
    ],
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
    """Show what torch.compile made of a function, kernel by kernel, or what an error means.

    Each kernel is shown with the ops that were fused into it, and with the template candidates of declared ops, their
    verdicts and their times. The chosen candidate is shown with the reason. For each neighbour that stayed outside a
    template, Inductor's reason is shown. The function is compiled without any cache and run once.

    For the id of an error, its cause and its repair are shown.
    """
    if ERROR_ID.fullmatch(function):
        return _show_error(_catalogue_entry(function.upper()), json)
    from shiplap.inductor import explain
    from shiplap.render.facts import facts
    from shiplap.render.lines import line
    from shiplap.rewrite.survey import bind_by_name

    with console.own_stdout():
        _, called, args = load_model(function, inputs)
        # torch.compile gets positional arguments here, so a function with keywords is wrapped.
        if isinstance(args, dict):
            called, args = bind_by_name(called, args)
        options: dict[str, Any] = {k: v for k, v in (("mode", mode), ("dynamic", dynamic)) if v}
        explanation = explain(called, *args, **options)
    code = (line(f"\n{text}") for text in explanation.source) if source else ()
    value = explanation.as_json(facts(function=function), source)
    console.show(value, chain(explanation.lines(), code), as_json=json)
    if not explanation.ok:
        raise typer.Exit(console.FAILED)


def _catalogue_entry(id: str) -> Entry:
    """Return the entry of the error catalogue for an id such as ``SL202``. If the id is not known yet, the installed
    families (packages of ops) are imported, since they register errors. Raise ``SL613`` if there is no such error.
    """
    # Families register errors of their own when they are imported, which takes time that most ids do not need.
    if id not in CATALOGUE:
        load_families()
    if id in CATALOGUE:
        return CATALOGUE[id]
    fix = f"pass an id of {PAGE}, or install the package that raises this error"
    raise error("SL613", where="shiplap explain", got=id, expected="the id of an error, such as SL202", fix=fix)


def _show_error(entry: Entry, json: bool) -> None:
    """Print ``entry``, an entry of the error catalogue, as text, or as JSON if ``json`` is true. The output has the
    error's title, class, cause and fix, and the page about it.
    """
    # Each class of errors also derives from a builtin exception.
    builtin = next(base.__name__ for base in entry.kind.__mro__ if base.__module__ == "builtins")
    told = {
        "class": f"{entry.kind.__name__}, also a {builtin}",
        "cause": entry.why,
        "fix": entry.fix,
        "page": f"{PAGE}#{entry.id}",
    }
    lines = [f"{entry.id}: {entry.title}", *(f"  {name:<8} {text}" for name, text in told.items())]
    console.show({"id": entry.id, "title": entry.title, **told}, lines, as_json=json)
