"""``shiplap init``: a declaration draft from what already exists."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from shiplap.cli import console
from shiplap.cli.target import OWN_NAME, import_home, near_miss, split
from shiplap.draft.signature import of_function, of_overload
from shiplap.draft.skeleton import Draft, fill_lines, render
from shiplap.errors import error

__all__ = ["command", "draft"]

EPILOG = """\b
Examples:
  shiplap init norm.py --from mylib._C:rms_norm     a pybind11 function: reads its docstring
  shiplap init attn.py --from mylib.ops:attention   a Python function: reads its annotations
  shiplap init nms.py --from torchvision::nms       a registered op: reads its schema
  shiplap init - --from mylib.ops:mylib::attention  the same after importing mylib.ops; to stdout

\b
Exit status:
  0  written; the lines still to be filled in are listed on stderr
  2  no such source, no readable signature, or FILE exists (see --force)"""


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Python file to write; - for stdout.")],
    source: Annotated[
        str, typer.Option("--from", metavar="SOURCE", help="module:function, file.py:function or namespace::name.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: file, origin, ops, lines to fill.")
    ] = False,
) -> None:
    """Draft a declaration from a function, a compiled extension or a registered torch op.

    Names, types and defaults are read; sizes, writes and the reference are yours to fill in. The draft imports, and a
    call raises SL113 until it is finished: nothing in it pretends to be right.
    """
    to_stdout = str(file) == "-"
    if not to_stdout and file.exists() and not force:
        raise error(
            "SL602",
            where=str(file),
            what="the file already exists",
            got="a file that would be overwritten",
            expected="a new file",
            fix="pass --force, or another path",
        )
    with console.own_stdout():
        made = draft(source)
        text = render(made)
    fills = fill_lines(text)
    if not to_stdout:
        console.write_text(file, text)
    if json:
        ops = [f"{made.namespace}::{s.name}" for s in made.signatures]
        summary = {"file": None if to_stdout else str(file), "origin": made.origin, "ops": ops, "fill": fills}
        console.emit_json({**summary, "text": text} if to_stdout else summary)
        return
    if to_stdout:
        typer.echo(text, nl=False)
    _tell(file, fills)


def _tell(file: Path, fills: list[dict[str, object]]) -> None:
    console.note(f"{file}: {len(fills)} lines to fill in")
    for fill in fills:
        console.note(f"  {file}:{fill['line']}: {fill['fill']}")


def draft(source: str) -> Draft:
    """What ``source`` says about itself."""
    home, name = split(source)
    if home and not name:
        raise error("SL501", where=source, what="the target names no function", got=source, expected="module:function")
    module = import_home(home) if home else None
    if "::" in name:
        return _adopted(name, module)
    fn = getattr(module, name, None)
    if not callable(fn):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("__")]
        raise error("SL501", where=source, what="no function has this name", got=name, expected=near_miss(name, names))
    assert module is not None
    own = module.__name__.startswith(OWN_NAME)  # a file that no import statement reaches
    call = "" if own else f"{module.__name__}.{name}"
    namespace = module.__name__.removeprefix(OWN_NAME).split(".")[0].strip("_")
    return Draft(source, namespace, "op", of_function(fn, source), "" if own else f"import {module.__name__}\n", call)


def _adopted(name: str, module: Any) -> Draft:
    """A registered op. Without a module given, the package of the namespace's name is tried."""
    import torch

    namespace, _, opname = name.partition("::")
    if module is None and not hasattr(getattr(torch.ops, namespace), opname):
        try:
            module = importlib.import_module(namespace)
        except ImportError:
            module = None
    packet = getattr(getattr(torch.ops, namespace), opname, None)
    if packet is None:
        raise error(
            "SL501",
            where=name,
            what="no op has this name",
            got="not registered with torch",
            expected=near_miss(opname, dir(getattr(torch.ops, namespace))),
            fix=f"name the module that registers it: module:{name}",
        )
    if "default" not in packet.overloads():
        raise error(
            "SL604",
            where=name,
            got=f"overloads {', '.join(packet.overloads())}",
            expected="an overload without a suffix, which sl.adopt takes",
        )
    reachable = module is not None and not module.__name__.startswith(OWN_NAME)
    imports = f"import {module.__name__}  # noqa: F401 - registers {name}\n" if reachable else ""
    return Draft(name, namespace, "adopt", [of_overload(packet.default)], imports)
