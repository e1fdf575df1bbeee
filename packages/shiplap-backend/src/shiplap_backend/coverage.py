"""The coverage of ATen on a target: where each overload runs and why, and which overloads a program called."""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any, Literal

import torch

from shiplap.plugin_api import error
from shiplap.plugin_api.files import work_folder
from shiplap.torch_private.aten_operators import AtenDeclaration, aten_declarations
from shiplap_backend.generate import GeneratedWrappers
from shiplap_backend.metadata import Metadata
from shiplap_backend.project import Project, require_built
from shiplap_backend.runtime import Runtime

State = Literal["native", "composite", "expected", "gap", "elsewhere"]


@dataclass(frozen=True)
class OverloadPlacement:
    """The state of one overload of torch on the device, with the reason ``why``.

    A call in the state ``native`` runs on the device. ``composite`` means that the overload calls other ones.
    ``expected`` means that it runs on the CPU for a known reason, and ``gap`` that it does so without one.
    ``elsewhere`` means that torch has no dense CPU kernel of it. ``required`` is true if the device must have a kernel
    for the overload.
    """

    name: str
    state: State
    why: str
    required: bool


@dataclass(frozen=True)
class ProgramNeed:
    """The calls that a program made to one operator.

    ``native`` counts the calls that ran on the device. ``fallback`` counts those that ran on the CPU for the reason
    ``why``. ``expected`` is false if the metadata does not give that reason.
    """

    op: str
    native: int
    fallback: int
    why: str
    expected: bool


@dataclass(frozen=True)
class Coverage:
    """The coverage of torch's overloads by one target, that is, by one vendor's runtime. ``places`` has the state of
    each overload, which says whether it runs on the device or on the CPU. ``target`` is the name of the runtime, and
    ``torch`` is torch's version.
    """

    target: str
    torch: str
    places: tuple[OverloadPlacement, ...]

    def of(self, state: State) -> list[str]:
        """Return the names of the overloads in the state ``state``, in the order of ``places``.

        For ``native`` they are the overloads with a kernel of the device. For ``gap`` they are those that run on the
        CPU although the metadata gives no reason for it.
        """
        return [p.name for p in self.places if p.state == state]

    def as_json(self) -> dict[str, Any]:
        """Return the coverage as a dict that can be written as JSON.

        ``counts`` has the number of overloads in each state, and ``required`` the number of required ones. ``native``
        has the names of the native overloads. ``reasons`` has the reason for each overload that runs on the CPU.
        """
        required = [p for p in self.places if p.required]
        return {
            "target": self.target,
            "torch": self.torch,
            "native": self.of("native"),
            "counts": dict(sorted(Counter(p.state for p in self.places).items())),
            "required": dict(sorted(Counter(p.state for p in required).items())),
            "reasons": {p.name: p.why for p in self.places if p.state in ("expected", "gap")},
        }


def place_overloads(metadata: Metadata, runtime: Runtime, made: GeneratedWrappers) -> Coverage:
    """Return the state of each overload of torch's operators on the device, with the reason.

    A ``native`` overload has a wrapper in ``made`` or a kernel of ``runtime``. A ``composite`` overload is made of
    calls of other overloads. An ``expected`` overload runs on the CPU for a reason that ``metadata`` or a range of
    versions gives. Any other overload with a CPU kernel is a ``gap``.
    """
    declared = aten_declarations()
    native = {name: "the device core" for name in runtime.registers if name in declared}
    for w in made.wrappers:
        native[w.declaration.name] = f"{w.where.rpartition('/')[2]}, template {w.entry.template}"
        native |= {d.name: f"derived from {w.declaration.name}" for d in w.derived}
        # In torch, the variants of a structured overload delegate to it.
        if w.declaration.structured:
            native |= dict.fromkeys(w.declaration.group, f"delegates to {w.declaration.name}")
    skipped = {s.name: s.reason for s in made.skipped}
    places = [_place_overload(d, native, skipped, metadata.target.falls_back) for _, d in sorted(declared.items())]
    return Coverage(runtime.name, torch.__version__.partition("+")[0], tuple(places))


def _place_overload(
    d: AtenDeclaration, native: Mapping[str, str], skipped: Mapping[str, str], expected: Mapping[str, str]
) -> OverloadPlacement:
    """Return the state of the overload ``d`` on the device, with the reason.

    Args:
        d: The overload.
        native: The reasons of the overloads that have a kernel of the device, by name.
        skipped: The reasons of the metadata entries that do not apply to this torch, by overload.
        expected: The reasons for running on the CPU, by pattern of names.
    """
    # Torch implements composite overloads, and functional ones with a delegate, by calls of other overloads.
    required = d.cpu and not d.composite and not (d.kind != "out" and d.delegate)
    if d.name in native:
        return OverloadPlacement(d.name, "native", native[d.name], required)
    if d.composite or (d.delegate and not d.cpu):
        return OverloadPlacement(d.name, "composite", f"composite {d.composite}: made of other operators", False)
    if not d.cpu:
        return OverloadPlacement(d.name, "elsewhere", "no dense CPU kernel", False)
    if d.name in skipped:
        return OverloadPlacement(d.name, "expected", skipped[d.name], required)
    for pattern, why in expected.items():
        if fnmatch.fnmatchcase(d.name, pattern):
            return OverloadPlacement(d.name, "expected", why, required)
    return OverloadPlacement(d.name, "gap", "no entry in the metadata", required)


_RUN = """
import json, os, runpy, sys
sys.path.insert(0, sys.argv[1]); package = __import__(sys.argv[2]); package.autoload()
import torch
device = getattr(torch, sys.argv[3]); device.reset_counters()
script, out = sys.argv[4], sys.argv[5]
sys.argv = sys.argv[4:5] + sys.argv[6:]
sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
try:
    runpy.run_path(script, run_name="__main__")
finally:
    json.dump(device.counters(), open(out, "w"))
"""


def run_program(project: Project, script: Path, cover: Coverage, arguments: Sequence[str] = ()) -> list[ProgramNeed]:
    """Run the Python file ``script`` with the device of ``project``, and return the calls of each operator that it
    called.

    The file runs in a separate process, with the command-line arguments ``arguments``. ``cover`` says where each
    overload runs. Operators that ran on the CPU unexpectedly come first. Raise ``SL905`` if the file is missing or
    fails.
    """
    require_built(project)
    if not script.is_file():
        raise error(
            "SL905",
            where=str(script),
            what="the program cannot be run",
            got="no such file",
            expected="a Python script",
            fix="name a script that uses the device",
        )
    with work_folder("backend") as scratch:
        out = scratch / "counters.json"
        names = [str(project.root.resolve()), project.package.name, project.device, str(script), str(out)]
        # A process of its own: the device is registered once for each process, under one name.
        run = subprocess.run([sys.executable, "-P", "-c", _RUN, *names, *arguments], capture_output=True, text=True)
        if run.returncode or not out.is_file():
            last = _final_exception(run.stderr) or f"exit status {run.returncode}"
            raise error(
                "SL905",
                where=str(script),
                what="the program cannot be run",
                got=last,
                expected="exit status 0",
                fix="run the program by hand and correct the error that it prints",
            )
        counters = json.loads(out.read_text(encoding="utf-8"))
    return rank_needs(counters, cover)


def _final_exception(traceback: str) -> str:
    """Return the exception that ended a program, that is, the lines after the last frame of ``traceback``."""
    lines = traceback.strip().splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] + 1 :] if frames else lines[-1:]
    # The source line and its markers are indented. The message may take several lines.
    return "\n".join(dropwhile(lambda line: line.startswith("    "), after))


def rank_needs(counters: Mapping[str, Any], cover: Coverage) -> list[ProgramNeed]:
    """Return a ``ProgramNeed`` for each operator that a program called and each reason of its fallbacks to the CPU.

    An operator without fallbacks has one ``ProgramNeed`` with an empty reason. ``counters`` has the counted calls by
    operator. ``cover`` has the reasons why overloads run on the CPU. Unexpected fallbacks come first, and then the most
    frequent ones.
    """
    places = {p.name: p for p in cover.places}
    needed = []
    for full, counts in counters.items():
        place = places.get(full.removeprefix("aten::"))
        state = place.state if place else "gap"
        for why, calls in counts["fallback"].items():
            # An operator without a kernel is expected only if the metadata gives the reason for it.
            unregistered = why.startswith("unregistered")
            known = not unregistered or state == "expected"
            reason = place.why if place and unregistered else why
            needed.append(ProgramNeed(full, counts["native"], calls, reason, known))
        if not counts["fallback"]:
            needed.append(ProgramNeed(full, counts["native"], 0, "", True))
    return sorted(needed, key=lambda n: (n.expected, -n.fallback, -n.native, n.op))


def render_coverage(cover: Coverage, called: Sequence[ProgramNeed] = ()) -> str:
    """Return one self-contained HTML page about ``cover``, that is, where each overload of torch runs on the device.

    The page also lists ``called``, the operators that a program called.
    """
    from shiplap.codegen import render_source

    return render_source(
        "coverage.html.jinja",
        package="shiplap_backend",
        cover=cover,
        counts=cover.as_json(),
        called=[asdict(n) for n in called],
    )
