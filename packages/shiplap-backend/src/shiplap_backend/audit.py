"""The sweep of a built project: processes that may crash, and one verdict for each operator and dtype, or model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shiplap.plugin_api import error
from shiplap_backend.project import Project

State = Literal["native", "mixed", "fallback", "core", "refused", "fail", "crash", "left"]
STATES: dict[State, str] = {
    "native": "in the device's own kernels",
    "mixed": "native, with help of the CPU",
    "fallback": "on the CPU, counted",
    "core": "views, copies and memory: no kernel was asked",
    "refused": "NotImplementedError that says why, and no value",
    "fail": "a wrong value or an unexpected error",
    "crash": "the process ended or hung",
    "left": "not run: torch's own decorators skip it, the CPU accepts no sample, or a package is missing",
}
_CASES_PER_BATCH = 168  # cases a process: an import costs 4 s, a crash another one
_MODELS = 6  # models a process
_PATIENCE = 900  # seconds for a process

SweepCase = tuple[str, str]  # operator, dtype


@dataclass(frozen=True)
class SweepVerdict:
    """The verdict on one operator or model in one dtype.

    ``state`` is a key of ``STATES``, such as ``native`` or ``fail``. ``native`` names the operators that ran on the
    device. ``fallback`` names those that ran on the CPU, each with a reason. ``why`` is the reason if a call failed,
    was refused or did not run.
    """

    op: str
    dtype: str
    state: State
    samples: int
    native: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    why: str = ""
    gradients: int = 0  # samples of which the gradients were compared too

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the verdict as a dict that can be written as JSON."""
        return asdict(self)


def operator_names(project: Project) -> list[str]:
    """Return the sorted names of the operators in OpInfo, torch's database of test cases.

    A separate process reads them after it has loaded the device of ``project``. Raise ``SL906`` if torch's test package
    cannot be imported there.
    """
    lines, end = _read_sweep_lines(project, None)
    if end:
        raise error(
            "SL906",
            where="the OpInfo database",
            what="the sweep over the device cannot start",
            got=end,
            expected="torch's test package",
            fix="install them: pip install expecttest hypothesis",
        )
    names: list[str] = json.loads(lines[0])
    return names


def model_names() -> list[str]:
    """Return the sorted names of the models that ``run_sweep`` can compare with ``models=True``."""
    from shiplap_backend.models import MODELS

    return sorted(MODELS)


def _read_sweep_lines(project: Project, cases: Sequence[SweepCase] | None, samples: int = 0) -> tuple[list[str], str]:
    """Run one process that compares ``cases`` on the device of ``project`` with the CPU. Return the lines that it
    printed, and a message that says how it failed.

    The message is empty if the process succeeded. A case is a pair of an operator or model and a dtype. If ``cases`` is
    None, the process prints a JSON list of the operators instead. ``samples`` is the largest number of samples of an
    operator. If it is 0, the cases are models.
    """
    arguments = ["--list"] if cases is None else ["--samples", str(samples)] if samples else ["--models"]
    # With ``-P``, no module in the working directory takes the place of an installed one.
    command = [sys.executable, "-P", "-m", "shiplap_backend.sweep", str(project.package.resolve()), *arguments]
    try:
        run = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired as e:
        text = e.stdout.decode() if isinstance(e.stdout, bytes) else e.stdout or ""
        return text.splitlines(), f"no answer within {_PATIENCE} s"
    if run.returncode == 0:
        return run.stdout.splitlines(), ""
    return run.stdout.splitlines(), f"exit status {run.returncode}: {run.stderr.strip()[-300:]}"


def run_sweep(
    project: Project,
    names: Sequence[str],
    dtypes: Sequence[str],
    *,
    samples: int = 8,
    jobs: int = 1,
    models: bool = False,
    tell: Callable[[str], object] = str,
) -> Iterator[SweepVerdict]:
    """Yield a verdict for each of ``names`` in each of ``dtypes``. Operators that torch does not test in a dtype are
    left out.

    Raise ``SL906`` if the device cannot be loaded.

    Args:
        project: A project that was built.
        names: Names that ``operator_names`` returns, or ``model_names`` if ``models`` is true.
        dtypes: Short names such as ``"f32"``. Models are compared in ``["f32"]`` only.
        samples: The largest number of samples that are run of one operator.
        jobs: The number of processes that run at a time.
        models: Whether ``names`` are models instead of operators.
        tell: A function that is called with a message about the progress after each process.
    """
    cases = [(name, dtype) for name in names for dtype in dtypes]
    # A process has a time limit, and a model takes longer than an operator.
    size, what = (_MODELS, "models") if models else (_CASES_PER_BATCH, "operators and dtypes")
    batches = [cases[i : i + size] for i in range(0, len(cases), size)]
    with ThreadPoolExecutor(jobs) as pool:
        for n, verdicts in enumerate(pool.map(lambda b: _run_batch(project, b, 0 if models else samples), batches)):
            tell(f"{min((n + 1) * size, len(cases))}/{len(cases)} {what}")
            yield from verdicts


def _run_batch(project: Project, cases: Sequence[SweepCase], samples: int) -> list[SweepVerdict]:
    """Compare ``cases`` on the device of ``project`` with the CPU in a process, and return their verdicts.

    ``samples`` is the largest number of samples of an operator, or 0 for models. A case that ends the process gets the
    verdict ``crash``. A new process then runs the cases after it. Raise ``SL906`` if a process ends before its first
    case, since the device could not be loaded.
    """
    verdicts = []
    waiting = list(cases)
    while waiting:
        lines, end = _read_sweep_lines(project, waiting, samples)
        started: SweepCase | None = None
        for row in map(json.loads, lines):
            # A case that has started and has no verdict is the one that ended the process.
            if "start" in row:
                started = row["start"], row["dtype"]
                continue
            started = None
            verdicts.append(_parse_verdict(row))
        # No case had started, so the failure is not a kernel's: loading the device itself failed.
        if end and started is None:
            raise error(
                "SL906",
                where=str(project.package),
                what="the sweep over the device cannot start",
                got=end,
                expected="a device that loads",
                fix="run 'shiplap backend build' first",
            )
        if started is None:
            break
        verdicts.append(SweepVerdict(*started, "crash", 0, why=end))
        # The case that crashed is not run again, or the sweep would never end.
        waiting = waiting[waiting.index(started) + 1 :]
    return verdicts


def _parse_verdict(row: dict[str, Any]) -> SweepVerdict:
    """Return the verdict that ``row`` describes.

    ``row`` is one JSON line of a sweep process, about one operator or model in one dtype.
    """
    fallback = tuple(f"{op}: {why}" for op, reasons in sorted(row["fallback"].items()) for why in reasons)
    # A failure counts more than a refusal, and both count more than where the calls ran.
    state: State = "core"
    if row["failure"]:
        state = "fail"
    elif row["refused"]:
        state = "refused"
    elif not row["samples"]:
        state = "left"
    elif row["native"]:
        state = "mixed" if fallback else "native"
    elif fallback:
        state = "fallback"
    why = row["failure"] or row["refused"] or row["skipped"]
    return SweepVerdict(
        row["op"], row["dtype"], state, row["samples"], tuple(row["native"]), fallback, why, row["gradients"]
    )


def count_by_dtype(verdicts: Sequence[SweepVerdict]) -> dict[str, dict[str, int]]:
    """Return the number of ``verdicts`` for each dtype and state, as a dict of dicts.

    A state without a verdict has the count 0.
    """
    counts: dict[str, Counter[str]] = {}
    for v in verdicts:
        counts.setdefault(v.dtype, Counter())[v.state] += 1
    return {dtype: {state: c[state] for state in STATES} for dtype, c in counts.items()}
