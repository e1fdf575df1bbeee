"""The commands ``shiplap backend gen`` and ``build_extension``: from metadata to C++ to an extension module."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shiplap.plugin_api import verbs

if TYPE_CHECKING:
    from shiplap_backend.generate import GeneratedWrappers

EPILOG = """\b
Examples:
  shiplap backend gen torch-openvino                  the C++ only; unchanged files keep their time
  shiplap backend gen torch-openvino --accept-drift   after 'shiplap backend diff' was read
  shiplap backend build torch-openvino                gen, then compile what changed

\b
Exit status:
  0  done
  2  the metadata is wrong, torch has drifted from schema.lock, or the compiler refused"""

_Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A directory that 'shiplap backend new' wrote.")]
_Drift = Annotated[bool, typer.Option("--accept-drift", help="Renew schema.lock from the installed torch.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON value: what was made, and the seconds it took.")]


def _generate_sources(directory: Path, accept: bool) -> tuple[GeneratedWrappers, dict[str, object]]:
    """Generate the C++ sources of the project in ``directory``.

    Return the generated wrappers, and the report that the command prints, as a dict. If ``accept`` is true, torch's
    operator schemas may differ from those that the project locked. Otherwise a difference raises ``SL904``.
    """
    from shiplap_backend.entries import target_dtypes, wide_dtype
    from shiplap_backend.project import generate_project, open_project

    start = time.perf_counter()
    project = open_project(directory)
    made, touched = generate_project(project, accept_drift=accept)
    there = target_dtypes(project.metadata().target)
    overloads = sum(1 + len(w.derived) for w in made.wrappers)
    report: dict[str, object] = {
        "registered": overloads,
        "touched": touched,
        "computes": {dtype: wide_dtype(dtype, there) for dtype in there},
        "skipped": {s.name: s.reason for s in made.skipped},
        "gen_seconds": round(time.perf_counter() - start, 2),
    }
    return made, report


def gen_command(directory: _Directory, accept_drift: _Drift = False, json: _Json = False) -> None:
    """Generate the C++ of every entry of the metadata, for the installed torch and vendor packages."""
    _, report = _generate_sources(directory, accept_drift)
    _print_generated(report, json)


def command(
    directory: _Directory,
    accept_drift: _Drift = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", help="Compilers at a time; by default ninja's choice.")
    ] = None,
    json: _Json = False,
) -> None:
    """Generate, then compile what changed and link it into the project's package."""
    from shiplap_backend.build import build_extension
    from shiplap_backend.project import open_project

    _, report = _generate_sources(directory, accept_drift)
    verbs.note(f"generated in {report['gen_seconds']} s; compiling")
    start = time.perf_counter()
    report["library"] = str(build_extension(open_project(directory), jobs=jobs, tell=verbs.note))
    report["build_seconds"] = round(time.perf_counter() - start, 2)
    _print_generated(report, json)


def _print_generated(report: dict[str, object], json: bool) -> None:
    """Print ``report``, the result of a generation. Print it as JSON if ``json`` is true, and otherwise as one line for
    each field.
    """
    if json:
        verbs.emit_json(report)
        return
    computes = report.pop("computes", {})
    if isinstance(computes, dict) and computes:
        dtypes = ", ".join(f"{dtype} in {wide}" for dtype, wide in computes.items())
        verbs.out().print(f"computes: {dtypes}; 'compute' in an entry changes that", markup=False)
    for key, value in report.items():
        if value not in ([], {}):
            verbs.out().print(f"{key.replace('_', ' ')}: {value}", markup=False)
