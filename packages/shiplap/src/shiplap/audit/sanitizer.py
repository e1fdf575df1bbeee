"""Run a script under a tool of NVIDIA's compute-sanitizer, and parse the report.

The report goes through the script's own stdout, in order. The script prints a line before each sample, and an error
belongs to the sample of the last such line.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SANITIZER_COMMAND = "compute-sanitizer"
# Lines that the script prints. The prefix keeps them apart from output of the op itself.
SAMPLE, DONE = "shiplap-sample: ", "shiplap-done: "
# The tool begins each of its own lines with this, so that they differ from those of the script.
REPORT_PREFIX = "========= "
FAULT_TITLE = re.compile(
    r"(Invalid |Misaligned |Uninitialized |Error: |Warning: Race|Barrier error|Illegal |Fatal |Stack |Device-side )"
)
SUMMARY_LINE = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) error)")
UNUSABLE_LINE = re.compile(
    r"(Device not supported|not supported on|Unable to|Failed to initialize|requires|Internal error)"
)


@dataclass
class SanitizerFault:
    """One fault in a report of compute-sanitizer. It holds the first line of the report about it, the further lines
    without stack frames, and the label of the sample that ran.
    """

    title: str
    details: list[str] = field(default_factory=list)
    sample: str = ""

    def __str__(self) -> str:
        """Return the title of the fault and its first four details in one line."""
        return "; ".join([self.title, *self.details[:4]])


@dataclass(frozen=True)
class SanitizerReport:
    """The result of running a command under a tool of compute-sanitizer.

    Attributes:
        faults: the tool's records in order. The tool prints the first ones only.
        errors: the number of records that the tool counted.
        samples: the number of samples that the script began.
        finished: whether the script came to its end.
        problem: the reason why there is no verdict, such as a missing tool, a missing device or a timeout. It is
            empty if there is a verdict.
        last_line: the last line on stderr.
    """

    faults: tuple[SanitizerFault, ...] = ()
    errors: int = 0
    samples: int = 0
    finished: bool = False
    problem: str = ""
    last_line: str = ""


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, or None if it is not found. It is searched for on ``PATH``, then in the
    folder ``bin`` of ``CUDA_HOME`` and ``CUDA_PATH``, and then beside ``nvcc``.
    """
    nvcc = shutil.which("nvcc")
    folders = [f"{home}/bin" for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if home]
    folders += [str(Path(nvcc).resolve().parent)] if nvcc else []
    return shutil.which(SANITIZER_COMMAND) or shutil.which(
        SANITIZER_COMMAND, path=os.pathsep.join(folders) or os.devnull
    )


def sanitizer_version() -> str:
    """Return the version of compute-sanitizer, such as ``2025.3.1.0``, or an empty string if it is not found."""
    path = find_sanitizer()
    if path is None:
        return ""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"[Vv]ersion\s+([\d.]+)", done.stdout)
    return match[1] if match else ""


def run_under_sanitizer(
    script: list[str], tool: str, timeout_s: float, env: dict[str, str] | None = None
) -> SanitizerReport:
    """Run the command ``script`` under the tool ``tool`` of compute-sanitizer, and return the report.

    The environment variables in ``env`` are added to those of this process. The command and all its processes are
    killed after ``timeout_s`` seconds.
    """
    path = find_sanitizer()
    if path is None:
        return SanitizerReport(problem=f"{SANITIZER_COMMAND} is not on PATH (it comes with the CUDA toolkit)")
    options = ["--tool", tool, "--print-limit", "100", "--target-processes", "application-only"]
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []  # torch probes with calls that may fail
    child = subprocess.Popen(
        [path, *options, *quiet, *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
        # A session of its own, so that the tool and the script can be killed together.
        start_new_session=True,
    )
    late = ""
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        late = f"no end within {timeout_s:g} s"
    return parse_report(out.decode(errors="replace"), err.decode(errors="replace"), child.returncode, late)


def parse_report(out: str, err: str = "", status: int = 0, late: str = "") -> SanitizerReport:
    """Return the report that the output ``out`` of compute-sanitizer and of the script contains.

    ``err`` is the output on stderr and ``status`` the exit status. ``late`` says that the run was killed after a time
    limit, and is empty otherwise.
    """
    faults: list[SanitizerFault] = []
    sample, samples, finished, counted, unusable = "", 0, False, None, ""
    for line in out.splitlines():
        if line.startswith(SAMPLE):
            sample, samples = line.removeprefix(SAMPLE), samples + 1
        elif line.startswith(DONE):
            finished = True
        elif line.startswith(REPORT_PREFIX.rstrip()):
            text = line.removeprefix(REPORT_PREFIX.rstrip()).removeprefix(" ")
            if match := SUMMARY_LINE.match(text):
                counted = max(counted or 0, int(match[1] or match[2]))
            elif UNUSABLE_LINE.search(text) and not faults:
                unusable = text.strip()
            else:
                _add_report_line(faults, text, sample)
    last_line = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "")
    problem = late
    if not problem and counted is None and not faults:
        problem = unusable or (
            f"it died of {signal.Signals(-status).name}" if status < 0 else last_line or "no summary"
        )
    elif not problem and unusable and not finished and not faults:
        problem = unusable
    return SanitizerReport(tuple(faults), max(counted or 0, len(faults)), samples, finished, problem, last_line)


def _add_report_line(faults: list[SanitizerFault], text: str, sample: str) -> None:
    """Add one line of compute-sanitizer's report to ``faults``. A line that begins with the title of a fault adds a
    fault, with ``sample`` as the sample that ran. The indented lines after it are details of that fault.
    """
    if FAULT_TITLE.match(text):
        faults.append(SanitizerFault(text.strip(), sample=sample))
    elif faults and text.startswith("    ") and not re.match(r"\s+(Host Frame|Saved host|Device Frame|in )", text):
        faults[-1].details.append(text.strip())


def make_script(home: str, name: str, labels: list[str], seed: int, device: str, root: Path | None) -> str:
    """Return a Python program that calls the op on the samples with these labels, and prints each label before the
    call.

    The program finds the op ``name`` in the module or file ``home``. If ``root`` is not None, the program appends this
    folder to ``sys.path``.
    """
    path = f"sys.path.append({str(root)!r})\n" if root else ""
    return (
        f"import sys\n{path}import torch\nfrom shiplap.audit import find, sample\n"
        "from shiplap.sampling.run import call_op\n"
        f"op = find({home!r}, {name!r})\n"
        f"for label in {labels!r}:\n"
        # The program synchronizes, so that the faults after a label belong to its call alone.
        f"    args = sample(op, label, {seed}, {device!r}).fresh()\n"
        "    torch.cuda.synchronize()\n"
        f"    print({SAMPLE!r} + label, flush=True)\n"
        "    call_op(op, args)\n    torch.cuda.synchronize()\n"
        f"print({DONE!r} + str({len(labels)}), flush=True)\n"
    )
