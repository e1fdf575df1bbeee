"""``audit`` as a whole: one finding per check, budget, seeds, errors, reproducers that reproduce."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from jaxtyping import Float, Int32
from torch import Tensor

import shiplap as sl
from shiplap.audit import CHECKS, Samples, audit, find
from shiplap.audit.checks import load_check
from shiplap.audit.child_process import ChildDeath
from shiplap.audit.engine import _fix_for_death
from shiplap.errors import AuditError, LibraryError
from shiplap_testing.forked import WITH_VERBS, python


@sl.op("audit_engine::axpy")
def axpy(x: Float[Tensor, "n c"], y: Float[Tensor, "n c"], a: float = 1.0) -> Float[Tensor, "n c"]:
    return a * x + y


@axpy.kernel("cpu")
def _(x, y, a, *, out):
    torch.add(y, x, alpha=a, out=out)


@axpy.backward(saves=("x",))
def _(grad, saved, needs):
    return {"x": grad * saved.a if needs.x else None, "y": grad if needs.y else None}


@sl.op("audit_engine::wrong")
def wrong(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2


@wrong.kernel("cpu")
def _(x):
    return x * 3


@pytest.mark.long  # tests/audit/test_zoo.py audits sound ops as a whole
def test_a_good_op_passes_every_check_within_a_minute():
    """Of its own processes: what else the machine does is not counted."""
    began, seen = sum(os.times()[:4]), []
    findings = audit(axpy, seed=1, budget=600, progress=seen.append)
    assert sum(os.times()[:4]) - began < 120  # two cores for a minute
    assert [f.check for f in findings] == list(CHECKS)
    assert tuple(seen) == findings.findings
    assert {f.check: f.evidence for f in findings if f.verdict == "fail"} == {}
    assert [f.check for f in findings if f.verdict == "skip"] == [
        "bound",
        "distribution",
        "stateless",
        "c_abi",
        "cuda_graph",
        "cudagraph_trees",
    ]
    assert all("seed 1" in f.input for f in findings if f.verdict == "ok")


def test_every_check_says_what_it_observes_and_one_fix():
    for name in CHECKS:
        check = load_check(name)
        assert check.name == name
        assert check.observes
        assert check.fix


def test_seed_is_fresh_by_default():
    inputs = {audit(axpy, checks=["fresh"]).findings[0].input for _ in range(3)}
    assert len(inputs) == 3


def test_the_smallest_failing_sample_is_shown():
    (finding,) = audit(wrong, checks=["numerics"], seed=1)
    assert finding.verdict == "fail"
    assert "x float32(5,)" in finding.input


@pytest.mark.parametrize(("check", "op"), [("numerics", wrong), pytest.param("compile", None, marks=pytest.mark.long)])
def test_a_reproducer_fails_the_same_way_in_another_process(tmp_path: Path, check: str, op):
    if op is None:  # evidence in a series of samples
        from tests.audit.test_compiler import pins as op
    (finding,) = audit(op, checks=[check], seed=5)
    script = tmp_path / "reproducer.py"
    script.write_text(finding.reproducer)
    ran = python(script, env={**os.environ, "PATH": ""}, imported=WITH_VERBS)
    assert ran.returncode == 1, ran.stderr
    assert ran.stderr.strip().endswith("AssertionError")
    assert ran.stdout.strip() in finding.evidence


@pytest.mark.long
def test_a_reproducer_finds_an_op_in_a_file(tmp_path: Path):
    file = tmp_path / "my_ops.py"
    file.write_text(
        Path(__file__).read_text().split("\n@pytest.mark.long")[0].replace("audit_engine::", "audit_file::")
    )
    op = find(str(file), "audit_file::wrong")
    assert find(str(file), "audit_file::wrong") is op
    (finding,) = audit(op, checks=["numerics"], seed=5)
    script = tmp_path / "reproducer.py"
    script.write_text(finding.reproducer)
    ran = python(script, cwd=Path("/"), imported=WITH_VERBS)
    assert ran.stdout.strip() in finding.evidence
    assert ran.returncode == 1
    with pytest.raises(AuditError, match="SL501"):
        find(str(file), "audit_file::absent")


def test_budget_skips_the_rest_and_says_so():
    findings = audit(axpy, budget=0, seed=1)
    assert {f.verdict for f in findings} == {"incomplete", "skip"}, "a check that does not apply needs no time"
    assert all("budget" in f.evidence for f in findings if f.verdict == "incomplete")


@pytest.mark.parametrize("target", ["audit_engine::axpy", torch.ops.aten.relu.default, axpy.reference])
def test_what_is_no_declared_op(target):
    with pytest.raises(AuditError, match=r"SL501: the object is not a declared op(.|\n)*sl.adopt"):
        audit(target)


def test_unknown_check():
    with pytest.raises(AuditError, match="SL503"):
        audit(axpy, checks=["numeric"])


def test_integers_without_meaning_ask_for_a_builder():
    @sl.op("audit_engine::scatter", requires=("m >= 1",))
    def scatter(x: Float[Tensor, "n"], to: Int32[Tensor, "n"], m: int = 1) -> Float[Tensor, "m"]:
        if to.unique().numel() < to.numel():
            raise RuntimeError("destinations must differ")
        return x.new_zeros(m).index_put((to.long(),), x)

    with pytest.raises(AuditError, match=r"SL502.*\n.*\n.*destinations must differ(.|\n)*@op.samples"):
        audit(scatter, seed=1)

    def builder(rng, sizes, dtype, device):
        n = sizes["n"]
        return torch.randn(n, generator=rng).to(dtype), torch.randperm(max(n, 1), generator=rng)[:n].int(), max(n, 1)

    (finding,) = audit(scatter, seed=1, samples=builder, checks=["numerics"])
    assert finding.verdict == "ok"
    assert scatter.sampler is None


def test_a_missing_library_is_an_error_not_sixteen_findings():
    @sl.op("audit_engine::elsewhere")
    def elsewhere(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    elsewhere.kernel("cpu", sl.cabi("/nowhere/libnone.so", "f"))
    with pytest.raises(LibraryError, match="SL401"):
        audit(elsewhere)


def test_a_check_that_raises_is_a_finding(monkeypatch):
    monkeypatch.setattr(Samples, "values", lambda self: 1 / 0)
    (finding,) = audit(axpy, checks=["determinism"], seed=1)
    assert finding.verdict == "fail"
    assert "the check itself raised ZeroDivisionError" in finding.evidence


def test_what_needs_a_failed_check_is_incomplete():
    @sl.op("audit_engine::random")
    def random(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + torch.rand_like(x)

    findings = {f.check: f for f in audit(random, checks=["determinism", "compile"], seed=1)}
    assert findings["determinism"].verdict == "fail"
    assert findings["compile"].verdict == "incomplete"
    assert "while determinism fails" in findings["compile"].evidence


def test_an_error_of_the_call_itself_is_reported_once():
    @sl.op("audit_engine::never_empty")
    def never_empty(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    @never_empty.kernel("cpu")
    def _(x):
        if not len(x):
            raise RuntimeError("grid of 0")
        return x * 2

    findings = {f.check: f for f in audit(never_empty, checks=["edges", "fake"], seed=1)}
    assert "grid of 0" in findings["edges"].evidence
    assert findings["fake"].verdict == "incomplete"
    assert "not looked at (the call itself fails, see edges" in findings["fake"].evidence
    assert audit(never_empty, checks=["fake"], seed=1).findings[0].verdict == "fail"


def test_sl_audit_is_the_function_whatever_was_imported_before():
    code = (
        "from shiplap.audit import Finding; import shiplap.sampling.samples, shiplap as sl; assert callable(sl.audit)"
    )
    assert python("-c", code).returncode == 0


def test_audit_leaves_settings_as_they_were():
    import logging
    import warnings

    before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), logging.root.manager.disable
    filters = list(warnings.filters)
    audit(axpy, checks=["workspace", "threads"], seed=1)
    after = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), logging.root.manager.disable
    assert before == after
    assert warnings.filters == filters


def test_the_advice_after_a_death_fits_how_the_process_ended():
    """A long loop is no hang: the sizes that it takes may be bounded."""
    advice = {
        how: _fix_for_death(ChildDeath(how)) for how in ("hangs: 15 s", "deadlock: idle", "memory: 3 GiB", "exit 3")
    }
    assert 'bound the sizes, as in requires="n <= 1024"' in advice["hangs: 15 s"]
    assert "lock" in advice["deadlock: idle"]
    assert "free what a call has allocated" in advice["memory: 3 GiB"]
    assert "raise an error" in advice["exit 3"]
