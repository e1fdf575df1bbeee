"""Runs of a program in scratch copies, each with its diagnosis and the differences of its results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from shiplap import safe_io
from shiplap.doctor import probe
from shiplap.doctor.diagnosis import Break, Diagnosis, Recompile, SourcePlace
from shiplap.doctor.examine import diagnose_trace, shell_status
from shiplap.doctor.scratch import Program, make_copy
from shiplap.doctor.trace import read_trace_files


@dataclass(frozen=True)
class Run:
    """One run of a program whose compiled functions were observed, with its diagnosis. ``differences`` says how its
    results differ from the recorded ones, and ``unstable`` names values that vary by themselves. ``counts`` has the
    numbers of compared outputs, gradients and calls, and ``called`` the number of calls by function. ``times`` has the
    seconds of each call by function. ``status`` is the exit status, and ``seconds`` the duration of the run.
    ``printed`` is the number of lines on standard output, if the output is hidden. ``zeroed`` names values that vary by
    themselves and were no longer measured: they are 0. ``output`` is the hidden text of the program, and ``shown`` that
    part of it which went to standard output. ``uncured`` is true for a run that fails only because it is compiled:
    its ``status``, ``printed``, ``output`` and ``shown`` are those without compilation. ``sites`` has the file, line
    and column of each call of ``torch.compile`` in the program's own files, by the name of the frames in which the
    result is called. The file is relative to the program's folder.
    """

    diagnosis: Diagnosis
    status: int
    seconds: float
    differences: tuple[str, ...] = ()
    unstable: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    printed: int = 0
    called: dict[str, int] = field(default_factory=dict)
    zeroed: tuple[str, ...] = ()
    output: str = ""
    shown: str = ""
    uncured: bool = False
    sites: dict[str, tuple[str, int, int]] = field(default_factory=dict)

    @property
    def entries(self) -> list[Break | Recompile]:
        """The breaks and recompiles of the run, without those that other breaks or recompiles cause."""
        found: list[Break | Recompile] = [*self.diagnosis.breaks, *self.diagnosis.recompiles]
        return [e for e in found if not e.follows]


class Laboratory:
    """A runner of copies of one program, with the folder that holds the copies, recordings and traces. ``limit`` is the
    greatest number of seconds of a run, or None for no limit. ``ignored`` names the values that are not compared, and
    ``varying`` has the lines of the output that differ in two runs of the unchanged program.
    """

    def __init__(self, program: Program, folder: Path, stdout: IO[Any] | int | None) -> None:
        """Prepare trials of a program in ``folder``. ``stdout`` receives the output of the run that is shown to the
        user.
        """
        self.program, self.folder, self.stdout = program, folder, stdout
        self.number = 0
        self.limit: float | None = None
        self.ignored: tuple[str, ...] = ()
        self.varying: set[tuple[str, ...]] = set()

    def run(self, texts: dict[str, str], mode: str, *, uncompiled: bool = False, show: bool = False) -> Run | None:
        """Run a copy of the program in which the files ``texts`` (path to content) are changed. Return the run, or None
        if it takes longer than the time limit.

        ``mode`` is ``"time"``, ``"record"`` or ``"compare"``, and says what is done in each call of a compiled function
        (see ``Probe``). A run with ``"compare"`` has the differences of its results from the recorded ones. If
        ``uncompiled`` is true, the program runs without compilation. If ``show`` is true, its output is shown.
        Otherwise it is hidden.
        """
        self.number += 1
        place = self.folder / str(self.number)
        copy = make_copy(self.program.root, place / "program", texts)
        trace, result = place / "trace", place / "result.json"
        trace.mkdir()
        spec = {
            "mode": mode,
            "recording": str(self.folder / "recording.pt"),
            "result": str(result),
            "paths": self.program.paths(copy),
            "eager": mode != "time",
            "uncompiled": uncompiled,
            "ignored": self.ignored,
        }
        safe_io.write_text(place / "spec.json", json.dumps(spec))
        command = [*self.program.python, probe.__file__, str(place / "spec.json"), *self.program.in_copy(copy)]
        environment = {**os.environ, "TORCH_TRACE": str(trace), "PYTHONDONTWRITEBYTECODE": "1"}
        started = time.monotonic()
        with tempfile.TemporaryFile() as hidden, tempfile.TemporaryFile() as errors:
            streams: dict[str, Any] = {"stdout": self.stdout}
            # The user has seen the output of the program in its first run.
            if not show:
                streams = {"stdin": subprocess.DEVNULL, "stdout": hidden, "stderr": errors}
            try:
                done = subprocess.run(command, env=environment, timeout=self.limit, **streams)
            except subprocess.TimeoutExpired:
                return None
            hidden.seek(0)
            errors.seek(0)
            output = hidden.read()
            printed = output.count(b"\n")
            text = (output + errors.read()).decode(errors="replace")
        seconds = time.monotonic() - started
        report: dict[str, Any] = {"differences": ["it left no results"]}
        if result.is_file():
            report = json.loads(result.read_text())
        sites: dict[str, list[Any]] = report.get("sites", {})
        diagnosis = diagnose_trace(read_trace_files(trace), " ".join(self.program.arguments))
        diagnosis = relocate_diagnosis(diagnosis, f"{copy}/", f"{self.program.root}/")
        shutil.rmtree(place, ignore_errors=True)
        return Run(
            replace(diagnosis, exit_code=shell_status(done.returncode)),
            shell_status(done.returncode),
            seconds,
            tuple(report["differences"]),
            tuple(report.get("unstable", ())),
            report.get("counts", {}),
            report.get("times", {}),
            printed,
            report.get("called", {}),
            tuple(report.get("zeroed", ())),
            text,
            output.decode(errors="replace"),
            sites={
                n: (at[0].removeprefix(f"{copy}/"), *at[1:]) for n, at in sites.items() if at[0].startswith(f"{copy}/")
            },
        )


def relocate_diagnosis(diagnosis: Diagnosis, old: str, new: str) -> Diagnosis:
    """Return a copy of ``diagnosis`` in which the paths of all source lines have the folder ``new`` in place of
    ``old``.
    """

    def moved(place: SourcePlace) -> SourcePlace:
        """Return a copy of the source line ``place``. Its path has the folder ``new`` in place of ``old``, both of the
        enclosing function.
        """
        return replace(place, file=place.file.replace(old, new, 1))

    return replace(
        diagnosis,
        breaks=tuple(
            replace(
                b,
                place=moved(b.place),
                user=moved(b.user),
                chain=tuple(map(moved, b.chain)),
                frames=tuple(map(moved, b.frames)),
            )
            for b in diagnosis.breaks
        ),
        recompiles=tuple(
            replace(r, place=moved(r.place), reader=moved(r.reader) if r.reader else None) for r in diagnosis.recompiles
        ),
    )
