"""``shiplap header``: the C header that declarations imply, and whether a committed one still agrees."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiplap.cli import console
from shiplap.cli.families import families
from shiplap.cli.target import resolve_targets
from shiplap.errors import error
from shiplap_headers import include_dir

if TYPE_CHECKING:
    from shiplap.dispatch import Op

EPILOG = """\b
Examples:
  shiplap header mylib.ops                         print the header of all C kernels bound there
  shiplap header mylib/ops.py -o csrc/ops.h        write it
  shiplap header mylib/ops.py -o csrc/ops.h --check
                                                   compare instead of write, for CI
  shiplap header --check                           check the headers of the shipped kernels
  shiplap header                                   write those, in a source tree
  cc -I$(shiplap header --include) ...             where shiplap/abi.h is

\b
Exit status:
  0  written, printed, or equal
  1  --check found a difference; the diff is on stdout
  2  the target does not exist or has no C kernel, or the file cannot be used"""


def command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="[TARGET]",
            help="module[:op], path/to/file.py[:op] or namespace::name; all shipped kernels if omitted.",
        ),
    ] = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write, or to compare with.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; compare.")] = False,
    include: Annotated[bool, typer.Option("--include", help="Print the directory of shiplap/abi.h and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array, an object per header.")] = False,
) -> None:
    """Print, write or check the C header of declared ops.

    The header holds a prototype and a signature for each C function bound with sl.cabi(...). A library that was built
    against another declaration is refused when it is loaded (SL403), so keep the header generated.
    """
    if include:
        directory = str(include_dir())
        return console.emit_json([{"include": directory}]) if json else console.echo(directory)
    with console.own_stdout():
        jobs = _header_jobs(target, output, check)
        results = [_compare_header(*job) if check else _write_header(*job) for job in jobs]
    if json:
        console.emit_json(results)
    else:
        _print_headers(results)
    # All headers are compared before the exit, so that one run shows every difference.
    if not all(r["ok"] for r in results):
        raise typer.Exit(console.FAILED)


# The target, the text of its header, and the file to write or compare.
HeaderJob = tuple[str, str, Path | None]


def _header_jobs(target: str, output: Path | None, check: bool) -> list[HeaderJob]:
    """Return ``(target, header text, file)`` for each header to write or compare. The file is None for a header to
    print. If ``check`` is true, the headers are to be compared, so ``output`` is required with ``target``. Raise an
    error of usage for options that do not fit together.
    """
    if target:
        # Without a target, the headers of the families are found by their location.
        if check and output is None:
            raise typer.BadParameter("with a TARGET it needs -o FILE, the file to compare with", param_hint="--check")
        return [(target, generate_header(target, resolve_targets([target])), output)]
    if output is not None:
        raise typer.BadParameter("needs a TARGET", param_hint="-o")
    jobs = [(f.module, path) for f in families() if (path := f.header) is not None]
    return [(module, generate_header(module, resolve_targets([module])), path) for module, path in jobs]


def generate_header(target: str, ops: Sequence[Op]) -> str:
    """Return the text of the C header of the C kernels that are bound to ``ops``, the ops of ``target``. Raise
    ``SL501`` if no C kernel is bound.
    """
    from shiplap.kernels.c.header import bound_symbols, config_names_by_symbol, header_text

    symbols = bound_symbols(ops)
    if not symbols:
        names = ", ".join(op.spec.name for op in ops)
        raise error(
            "SL501",
            where=target,
            what="the target has no C kernel",
            got=names,
            expected="a C ABI kernel",
            fix='bind a C kernel: op.kernel("cpu", sl.cabi("libname.so", "symbol"))',
        )
    return header_text(symbols, target, config_names_by_symbol(ops))


def _write_header(target: str, text: str, path: Path | None) -> dict[str, Any]:
    """Write ``text``, the header of ``target``, to the file ``path`` unless it is None. Return target, text and path as
    a dict for JSON.
    """
    if path is not None:
        console.write_text(path, text)
    return {"target": target, "path": path and str(path), "ok": True, "header": text}


def _compare_header(target: str, text: str, path: Path | None) -> dict[str, Any]:
    """Compare the file ``path`` with ``text``, the header of ``target``. Return a dict for JSON, whose key ``ok`` says
    whether they are equal and ``diff`` has their difference. Raise ``SL602`` if the file cannot be read.
    """
    assert path is not None
    try:
        committed = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise error(
            "SL602",
            where=str(path),
            what="the file cannot be read",
            got=getattr(e, "strerror", None) or e,
            expected="the header to compare with",
        ) from None
    # The committed file is the old side, so that the lines with + are those that a new header would add.
    diff = difflib.unified_diff(
        committed.splitlines(keepends=True), text.splitlines(keepends=True), str(path), f"shiplap header {target}"
    )
    return {"target": target, "path": str(path), "ok": committed == text, "diff": "".join(diff)}


def _print_headers(results: list[dict[str, Any]]) -> None:
    """Print the headers or differences in ``results`` on stdout. Print on stderr which files agree or were written."""
    for result in results:
        if "diff" in result:
            console.echo(result["diff"], end="")
            state = "agrees with" if result["ok"] else "differs from"
            console.note(f"{result['path']} {state} the declarations of {result['target']}")
        elif result["path"] is None:
            console.echo(result["header"], end="")
        else:
            console.note(f"wrote {result['path']}")
