"""Candidates in a process of their own: what kills it costs the candidate, and nothing else."""

import os
import textwrap

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.errors import ShiplapNotice
from shiplap.sandbox.forked_launcher import ForkedLauncher
from shiplap.sandbox.request_errors import ProcessEnded
from shiplap.tuning import SelectionOptions, WorkerProcess, measure, recipe_of, select
from shiplap.tuning.candidate import ReferenceCandidate, candidate_label
from shiplap.tuning.engine import recipe_of_sizes
from shiplap.tuning.inputs import draw_inputs
from shiplap.tuning.key import key_for
from shiplap.tuning.selector import SelectionTask
from shiplap.tuning.worker_process import RemoteBench
from shiplap_testing.forked import WITH_VERBS, python
from tests.tuning import ops

LONG = SelectionOptions(seconds=300.0)  # on a busy machine, a process needs long to start


ENDS = {
    "crash": "ended by SIGSEGV",
    "hang": "no answer for 6",  # and a bit, on a busy machine
    "exit": "ended with exit status 3",
    "raise": "ValueError: never on sizes(n=64), dtypes(Float='float32')",
    "late": "ended by SIGSEGV",
}


@pytest.mark.parametrize(
    "ends", [("crash", "hang"), pytest.param(tuple(ENDS), marks=pytest.mark.long)], ids=["two of them", "all"]
)
def test_a_crash_a_hang_and_an_exit_cost_the_candidate_only(ends):
    before = measure.benchmarks
    tried = {"reference", *(f"hostile(HOW={how})" for how in (*ends, "print"))}
    with WorkerProcess(timeout=6.0) as isolation:
        choice = select(
            ops.hostile,
            recipe_of(ops.hostile, (torch.randn(64),)),
            candidates_of=lambda op, drawn: [c for c in ops.own(op, drawn) if candidate_label(c) in tried],
            bench=isolation.bench(),
            options=LONG,
        )
        processes = 2 + len(set(ends) - {"raise"})
        assert isolation.hosts.started >= processes, "the reference's; the kernel's, and one after each that ended it"
        assert isolation.started == 0
    evidence = {f.evidence.partition(":")[0]: f.evidence.partition(": ")[2] for f in choice.findings}
    assert evidence.keys() == {f"hostile(HOW={how})" for how in ends}
    for how in ends:
        assert evidence[f"hostile(HOW={how})"].startswith(ENDS[how])
    assert choice.label in ("hostile(HOW=print)", "reference")
    assert measure.benchmarks == before, "nothing ran here"


@pytest.mark.long
def test_a_worker_for_all_candidates_starts_anew_after_each_that_ended_it():
    before = measure.benchmarks
    with WorkerProcess(timeout=6.0) as isolation:
        bench = isolation.bench("tests.tuning.ops:own")
        choice = select(ops.hostile, recipe_of(ops.hostile, (torch.randn(64),)), bench=bench, options=LONG)
        assert isolation.started == 5, "one, and one after each that ended it"
    evidence = {f.evidence.partition(":")[0]: f.evidence.partition(": ")[2] for f in choice.findings}
    assert evidence == {
        "hostile(HOW=crash)": "ended by SIGSEGV",
        "hostile(HOW=hang)": evidence["hostile(HOW=hang)"],
        "hostile(HOW=exit)": "ended with exit status 3",
        "hostile(HOW=raise)": "ValueError: never on sizes(n=64), dtypes(Float='float32')",
        "hostile(HOW=late)": "ended by SIGSEGV ({not json})",  # the last line that it printed
    }
    assert evidence["hostile(HOW=hang)"].startswith("no answer for 6")  # and a bit, on a busy machine
    assert choice.label in ("hostile(HOW=print)", "reference")
    assert {f.check for f in choice.findings} == {"tune.verify", "tune.measure"}
    assert measure.benchmarks == before, "nothing ran here"


@pytest.mark.long
def test_a_compiler_that_crashes_or_hangs_beside_others_costs_its_candidate_only():
    """Who it was shows when nothing runs beside it."""
    with WorkerProcess(timeout=6.0) as isolation:
        choice = select(
            ops.hostile,
            recipe_of(ops.hostile, (torch.randn(64),)),
            candidates_of=ops.compiled,
            bench=isolation.bench("tests.tuning.ops:compiled"),
            options=LONG,
        )
        assert isolation.started == 4, "one; one for who waited when it ended; one after each that has a name"
    dropped = [f.evidence for f in choice.findings]
    assert dropped[0] == "compiled(HOW=crash, N=1): ended by SIGSEGV"
    assert dropped[1].startswith("compiled(HOW=hang, N=2): no answer for 6")
    assert len(dropped) == 2
    assert choice.tried == 5


def test_an_op_for_which_no_fork_starts_is_tuned_here_and_says_so(ns, monkeypatch):
    @sl.op(f"{ns}::local")
    def local(x: Float[Tensor, "n k"], w: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
        return torch.softmax((x @ w).sin().exp(), -1)

    seen = {}

    @local.kernel("cpu", name="remembers")
    def _(x, w, *, out):
        key = x.data_ptr(), w.data_ptr(), x.shape, w.shape
        if key not in seen:
            seen[key] = torch.softmax((x @ w).sin().exp(), -1)
        out.copy_(seen[key])

    @local.kernel("cpu", name="fused")
    def _(x, w, *, out):
        torch.softmax(torch.mm(x, w).sin_().exp_(), -1, out=out)

    def refuse(self):
        raise ProcessEnded("no fork today")

    monkeypatch.setattr(ForkedLauncher, "_start", refuse)
    with pytest.warns(ShiplapNotice, match="tuned in this process.*inside a function, and no fork.*no fork today"):
        result = sl.tune(local, [{"n": 256, "k": 64, "m": 256}], budget=600)
    (choice,) = result
    assert choice.kernel in ("fused", "reference")
    assert any("remembers" in f.evidence for f in choice.findings)
    if choice.kernel == "fused":
        assert "unverified" in choice.reason
        assert "order of calls x determinism is untouched" in choice.unverified


SCRIPT = """
import os, sys
import torch
from jaxtyping import Float
from torch import Tensor
import shiplap as sl

@sl.op("script::one")
def one(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + 1

@one.kernel("cpu", configs=[{"PID": 0}])
def kernel(x, *, out, PID):
    if os.getpid() == int(os.environ["TEST_PARENT"]):
        raise RuntimeError("ran in the parent")
    torch.add(x, 1, out=out)

# no guard: the worker imports this file, and must not tune in turn
os.environ.setdefault("TEST_PARENT", str(os.getpid()))
(choice,) = sl.tune(one, [{"n": 64}], budget=60)
print(choice.kernel, [f.evidence for f in choice.findings])
"""


@pytest.mark.long
def test_a_script_is_imported_by_its_path_and_does_not_tune_in_turn(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = python(script, env={**os.environ, "SHIPLAP_CACHE_DIR": str(tmp_path)}, imported=WITH_VERBS)
    assert done.returncode == 0, done.stderr
    name, _, findings = done.stdout.strip().partition(" ")
    assert name in ("kernel", "reference")
    assert findings == "[]"


@pytest.mark.long
def test_an_op_that_differs_in_its_module_is_tuned_in_a_fork(monkeypatch):
    """Kernels attached from elsewhere are unknown to a process that imports the module, and known to a fork."""

    def extra(x, *, out):
        torch.add(x, 1, out=out)

    extra.__module__ = "builtins"
    monkeypatch.setattr(ops.hostile, "kernels", {})
    ops.hostile.kernel("cpu", extra)
    with WorkerProcess() as isolation:
        choice = select(ops.hostile, recipe_of(ops.hostile, (torch.randn(64),)), bench=isolation.bench())
    assert choice.kernel in ("extra", "reference")
    assert choice.findings == ()
    assert not choice.unverified


def test_the_environment_of_the_program_is_sent_to_a_worker_alone(monkeypatch):
    """It may hold secrets, which a locked process, whose candidate is not trusted, could read in its own memory."""
    monkeypatch.setenv("SHIPLAP_TEST_TOKEN", "hunter2")
    drawn = draw_inputs(ops.turn, recipe_of_sizes(ops.turn, {"n": 8}), "cpu")
    task = SelectionTask(ops.turn, drawn, key_for(ops.turn, drawn), [ReferenceCandidate(ops.turn)], SelectionOptions())
    bench = RemoteBench(WorkerProcess(), task, "tests.tuning.ops:own")
    assert bench._opening.environment["SHIPLAP_TEST_TOKEN"] == "hunter2"
    assert bench._judged.opening.environment == {}
    assert bench._judged.opening.provider == "tests.tuning.ops:own"
