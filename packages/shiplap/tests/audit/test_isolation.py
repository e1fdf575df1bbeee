"""What an op does to its process is a finding; every other finding, and every other op, is there all the same."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.audit import audit, child_process, engine
from shiplap.audit.child_process import ChildDeath, ChildLimits, stream_events
from shiplap_testing.crashes import read_unmapped

LIMITS = ChildLimits(busy_s=2.0, idle_s=2.0, memory=512 << 20)


# isolate=True: with a torch for CUDA, an audit uses forks or not by what ran in this process before. Without forks
# these kernels would end the run of the tests.
def op_with(ns, kernel):
    @sl.op(f"{ns}::double")
    def double(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    double.kernel("cpu", kernel)
    return double


def crash(x):
    if len(x) > 20:
        read_unmapped()
    return x * 2


def leave(x):
    if len(x) > 20:
        os._exit(0)
    return x * 2


def fill(x):
    kept = []
    while len(x) > 20:
        kept.append(torch.ones(1 << 22))
    return x * 2


def wait(x):
    if len(x) > 20:
        threading.Event().wait()
    return x * 2


def compute(x):
    while len(x) > 20:
        pass
    return x * 2


@pytest.mark.parametrize(
    ("kernel", "how"),
    [
        (crash, "crashed with SIGSEGV"),
        (leave, "the process exited with status 0"),
        pytest.param(fill, "memory exhausted", marks=pytest.mark.long),  # these: tests/audit/test_child_process.py
        pytest.param(wait, "deadlock", marks=pytest.mark.long),
        pytest.param(compute, "hangs", marks=pytest.mark.long),
    ],
)
def test_the_death_of_a_process_is_a_finding_and_the_others_are_kept(ns, kernel, how):
    op = op_with(ns, kernel)
    report = audit(op, checks=["determinism", "edges", "arguments"], seed=3, limits=LIMITS, isolate=True)
    findings = report.findings
    assert [(f.check, f.verdict) for f in findings] == [("determinism", "ok"), ("edges", "fail"), ("arguments", "ok")]
    assert findings[1].evidence.startswith(how)
    assert "sizes(n=" in findings[1].input
    assert "seed 3" in findings[1].input
    assert findings[1].fix
    assert "edges.CHECK.look" in findings[1].reproducer
    assert (report.verdict, report.failed) == ("failed", ("edges",))


def test_a_slow_kernel_whose_calls_end_does_not_hang(ns, monkeypatch):
    """Several calls of 0.15 s on one sample were taken for a call without an end."""

    def slow(x):
        end = time.process_time() + 0.03
        while len(x) == 65 and time.process_time() < end:  # of one sample, which "threads" computes 47 times
            pass
        return x * 2

    limits = ChildLimits(busy_s=0.3, idle_s=5.0)
    report = audit(op_with(ns, slow), checks=["schema", "threads"], seed=3, limits=limits, isolate=True)
    assert [f.verdict for f in report] == ["ok", "ok"], report
    far_slower = ChildLimits(busy_s=0.15, idle_s=5.0)  # calls end, and still there are too many
    monkeypatch.setattr(child_process, "SLOW_SHARE", 4)
    report = audit(op_with(f"{ns}b", slow), checks=["schema", "threads"], seed=3, limits=far_slower, isolate=True)
    assert report.verdict == "incomplete", report
    assert "too slow for this check" in report.findings[1].evidence


def test_a_reference_that_fills_the_memory_is_no_fault_of_the_op(ns):
    kept = []

    @sl.op(f"{ns}::double")
    def double(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        while len(x) > 20:
            kept.append(torch.ones(1 << 22))
        return x * 2

    double.kernel("cpu", lambda x: x * 2)
    report = audit(double, checks=["edges", "arguments"], seed=3, limits=LIMITS, isolate=True)
    assert [f.verdict for f in report] == ["incomplete", "ok"], report
    assert report.findings[0].evidence.startswith("the reference needs too much memory for this sample")


def test_audits_side_by_side_watch_their_own_references(ns):
    """The mark of a running reference was that of whichever audit began last."""

    @sl.op(f"{ns}::endless")
    def endless(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        while len(x) > 20:
            pass
        return x * 2

    endless.kernel("cpu", lambda x: x * 2)
    quick = op_with(ns, lambda x: x * 2)
    with ThreadPoolExecutor(2) as pool:
        limits = ChildLimits(busy_s=0.5, idle_s=2.0)
        watched = pool.submit(audit, endless, checks=["edges"], seed=3, limits=limits, isolate=True)
        while not watched.done():
            audit(quick, checks=["schema"], seed=3, isolate=True)
    assert watched.result().verdict == "incomplete", watched.result()


def test_the_sample_that_crashes_is_made_smaller(ns):
    (finding,) = audit(op_with(ns, crash), checks=["edges"], seed=3, limits=LIMITS, isolate=True)
    assert finding.input == "sizes(n=31), dtypes(Float='float32'); seed 3"


@pytest.mark.long
def test_an_op_that_always_dies_is_given_up(ns):
    def always(x):
        os._exit(7)

    findings = audit(op_with(ns, always), seed=3, isolate=True).findings
    assert sum("status 7" in f.evidence for f in findings) <= 5
    assert "processes have died" in findings[-1].evidence


FILE = """
import os
import shiplap as sl
from jaxtyping import Float
from torch import Tensor

@sl.op("{ns}::leaves")
def leaves(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2

@leaves.kernel("cpu")
def _(x):
    os.abort()

@sl.op("{ns}::sound")
def sound(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2

@sound.kernel("cpu")
def _(x, *, out):
    out.copy_(x * 2)
"""


def test_json_and_html_are_complete_whatever_happens(monkeypatch, run, ns, tmp_path: Path):
    # As isolate=True above: the command has no such option.
    monkeypatch.setattr(engine, "can_isolate", lambda device: True)
    file = tmp_path / f"{ns}_ops.py"
    file.write_text(FILE.format(ns=ns))
    options = "--check", "schema", "--check", "fresh", "--json", "--cost", "--html", tmp_path / "page.html"
    done = run("audit", file, *options)
    assert done.exit_code == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["verdicts"][f"{ns}::leaves"]["verdict"] == "failed"
    assert report["verdicts"][f"{ns}::sound"]["verdict"] == "proven"
    assert [c["subject"] for c in report["costs"]] == [f"{ns}::sound"]
    assert "SIGABRT" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("options", "status", "verdict"),
    [
        (["--check", "fresh"], 0, "proven"),
        (["--check", "fresh", "--require", "full"], 3, "incomplete"),
        (["--check", "fresh", "--budget", "0"], 3, "incomplete"),
    ],
)
def test_what_was_not_looked_at_is_incomplete(run, ns, tmp_path: Path, options, status, verdict):
    file = tmp_path / f"{ns}_ops.py"
    file.write_text(FILE.format(ns=ns))
    done = run("audit", f"{file}:sound", "--json", *options)
    assert done.exit_code == status, done.stderr
    assert json.loads(done.stdout)["verdicts"][f"{ns}::sound"]["verdict"] == verdict


def test_inductor_compiles_in_a_child_of_a_process_that_has_compiled(monkeypatch):
    """The threads of its pool stay with the parent; the child would wait for them for ever."""
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: 2)  # one, in other tests
    AsyncCompile.pool.cache_clear()
    assert AsyncCompile.pool().submit(lambda: 7).result(10) == 7

    def work(send):
        send({"kind": "answer", "value": AsyncCompile.pool().submit(lambda: 8).result(10)})

    events = list(stream_events(work))
    assert [e["value"] for e in events if not isinstance(e, ChildDeath) and e["kind"] == "answer"] == [8], events
