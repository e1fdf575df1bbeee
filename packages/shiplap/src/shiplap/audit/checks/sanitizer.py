"""``sanitizer``: the op's samples in a process under compute-sanitizer. It runs on request only, since it takes a
minute.

Torch's allocator is switched off there, so that an address beside a tensor is an address beside an allocation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from itertools import chain, islice

from shiplap.audit import sanitizer
from shiplap.audit.check import Check, Observation
from shiplap.audit.target import address
from shiplap.dispatch import Op
from shiplap.sampling.case import Case
from shiplap.sampling.samples import Samples

TIMEOUT_S = 240.0
EDGES = 12
# Without the caching allocator each tensor is an allocation of its own, so that overruns are detected.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TORCH_SHOW_CPP_STACKTRACES": "0"}
FIXES = {
    "memcheck": "mask the last tile, and compute addresses from the sizes and strides of the arguments",
    "racecheck": "synchronise the block between a write to shared memory and another thread's access to it",
    "initcheck": "write the memory before it is read: initialise the workspace, write every element of the output",
    "synccheck": "let all threads of the block reach the barrier",
}


def cases(samples: Samples) -> Iterable[Case]:
    """Yield plain, edge, larger, optional and dtype samples."""
    edges = (c for c in samples.edges() if c.numel)
    yield from chain(samples.plain(), islice(edges, EDGES), samples.grown(1), samples.optionals(), samples.dtypes())


def observe(op: Op, case: Case) -> Observation:
    """Check whether there is a sanitizer for the device. One process runs all samples, in ``sequence``."""
    if not case.device.startswith("cuda"):
        return Observation(skip="compute-sanitizer looks at CUDA kernels: audit with device='cuda'")
    if not sanitizer.version():
        return Observation(missed="compute-sanitizer is not on PATH (it comes with the CUDA toolkit)")
    return Observation()


def sequence(tool: str, op: Op, cases: list[Case]) -> Observation:
    """Run all samples under ``tool``, and return the observation of its report."""
    home, root = address(op)
    labels = list(dict.fromkeys(c.label for c in cases))
    text = sanitizer.script_of(home, op.spec.name, labels, cases[0].seed, cases[0].device, root)
    report = sanitizer.run([sys.executable, "-P", "-c", text], tool, TIMEOUT_S, UNCACHED)
    return judge(report, tool, len(labels))


def judge(report: sanitizer.Report, tool: str, wanted: int) -> Observation:
    """Return the observation of a report. A tool that cannot run is no evidence about the op."""
    how = f"{tool} of compute-sanitizer"
    if report.errors:
        first = report.faults[0] if report.faults else None
        shown = f": {first}" if first else ""
        where = f" [sample {first.sample}]" if first and first.sample else ""
        return Observation(f"{how} counts {report.errors} errors{shown}{where}", fix=FIXES[tool])
    if report.problem:
        return Observation(missed=f"{how} gave no verdict: {report.problem}")
    if not report.finished:
        return Observation(f"under {how} the op fails in sample {report.samples} of {wanted}: {report.last_line}")
    return Observation(note=f"{how}, {wanted} samples, 0 errors")


def _check(tool: str, symbol: str) -> Check:
    """Return the check for one tool."""
    return Check(
        "sanitizer",
        observes="no kernel reads or writes beside its memory, without torch's allocator in between",
        observe=observe,
        cases=cases,
        obligations=(),
        sequence=partial(sequence, tool),
        patience=900.0,
        fix=FIXES[tool],
        symbol=symbol,
    )


CHECK = MEMCHECK = _check("memcheck", "MEMCHECK")
RACECHECK = _check("racecheck", "RACECHECK")
INITCHECK = _check("initcheck", "INITCHECK")
SYNCCHECK = _check("synccheck", "SYNCCHECK")
