"""``shiplap init``: draft declarations of existing functions, ops and packages. With ``--package``, a package is
imported, a script is run under a recorder, and all ops of the package are drafted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from shiplap.cli import console
from shiplap.cli.recording import run_recorded
from shiplap.cli.target import OWN_NAME, import_home, split_target, unknown_name
from shiplap.errors import error
from shiplap.scaffold.calls import DispatchedCall, DispatchRecorder
from shiplap.scaffold.module import write_module_source
from shiplap.scaffold.package import DraftedPackage, draft_ops, find_package_ops, installed_version
from shiplap.scaffold.signature import signature_of_overload, signatures_of_function
from shiplap.scaffold.skeleton import Draft, fill_lines, render_draft
from shiplap.tuning.engine import tuning_progress

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


@dataclass
class PackageDraft:
    """The draft of a module that declares a package's ops. ``text`` is its source code. ``calls`` has the calls of each
    op that the script ``script`` made, and ``counts`` their numbers. ``failure`` says how that script failed. It is
    empty if the script ran through.
    """

    package: str
    drafted: DraftedPackage
    text: str
    script: str = ""
    failure: str = ""
    calls: dict[str, list[DispatchedCall]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Return the drafted ops, the ops left out and the lines to fill in, as a dict that JSON can hold."""
        ops = [
            {
                "op": e.form.name,
                "calls": self.counts.get(e.form.name, 0),
                "inferred": {k: w for k, w in e.known.where.items() if not w.startswith("not inferred")},
            }
            for e in self.drafted.entries
        ]
        return {
            "origin": self.package,
            "version": installed_version(self.package),
            "script": self.script or None,
            "failure": self.failure or None,
            "ops": ops,
            "not_drafted": [{"op": n, "reason": why} for n, why in self.drafted.left_out.items()],
            "fill": fill_lines(self.text),
        }

    def notes(self, file: str) -> Iterator[str]:
        """Yield the lines of text that describe the draft in the file ``file`` to the user. They state how many ops
        were inferred, called and left out, and how many lines are to be filled in.
        """
        if self.failure:
            yield f"{self.script} failed: {self.failure}"
            yield "  the draft is of the calls before that; mend the script and run again with --force for the others"
        inferred = sum(not _not_inferred(e.known.where.get("return", "")) for e in self.drafted.entries)
        yield f"{file}: {len(self.drafted.entries)} ops, of {inferred} of them dims are inferred"
        if self.script:
            unseen = [e.form.name for e in self.drafted.entries if e.form.name not in self.counts]
            yield f"  {len(self.counts)} ops were called in {self.script}" + (
                f"; not called: {', '.join(unseen)}" if unseen else ""
            )
        for name, why in self.drafted.left_out.items():
            yield f"  not drafted: {name}: {why}"
        yield f"  {len(fill_lines(self.text))} lines to fill in, marked FILL; confirm what is marked inferred"


def _not_inferred(where: str) -> bool:
    """Return whether a size or type has no source. ``where`` names the source from which it was inferred. If there is
    none, it is empty or begins with ``not inferred``.
    """
    return not where or where.startswith("not inferred")


def draft_package(
    package: str,
    namespaces: Sequence[str],
    script: Path | None,
    arguments: Sequence[str],
    keep: Callable[[str], None] = lambda text: None,
) -> PackageDraft:
    """Return drafts of declarations of all ops of ``package``. If ``namespaces`` is not empty, the ops of these
    namespaces are drafted instead. Sizes and types are inferred from the calls that ``script`` makes with the arguments
    ``arguments``. If ``script`` is None, no calls are recorded.

    Each op is drafted in a separate process. ``keep`` is called after each op with the source code of the module so
    far.

    Raises:
        ShiplapError: ``SL501`` if there is no such package or no op in it. ``SL601`` if it cannot be imported.
    """
    ops = find_package_ops(package, import_home, namespaces)
    recorder = DispatchRecorder(ops, lambda name: console.note(f"recording {name}"))
    failure = run_recorded(script, arguments, recorder.mode()) if script is not None else ""
    made_by = f"shiplap init --package {package}" + (f" --record {script}" if script else "")
    version = installed_version(package)

    def write(drafted: DraftedPackage) -> str:
        """Return the source code of the module of declarations, made from ``drafted``. A comment at its head states how
        it was made.
        """
        head = [
            f"{len(drafted.entries)} ops of {package}{f' {version}' if version else ''}, drafted by `{made_by}`.",
            "Import this module, then audit its ops: shiplap audit <this file>. What is marked inferred was seen in",
            "calls and promised by nobody: confirm it. Until the lines marked FILL are written there is no reference,",
            "and whatever would be compared with one stays incomplete.",
        ]
        return write_module_source(drafted.entries, drafted.left_out, head=head, home=package)

    with tuning_progress(None) as report:
        drafted = draft_ops(
            ops, recorder.calls, package, report, isolate=_isolate_work, keep=lambda drafted: keep(write(drafted))
        )
    text = write(drafted)
    return PackageDraft(
        package, drafted, text, str(script) if script else "", failure, recorder.calls, dict(recorder.counts)
    )


def _isolate_work(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the dict that ``work()`` returns in a separate process. It must be of data that can be sent between
    processes. If that process dies, return the reason under the key ``left_out``. If no such process can be made, call
    ``work`` in this one.
    """
    from shiplap.audit.child_process import ChildDeath, can_isolate, run_isolated

    if not can_isolate():
        return work()
    drafted = run_isolated(lambda send: work())
    return {"left_out": f"its meta kernel ends the process: {drafted}"} if isinstance(drafted, ChildDeath) else drafted
