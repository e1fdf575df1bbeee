"""``shiplap package``: put native bindings into a wheel, so that its users need no compiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shiplap.cli import console

if TYPE_CHECKING:
    from shiplap.packaging import PackedWheel

EPILOG = """\b
Examples:
  shiplap package dist/mylib-1.0-py3-none-any.whl
                                      bind the ops that importing mylib declares
  shiplap package dist/*.whl --ops mylib.ops -o wheelhouse
                                      name the module of the ops, write into another folder
  shiplap package dist/*.whl --tuned tuned.json --cubins 90 --calls calls.jsonl
                                      add tuned choices, and Triton kernels for these calls
  shiplap package dist/*.whl --json   what was bound and what was left out, with the reason

\b
Exit status:
  0  written
  2  no wheel, no ops, a kernel library outside the package, no compiler, or nothing to add for
     --tuned or --cubins"""


def command(
    wheels: Annotated[list[Path], typer.Argument(metavar="WHEEL", help="Wheels whose packages declare ops.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Folder to write to; by default that of WHEEL.")
    ] = None,
    ops: Annotated[
        list[str] | None, typer.Option("--ops", metavar="MODULE", help="A module that declares ops; may be repeated.")
    ] = None,
    platform: Annotated[
        str, typer.Option("--platform", metavar="TAG", help="Platform tag; by default what the libraries need.")
    ] = "",
    tuned: Annotated[
        Path | None, typer.Option("--tuned", metavar="FILE", help="Add the choices that 'shiplap freeze' wrote.")
    ] = None,
    cubins: Annotated[
        list[int] | None,
        typer.Option("--cubins", metavar="ARCH", help="Compile sl.triton kernels for 90, 100, ...; may be repeated."),
    ] = None,
    calls: Annotated[
        Path | None,
        typer.Option(
            "--calls", metavar="FILE", help="A file that SHIPLAP_RECORD wrote: --cubins compiles for its calls."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON array, an object per wheel.")] = False,
) -> None:
    """Put native bindings into wheels, for users without a compiler.

    The bindings use torch's stable ABI and contain no Python. One wheel therefore serves torch from 2.11 on and every
    version of Python. A wheel for any platform becomes a wheel for this platform, under a new name.
    """
    with console.own_stdout():
        from shiplap.packaging import PackageExtras, WheelRequest, package

        extras = PackageExtras(tuned, tuple(cubins or ()), calls)
        # All wheels share the options, so that one command serves the wheels of several platforms.
        requests = [WheelRequest(wheel, output, tuple(ops or ()), platform, extras) for wheel in wheels]
        packed = [package(request, console.note) for request in requests]
    console.show([_as_json(each) for each in packed], chain.from_iterable(map(_packed_lines, packed)), as_json=json)
    for each in packed:
        # The wheel itself is usable, so this is a note and no failure.
        if each.warning and not json:
            console.note(f"package indexes will refuse this wheel: {each.warning}")


def _as_json(packed: PackedWheel) -> dict[str, Any]:
    """Return a packaged wheel and its contents as a dict that JSON can hold."""
    return {
        "wheel": str(packed.wheel),
        "warning": packed.warning,
        "packages": [
            {
                **asdict(each),
                "left_out": [{"op": op, "reason": reason} for op, reason in each.left_out],
                "cubins": [{"kernel": kernel, "architecture": arch} for kernel, arch in each.cubins],
            }
            for each in packed.contents
        ],
    }


def _packed_lines(packed: PackedWheel) -> Iterator[str]:
    """Yield lines of text that list the contents of a packaged wheel. These are its libraries, native ops, compiled
    kernels and tuned choices, and the ops that were left out with the reason.
    """
    yield str(packed.wheel)
    for each in packed.contents:
        yield from (f"  library   {each.package}/{library}" for library in each.libraries)
        yield from (f"  native    {bound.op} on {', '.join(bound.devices)}" for bound in each.bound)
        for (kernel, arch), forms in Counter(each.cubins).items():
            yield f"  cubins    {kernel} for sm_{arch}, {forms} form{'s' * (forms > 1)}"
        if each.choices:
            yield f"  choices   {each.choices}"
        yield from (f"  left out  {op}: {reason}" for op, reason in each.left_out)
