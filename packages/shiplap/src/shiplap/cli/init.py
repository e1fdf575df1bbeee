"""``shiplap init``: draft declarations of existing functions, ops and packages."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from shiplap.cli import console
from shiplap.cli.init_package import PackageDraft, draft_package
from shiplap.cli.target import OWN_NAME, import_home, split_target, unknown_name
from shiplap.errors import error
from shiplap.scaffold.signature import signature_of_overload, signatures_of_function
from shiplap.scaffold.skeleton import Draft, fill_lines, render_draft

EPILOG = """\b
Examples:
  shiplap init norm.py --from mylib._C:rms_norm     a pybind11 function: reads its docstring
  shiplap init attn.py --from mylib.ops:attention   a Python function: reads its annotations
  shiplap init nms.py --from torchvision::nms       a registered op: reads its schema
  shiplap init - --from mylib.ops:mylib::attention  the same after importing mylib.ops; to stdout
  shiplap init ops.py --package torchvision         every op that importing torchvision registers
  shiplap init ops.py --package mylib.ops --namespace mylib --namespace mylib_cpu
  shiplap init ops.py --package torchvision --record detect.py -- --images 4
                                                    with dims and dtypes of a script's calls

\b
Exit status:
  0  written; the lines still to be filled in are listed on stderr
  1  written, but the script of --record failed: the draft is of the calls before that
  2  no such source, no op in the package, no readable signature, or FILE exists (see --force)"""


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Python file to write; - for stdout.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script of --record, after --.")
    ] = None,
    source: Annotated[
        str, typer.Option("--from", metavar="SOURCE", help="module:function, file.py:function or namespace::name.")
    ] = "",
    package: Annotated[
        str, typer.Option("--package", metavar="NAME", help="Draft all ops that importing this module registers.")
    ] = "",
    namespace: Annotated[
        list[str] | None, typer.Option("--namespace", help="With --package: the ops of this namespace; repeatable.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", metavar="SCRIPT", help="With --package: run this script, and infer from its calls."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: file, origin, ops, lines to fill.")
    ] = False,
) -> None:
    """Draft the declarations of functions, ops or packages that exist.

    The source is a Python function, a function of a compiled extension, a registered torch op, or a package of ops.

    Names, types and defaults are read from the source. You fill in sizes, writes and the reference. The draft can be
    imported, and a call raises SL113 until the draft is finished. With --package, sizes are inferred from meta kernels
    and from the calls of a script, and marked "inferred".
    """
    _check_options(source, package, record, namespace or [], arguments or [])
    to_stdout = str(file) == "-"
    # The user fills in a draft by hand, so that overwriting one would lose work.
    if not to_stdout and file.exists() and not force:
        raise error(
            "SL602",
            where=str(file),
            what="the file already exists",
            got="a file that would be overwritten",
            expected="a new file",
            fix="pass --force, or another path",
        )
    if package:
        with console.own_stdout():
            # Written after each op, so that a package which ends the process takes no finished draft with it.
            keep = (lambda text: None) if to_stdout else partial(console.write_text, file)
            drafts = draft_package(package, namespace or [], record, arguments or [], keep)
        _write_package_draft(file, drafts, json=json)
        if drafts.failure:
            raise typer.Exit(console.FAILED)
        return
    with console.own_stdout():
        made = draft_declaration(source)
        text = render_draft(made)
    fills = fill_lines(text)
    if not to_stdout:
        console.write_text(file, text)
    if json:
        ops = [f"{made.namespace}::{s.name}" for s in made.signatures]
        summary = {"file": None if to_stdout else str(file), "origin": made.origin, "ops": ops, "fill": fills}
        console.emit_json({**summary, "text": text} if to_stdout else summary)
        return
    if to_stdout:
        console.echo(text, end="")
    _note_open_lines(file, fills)


def _check_options(source: str, package: str, record: Path | None, namespaces: list[str], arguments: list[str]) -> None:
    """Raise ``SL501`` if the options contradict each other or do not say what to draft. Raise ``SL602`` if the script
    ``record`` does not exist.
    """
    got = ""
    if bool(source) == bool(package):
        got = "both --from and --package" if source else "neither --from nor --package"
    elif source and (record or namespaces):
        got = f"--from and {'--record' if record else '--namespace'}"
    elif arguments and record is None:
        got = f"the arguments {' '.join(arguments)} without --record"
    if got:
        raise error(
            "SL501",
            where="shiplap init",
            what="the options do not say what to draft",
            got=got,
            expected="--from SOURCE, or --package NAME with or without --record SCRIPT",
            fix="pass one of the two; 'shiplap init --help' has examples",
        )
    # The script is checked before the package is imported, which may take long.
    if record is not None and not record.is_file():
        raise error("SL602", where=str(record), what="the script cannot be read", got="no such file", expected="a file")


def _write_package_draft(file: Path, drafts: PackageDraft, *, json: bool) -> None:
    """Write the drafted module to ``file``, or to stdout if that is ``-``. Then print notes on stderr. If ``json`` is
    true, print a JSON object on stdout, which contains the module if it is not written to a file.
    """
    to_stdout = str(file) == "-"
    if not to_stdout:
        console.write_text(file, drafts.text)
    if json:
        summary = {"file": None if to_stdout else str(file), **drafts.summary()}
        console.emit_json({**summary, "text": drafts.text} if to_stdout else summary)
    elif to_stdout:
        console.echo(drafts.text, end="")
    for line in drafts.notes(str(file)):
        console.note(line)


def _note_open_lines(file: Path, fills: list[dict[str, object]]) -> None:
    """Print on stderr the lines of the draft ``file`` that the user has to complete. ``fills`` has their numbers and
    contents.
    """
    console.note(f"{file}: {len(fills)} lines to fill in")
    for fill in fills:
        console.note(f"  {file}:{fill['line']}: {fill['fill']}")


def draft_declaration(source: str) -> Draft:
    """Return the draft of a declaration for ``source``, made from its signature. The source is ``module:function`` or a
    registered op such as ``torchvision::nms``. Raise ``SL501`` if there is no such function or op.
    """
    home, name = split_target(source)
    if home and not name:
        raise error("SL501", where=source, what="the target names no function", got=source, expected="module:function")
    module = import_home(home) if home else None
    if "::" in name:
        return _draft_registered_op(name, module)
    fn = getattr(module, name, None)
    if not callable(fn):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("__")]
        raise unknown_name("a function", name, names, where=source)
    assert module is not None
    own = module.__name__.startswith(OWN_NAME)  # a file that no import statement reaches
    call = "" if own else f"{module.__name__}.{name}"
    # The prefix is in the name of a module that was imported from a file, and is of no use to the user.
    namespace = module.__name__.removeprefix(OWN_NAME).split(".")[0].strip("_")
    return Draft(
        source, namespace, "op", signatures_of_function(fn, source), "" if own else f"import {module.__name__}\n", call
    )


def _draft_registered_op(name: str, module: Any) -> Draft:
    """Return the draft of a declaration for the torch op ``name``, made from its schema. ``module`` registers the op.
    If it is None, the package named like the op's namespace is imported. Raise ``SL501`` if there is no such op, and
    ``SL604`` if it has no default overload.
    """
    import torch

    namespace, _, opname = name.partition("::")
    if module is None and not hasattr(getattr(torch.ops, namespace), opname):
        try:
            # The package of an op often has the name of its namespace.
            module = importlib.import_module(namespace)
        except ImportError:
            module = None
    packet = getattr(getattr(torch.ops, namespace), opname, None)
    if packet is None:
        names, fix = dir(getattr(torch.ops, namespace)), f"name the module that registers it: module:{name}"
        raise unknown_name("an op", opname, names, where=name, got="not registered with torch", fix=fix)
    if "default" not in packet.overloads():
        raise error(
            "SL604",
            where=name,
            got=f"overloads {', '.join(packet.overloads())}",
            expected="an overload without a suffix, which sl.adopt takes",
            fix="write an annotated Python function that calls the overload, and pass --from module:function",
        )
    # A module that was loaded from a path has no name that the draft could import.
    reachable = module is not None and not module.__name__.startswith(OWN_NAME)
    imports = f"import {module.__name__}  # noqa: F401 - registers {name}\n" if reachable else ""
    return Draft(name, namespace, "adopt", [signature_of_overload(packet.default)], imports)
