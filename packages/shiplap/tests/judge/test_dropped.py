"""Ways to drop a part of a judgement: none leaves the word *accepted*. The audit's are in ``audit/test_dropped.py``."""

from __future__ import annotations

import errno
import os

import pytest

import shiplap as sl
from shiplap.judge.problem import FunctionProblem
from shiplap.judge.processes import JudgedProcesses
from shiplap.sandbox.supervisor import Bounds, SandboxedProcess
from shiplap_testing.effort import sampled

START = "import torch\nfrom torch import nn\n"
REFERENCE = START + (
    "def reference(x): return torch.relu(x) * 2\ndef get_inputs(): return [torch.randn(16, 12)]\n"
    "def candidate(x): return torch.where(x > 0, x + x, x * 0)\n"
)
RIGHT = START + "def candidate(x): return torch.where(x > 0, x + x, x * 0)\n"


def lose_files(monkeypatch):
    """Let every locked process report that its files are not restricted, as on a kernel without Landlock."""
    begin = SandboxedProcess.__post_init__

    def unlocked(self):
        begin(self)
        self.missing["files"] = "Landlock: Function not implemented"

    monkeypatch.setattr(SandboxedProcess, "__post_init__", unlocked)


def lose(number):
    def lack(*args, **named):
        raise OSError(number, os.strerror(number))

    return lambda monkeypatch: monkeypatch.setattr(JudgedProcesses, "__init__", lack)


def refuse_other_values(monkeypatch):
    """Let the reference refuse, when results are compared, all values but the usual ones."""
    expect = FunctionProblem.expect_effects

    def refusing(self, form, args):
        if not form.usual:
            raise ValueError("no such values")
        return expect(self, form, args)

    monkeypatch.setattr(FunctionProblem, "expect_effects", refusing)


def run_out_of_memory(method, applies):
    """Return a change after which ``method`` of the problem raises an error if ``applies(its arguments)``."""

    def change(monkeypatch):
        work = getattr(FunctionProblem, method)

        def failing(self, *args, **named):
            if applies(*args):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return work(self, *args, **named)

        monkeypatch.setattr(FunctionProblem, method, failing)

    return change


# Name → the change of the machine, the options of the judge, whether both are one file, and what the verdict misses.
WAYS = {
    "one file for both": (None, {}, True, "separation"),
    "no Landlock": (lose_files, {}, False, "sandbox: files"),
    "no process": (lose(errno.EAGAIN), {}, False, "machine"),
    "no open file": (lose(errno.EMFILE), {}, False, "machine"),
    "a full disk": (lose(errno.ENOSPC), {}, False, "machine"),
    "a device out of reach": (None, {"device": "meta"}, False, "device"),
    "values that the reference refuses in the end": (refuse_other_values, {}, False, "value x value"),
    "no memory for other layouts": (run_out_of_memory("draw", lambda form: form.layout), {}, False, "layout x value"),
    "no memory for gradients": (run_out_of_memory("gradients", lambda *args: True), {}, False, "machine"),
    "no time": (None, {"seconds": 0.01}, False, "time"),
}


@pytest.mark.parametrize("name", sampled(WAYS, len(WAYS) // 2))
def test_a_dropped_part_makes_the_verdict_incomplete(launcher, monkeypatch, tmp_path, name):
    change, options, together, missing = WAYS[name]
    problem, folder = tmp_path / "problem.py", tmp_path / "candidate"
    folder.mkdir()
    problem.write_text(REFERENCE)
    (folder / "it.py").write_text(RIGHT)
    if change is not None:
        change(monkeypatch)
    given = {"seconds": 60, "rounds": 5, "bounds": Bounds(), "timed": False, "launcher": launcher, **options}
    result = sl.judge(problem, problem if together else folder / "it.py", **given)
    assert result.verdict == "incomplete", str(result)
    assert missing in dict(result.missing), result.missing


SCALED = """
import shiplap as sl
from jaxtyping import Float32
from torch import Tensor

@sl.op("NAMESPACE::scaled")
def scaled(
    x: Float32[Tensor, "n c"], w: Float32[Tensor, "c"] | None = None, a: float = 1.0
) -> Float32[Tensor, "n c"]:
    return x * a if w is None else x * w * a
"""
# The candidate → the part of the inputs that shows its fault.
LOSING = {
    "return x * 1 if w is None else x * w": "scalars",
    "return x * w * a": "absent",
    "return torch.addcmul(x.new_zeros(()), x, x.new_ones(()) if w is None else w, value=a)": "",
}


@pytest.mark.parametrize("body", sampled(LOSING, 1))
def test_scalars_and_absent_arguments_of_a_declared_op_are_varied(launcher, ns, tmp_path, body):
    problem, folder = tmp_path / "declared.py", tmp_path / "candidate"
    folder.mkdir()
    problem.write_text(SCALED.replace("NAMESPACE", ns))
    (folder / "it.py").write_text(f"{START}def candidate(x, w=None, a=1.0): {body}\n")
    given = {"seconds": 60, "rounds": 5, "bounds": Bounds(), "timed": False, "launcher": launcher}
    result = sl.judge(f"{problem}:scaled", folder / "it.py", **given)
    assert result.verdict == ("refused" if LOSING[body] else "accepted"), str(result)
    assert all(LOSING[body] in reason.input for reason in result.reasons)
