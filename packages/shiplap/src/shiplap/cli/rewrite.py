"""``shiplap rewrite``: where rewrites match in a model, where they nearly do, and what they save."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated

import typer

from shiplap.cli import console
from shiplap.cli.model import load_model
from shiplap.cli.target import import_home, split_target, unknown_name
from shiplap.errors import error

if TYPE_CHECKING:
    from shiplap.rewrite import Rewrite

EPILOG = """\b
Examples:
  shiplap rewrite model.py --dry-run              the function 'model' for example_inputs()
                                                  with its rewrites and those that ship
  shiplap rewrite model.py:block --with mylib.rewrites
                                                  with these instead; kernels, time and results
  shiplap rewrite model.py --train --html report.html
  shiplap rewrite model.py --dry-run --graphs     before and after, as a difference of texts
  shiplap rewrite --test passes.py                the proof of each rewrite in a file

\b
Exit status:
  0  something matched; with --test, each rewrite is proven
  1  nothing matched; near misses say why. With --test, a rewrite is refused
  2  the function does not exist, nothing was compiled, or a rewrite failed its proof"""


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="module[:name] or path/to/file.py[:name].")],
    rewrites: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="MODULE", help="module[:name] or file.py[:name] with rewrites; repeatable."),
    ] = None,
    inputs: Annotated[
        str,
        typer.Option("--inputs", metavar="NAME", help="The function in the same file that returns the arguments."),
    ] = "example_inputs",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the matches; measure nothing.")] = False,
    train: Annotated[bool, typer.Option("--train", help="Include a backward pass.")] = False,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Compile for varying sizes.")] = False,
    graphs: Annotated[bool, typer.Option("--graphs", help="Show what changed in each graph.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="PATH", help="Write one self-contained page, with pictures.")
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Prove the rewrites of MODEL or of --with; show each check.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what rewrites would do to a model without a change of its code.

    The model is compiled without any cache, with the rewrites in force. The output lists the places that matched with
    the savings there. It also lists near misses, each with the node and the guard, shape, dtype, user or argument that
    prevented a match.

    Unless --dry-run is given, kernels, time and results are compared with those without the rewrites. The gain of each
    rewrite that matched is measured on top of those before it.
    """
    from shiplap.render.facts import facts
    from shiplap.rewrite.survey import survey_rewrites

    if html is not None:
        console.require_file(html)
    if test:
        _test_rewrites([model, *(rewrites or [])], json)
        return
    with console.own_stdout():
        module, fn, args = load_model(model, inputs)
        chosen = _chosen_rewrites(module, rewrites or [])
        surveyed = survey_rewrites(
            fn, args, chosen, train=train, measure=not dry_run, target=model, dynamic=dynamic or None, say=console.note
        )
    about = facts(model=model)
    if html is not None:
        console.write_page(html, "survey.html.jinja", "shiplap rewrite", about, found=surveyed)
    console.show(surveyed.as_json(about), surveyed.lines(graphs), as_json=json)
    # A rewrite that no longer matches usually is a regression, so that CI can find it by the status.
    if not surveyed.matches:
        raise typer.Exit(console.FAILED)


def _test_rewrites(targets: list[str], json: bool) -> None:
    """Prove the rewrites that ``targets`` name, and print each check, as JSON if ``json`` is true and otherwise as
    text. Exit with status 1 if the proof of a rewrite fails. Raise ``SL501`` if there are no rewrites.
    """
    from shiplap.rewrite.proof_report import proofs_as_json, prove_each

    with console.own_stdout():
        chosen = _named_rewrites(targets)
        if not chosen:
            raise error(
                "SL501",
                where=", ".join(targets),
                what="there is no rewrite to prove",
                got="a module without rewrites",
                expected="values that sl.rewrite returned",
                fix="pass the file that calls sl.rewrite, or module:name of one rewrite",
            )
        proofs = prove_each(chosen)
    console.show(proofs_as_json(proofs), (line for proof in proofs for line in proof.lines()), as_json=json)
    if not all(proof.proven for proof in proofs):
        raise typer.Exit(console.FAILED)


def _chosen_rewrites(module: ModuleType, targets: list[str]) -> list[Rewrite]:
    """Return the rewrites (replacements in traced graphs) that ``targets`` name. Without targets, return those that
    Shiplap ships and those of ``module``, the model's module. A rewrite of the module replaces a shipped one of equal
    name.
    """
    if not targets:
        from shiplap.rewrite.shipped import everything

        # A rewrite of the model's module replaces one that ships under the same name.
        return list({r.name: r for r in (*everything, *_rewrites_in_module(module))}.values())
    return _named_rewrites(targets)


def _named_rewrites(targets: list[str]) -> list[Rewrite]:
    """Return the rewrites (replacements in traced graphs) of the modules that ``targets`` name. A target
    ``module:name`` stands for one rewrite.
    """
    rewrites: list[Rewrite] = []
    for target in targets:
        home, name = split_target(target)
        rewrites += _rewrites_in_module(import_home(home or target), name)
    return rewrites


def _rewrites_in_module(module: ModuleType, name: str = "") -> list[Rewrite]:
    """Return all rewrites (replacements in traced graphs) of a module, or only the one in its variable ``name``. Raise
    ``SL501`` if that variable does not exist.
    """
    from shiplap.rewrite import Rewrite

    held = {n: v for n, v in vars(module).items() if isinstance(v, Rewrite)}
    if name:
        if name not in held:
            fix = "pass module:name of a value that sl.rewrite returned"
            raise unknown_name("a rewrite", name, list(held), where=module.__name__, fix=fix)
        return [held[name]]
    return list(dict.fromkeys(held.values()))
