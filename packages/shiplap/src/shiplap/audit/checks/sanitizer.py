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
from shiplap.audit.target import address_of_op
from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase
from shiplap.sampling.samples import Samples

# One process runs all samples, and the tool slows each kernel down.
SANITIZER_TIMEOUT_SECONDS = 240.0
MOST_EDGE_SAMPLES = 12
# Without the caching allocator each tensor is an allocation of its own, so that overruns are detected.
UNCACHED_ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TORCH_SHOW_CPP_STACKTRACES": "0"}
FIXES_BY_TOOL = {
    "memcheck": "mask the last tile, and compute addresses from the sizes and strides of the arguments",
    "racecheck": "synchronise the block between a write to shared memory and another thread's access to it",
    "initcheck": "write the memory before it is read: initialise the workspace, write every element of the output",
    "synccheck": "let all threads of the block reach the barrier",
}


def sanitizer_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which compute-sanitizer runs the op. They are the base sample, samples with sizes of 1 and
    near powers of two, larger ones, samples without optional arguments, and samples of all dtypes.
    """
    edges = (c for c in samples.edges() if c.numel)
    yield from chain(
        samples.plain(), islice(edges, MOST_EDGE_SAMPLES), samples.grown(1), samples.optionals(), samples.dtypes()
    )


def observe_sanitizer(op: Op, case: SampleCase) -> Observation:
    """Return an observation without a problem if compute-sanitizer can run for the sample's device. Otherwise return
    one that is a ``skip`` or ``missed``. The op is not called, since ``observe_under_tool`` later runs all samples in
    one process.
    """
    if not case.device.startswith("cuda"):
        return Observation(skip="compute-sanitizer looks at CUDA kernels: audit with device='cuda'")
    if not sanitizer.sanitizer_version():
        return Observation(missed="compute-sanitizer is not on PATH (it comes with the CUDA toolkit)")
    return Observation()


def observe_under_tool(tool: str, op: Op, cases: list[SampleCase]) -> Observation:
    """Run all samples in one process under the tool ``tool`` of compute-sanitizer, such as ``memcheck``. Return the
    observation of its report.
    """
    home, root = address_of_op(op)
    labels = list(dict.fromkeys(c.label for c in cases))
    text = sanitizer.make_script(home, op.spec.name, labels, cases[0].seed, cases[0].device, root)
    # -P: a module of the current folder must not take the place of one that the script imports.
    report = sanitizer.run_under_sanitizer(
        [sys.executable, "-P", "-c", text], tool, SANITIZER_TIMEOUT_SECONDS, UNCACHED_ENVIRONMENT
    )
    return observation_of_report(report, tool, len(labels))


def observation_of_report(report: sanitizer.SanitizerReport, tool: str, wanted: int) -> Observation:
    """Return the observation of a report of compute-sanitizer. It has a problem if there are errors or the op fails,
    and is ``missed`` if the tool gave no result. ``tool`` and ``wanted``, the number of samples, appear in its text.
    """
    how = f"{tool} of compute-sanitizer"
    if report.errors:
        first = report.faults[0] if report.faults else None
        shown = f": {first}" if first else ""
        where = f" [sample {first.sample}]" if first and first.sample else ""
        return Observation(f"{how} counts {report.errors} errors{shown}{where}", fix=FIXES_BY_TOOL[tool])
    if report.problem:
        return Observation(missed=f"{how} gave no verdict: {report.problem}")
    if not report.finished:
        return Observation(f"under {how} the op fails in sample {report.samples} of {wanted}: {report.last_line}")
    return Observation(note=f"{how}, {wanted} samples, 0 errors")


def _make_check(tool: str, symbol: str) -> Check:
    """Return the audit check that runs the tool ``tool`` of compute-sanitizer, such as ``memcheck``. ``symbol`` is the
    name of this module's variable that holds the check.
    """
    return Check(
        "sanitizer",
        observes="no kernel reads or writes beside its memory, without torch's allocator in between",
        observe=observe_sanitizer,
        cases=sanitizer_cases,
        obligations=(),
        sequence=partial(observe_under_tool, tool),
        patience=900.0,
        fix=FIXES_BY_TOOL[tool],
        symbol=symbol,
    )


CHECK = MEMCHECK = _make_check("memcheck", "MEMCHECK")
RACECHECK = _make_check("racecheck", "RACECHECK")
INITCHECK = _make_check("initcheck", "INITCHECK")
SYNCCHECK = _make_check("synccheck", "SYNCCHECK")
