"""Findings by cause: the axis that failing samples vary, faults of the machine, and scripts that replay the history."""

from __future__ import annotations

import json
import os
import re
from itertools import count
from pathlib import Path

import pytest
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

import shiplap as sl
from shiplap.audit import Finding, audit
from shiplap.audit.causes import REQUIRES_FIX, STATE_FIX, environment_fault, group_by_cause
from shiplap.audit.checks import process
from shiplap.audit.child_process import ChildLimits
from shiplap.audit.report import Report
from shiplap.audit.small_example import _round
from shiplap.errors import error
from shiplap.render.findings import print_findings
from shiplap_testing.effort import sampled
from shiplap_testing.forked import WITH_VERBS, python
from shiplap_testing.support import fails
from tests.audit.common import SEED, look

M = Float[Tensor, "n c"]
M32 = Float32[Tensor, "n c"]


@sl.op("audit_causes::doubled")
def doubled(x: M) -> M:
    return x * 2


@doubled.kernel("cpu", strided=True)
def _(x):
    if not x.numel():
        raise RuntimeError("grid of 0")  # harmless beside the other fault
    size = x.untyped_storage().nbytes() // x.itemsize
    flat = x.as_strided((size,), (1,), 0)
    return flat[(torch.arange(x.numel()) + x.storage_offset()) % size].reshape(x.shape) * 2  # ignores strides


def test_the_axis_and_its_fix_are_named_and_an_empty_tensor_hides_nothing():
    report = audit(doubled, checks=("numerics", "edges", "schema", "fake"), seed=1)
    (edges,) = [f for f in report if f.check == "edges"]
    assert edges.verdict == "fail"
    assert "x float32(0" not in edges.input
    assert "strides" in edges.input


@sl.op("audit_causes::strided")
def strided(x: M) -> M:
    return x * 2


@strided.kernel("cpu", strided=True)
def _(x):
    size = max(1, x.untyped_storage().nbytes() // x.itemsize)
    flat = x.as_strided((size,), (1,), 0) if x.numel() else x.reshape(-1)
    return flat[(torch.arange(x.numel()) + x.storage_offset()) % size].reshape(x.shape) * 2


@pytest.mark.long
def test_checks_that_fail_for_one_layout_are_one_cause(capsys):
    report = audit(strided, checks=("numerics", "edges", "aliases", "threads"), seed=1)
    (edges,) = [f for f in report if f.check == "edges"]
    assert edges.varied == "layout"
    assert "with another layout, and no other" in edges.evidence
    assert edges.fix == "read the strides of every argument, or declare contiguous=(...)"
    also = Finding("fresh", "fail", edges.subject, "copies", varied="layout")
    both = Report(edges.subject, (also, edges), ())
    assert [[f.check for f in cause] for cause in both.causes] == [["edges", "fresh"]]
    assert both.headline == "audit_causes::strided: failed (edges and 1 more for another layout)"
    print_findings(both.findings, reports=[both])
    assert "also     fresh: copies" in capsys.readouterr().out


def test_the_most_harmful_cause_comes_first_and_an_empty_tensor_last():
    empty = Finding("edges", "fail", "a::b", "grid of 0", varied="empty, size")
    fake = Finding("fake", "fail", "a::b", "strides")
    plain = Finding("numerics", "fail", "a::b", "wrong")
    assert [cause[0] for cause in group_by_cause((empty, fake, plain))] == [plain, fake, empty]


def test_checks_that_repeat_a_wrong_value_are_its_symptoms():
    plain, other = (
        Finding("numerics", "fail", "a::b", "wrong"),
        Finding("sizes", "fail", "a::b", "wrong", varied="size"),
    )
    again = [Finding(check, "fail", "a::b", "wrong") for check in ("threads", "kernels", "compile")]
    strides = Finding("edges", "fail", "a::b", "wrong", varied="layout")
    causes = group_by_cause((strides, other, *again, plain))
    assert [[f.check for f in cause] for cause in causes] == [
        ["numerics", "sizes", "kernels", "threads", "compile"],
        ["edges"],
    ]
    assert Report("a::b", (plain, *again), ()).headline == "a::b: failed (numerics and 3 more)"
    # Where only other sizes are wrong, the repeating checks follow from these.
    causes = group_by_cause((*again, other))
    assert [[f.check for f in cause] for cause in causes] == [["sizes", "kernels", "threads", "compile"]]
    unwritten = Finding("workspace", "fail", "a::b", "fresh memory")
    assert group_by_cause((plain, unwritten, *again))[0][0] == unwritten


@pytest.mark.parametrize(
    ("wrong", "says"),
    sampled(
        [
            pytest.param(*case)
            for case in [
                (lambda x, by: x / by * x.abs().amax() / x.abs().amax(), "guard each division"),
                (lambda x, by: torch.where(x.abs() < 1e-30, 0.0, x / by), "compute with numbers as small as these"),
                (lambda x, by: torch.where(x.isnan(), 0.0, x / by), "propagate NaN"),
                (lambda x, by: x / 2, "compute with the value of the scalar"),
            ]
        ],
        2,
    ),
)
def test_the_fix_fits_the_values_that_fail(ns, wrong, says):
    @sl.op(f"{ns}::divided")
    def divided(x: Float32[Tensor, "n"], by: float = 2.0) -> Float32[Tensor, "n"]:
        return x / by

    divided.kernel("cpu", lambda x, by: wrong(x, by) if len(x) else x / by)
    report = audit(divided, checks=("numerics", "special"), seed=1)
    first = report.causes[0][0]
    assert says in first.fix, first
    assert ("with another by than" in first.evidence) == ("scalar" in says)


@sl.op("audit_causes::capped")
def capped(x: Float32[Tensor, "n"], cap: float = 2.0) -> Float32[Tensor, "n"]:
    return x / cap


@capped.kernel("cpu")
def _(x, cap):
    return x / cap if cap else torch.zeros_like(x)


def test_a_scalar_at_which_the_reference_is_not_finite_asks_for_requires():
    finding = look(capped, "special")
    assert finding.verdict == "fail"
    assert finding.fix == REQUIRES_FIX


@sl.op("audit_causes::paired")
def paired(x: Float32[Tensor, "n"], y: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    return x + y


@paired.samples
def _(rng, sizes, dtype, device):
    return torch.randn(sizes["n"], generator=rng)  # one of two


def test_a_builder_that_returns_too_little_is_named_and_no_kernel_is_blamed():
    with fails("SL502", got="SL123 the sample builder returns other values than the op takes: Tensor"):
        look(paired, "numerics")


def test_a_kernel_that_refuses_generated_integers_is_told_of_a_builder(ns):
    """The reference takes a row of an empty tensor, as torch's index_add does, and such a row is generated."""

    @sl.op(f"{ns}::added", mutates="x")
    def added(x: M32, rows: Int64[Tensor, "m"]) -> None:
        x.index_add_(0, rows, torch.ones(len(rows), x.shape[1]))

    @added.kernel("cpu")
    def _(x, rows):
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(x):
            raise error("SL211", where=f"{ns}::added", got="a row that is not in x")
        x.index_add_(0, rows, torch.ones(len(rows), x.shape[1]))

    finding = look(added, "edges")
    assert (finding.verdict, "declare @op.samples" in finding.fix) == ("fail", True)
    assert "a row that is not in x, expected" not in finding.evidence

    @added.samples
    def _(rng, sizes, dtype, device):
        n, m = sizes["n"], sizes["m"] * (sizes["n"] > 0)
        return torch.randn(n, sizes["c"], generator=rng), torch.randint(0, max(n, 1), (m,), generator=rng)

    assert look(added, "edges").verdict == "ok"


def test_a_finding_has_a_small_example_with_round_numbers(ns):
    @sl.op(f"{ns}::running")
    def running(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n c"]:
        return x.cumsum(1)

    running.kernel("cpu", lambda x: x.cumsum(1) - x)
    (finding,) = audit(running, checks=["numerics"], seed=SEED, isolate=False)
    found = re.fullmatch(r"for x=(\[.*\]): result (\[.*\]), expected (\[.*\])", finding.example)
    assert found, finding.example
    x, got, wanted = (torch.tensor(json.loads(text)) for text in found.groups())
    assert x.shape == (2, 2)
    assert torch.equal(wanted, x.cumsum(1))
    assert torch.equal(got, x.cumsum(1) - x)
    assert f"e.g.   {finding.example}" in Report("op", (finding,), ("numerics",)).rows[0].details


def test_a_wrong_gradient_has_a_small_example(ns):
    @sl.op(f"{ns}::halved")
    def halved(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x / 2

    halved.backward(lambda grad, saved, needs: {"x": grad.flip(0) / 2})
    (finding,) = audit(halved, checks=["gradient"], seed=SEED, isolate=False)
    assert "and the gradient [1, 2] of the result: d/dx [1, 0.5], expected [0.5, 1]" in finding.example


def test_round_numbers_of_a_tensor_whose_elements_share_memory():
    """A write to such a tensor raises an error, which the audit took for a fault of its own."""
    rows = torch.tensor([[0.2, -1.4, 9.0]])
    rounded = _round(rows.expand(4, 3))
    assert rounded.stride() == (0, 1)
    assert rounded.tolist() == [[0.0, -3.0, 4.0]] * 4
    assert rows.tolist() == torch.tensor([[0.2, -1.4, 9.0]]).tolist()
    overlapping = torch.arange(4.0).as_strided((3, 2), (1, 1))
    assert _round(overlapping).tolist() == [[0.0, 2.0], [2.0, 4.0], [4.0, 4.0]]


def test_a_finding_on_an_expanded_tensor_has_a_small_example(ns):
    @sl.op(f"{ns}::running", contiguous=())
    def running(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n c"]:
        return x + 1

    @running.kernel("cpu", strided=True)
    def _(x):
        return x + (2 if x.stride() and 0 in x.stride() and x.numel() > 1 else 1)

    (finding,) = audit(running, checks=["edges"], seed=SEED, isolate=False)
    assert finding.verdict == "fail"
    assert "the auditor is wrong" not in finding.fix
    assert finding.example.startswith("for x=["), finding


KEPT: dict[tuple[int, ...], Tensor] = {}


@sl.op("audit_causes::kept")
def kept(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    return x + 1


@kept.kernel("cpu")
def _(x):
    made = KEPT.setdefault(tuple(x.shape), x + 1)  # the first result of each size
    return made.clone()


CALLS: list[int] = []


@sl.op("audit_causes::counted")
def counted(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    return x + 1


@counted.kernel("cpu")
def _(x):
    CALLS.append(len(x))
    return x + len(CALLS)  # the first call is right, which an audit makes before its checks


@pytest.mark.parametrize("op", [kept, counted], ids=lambda op: op.spec.name)
def test_a_script_of_a_fault_that_depends_on_earlier_calls_repeats_them(tmp_path: Path, op: sl.Op):
    # isolate=True: a torch for CUDA may have no fork that can differentiate, by what ran in this process before.
    (finding,) = audit(op, checks=("numerics",), seed=SEED, isolate=True)
    assert finding.verdict == "fail"
    assert "the sample alone shows nothing" in finding.evidence
    assert finding.fix == STATE_FIX
    script = tmp_path / "reproducer.py"
    script.write_text(finding.reproducer)
    ran = python(script, env={**os.environ, "PATH": ""}, imported=WITH_VERBS)
    assert ran.returncode == 1, ran.stderr
    assert "nothing found" not in ran.stdout


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (
            "raised NotImplementedError: Could not run 'a::b' with arguments from the 'CPU' backend.",
            "no kernel for CPU",
        ),
        ("raised InvalidCxxCompiler: No working C++ compiler found in ...", "install one (c++, g++ or clang++)"),
        ("raised RuntimeError: Failed to find C compiler. Please specify via CC", "Triton needs"),
        ("[0] = 1, expected 2", ""),
    ],
)
def test_faults_of_the_machine_are_told_from_those_of_the_op(text: str, advice: str):
    assert advice in environment_fault(text)
    assert bool(environment_fault(text)) == bool(advice)


torch.library.define("audit_causes::elsewhere", "(Tensor x) -> Tensor")
torch.library.impl("audit_causes::elsewhere", "CUDA", lambda x: x + 1)
torch.library.register_fake("audit_causes::elsewhere", lambda x: torch.empty_like(x))


@sl.adopt("audit_causes::elsewhere", autocast=None)
def elsewhere(x: M) -> M:
    return x + 1


def test_an_op_without_a_kernel_for_the_device_is_incomplete():
    report = audit(elsewhere, checks=("numerics", "edges"), seed=1)
    assert report.verdict == "incomplete"
    assert "the op has no kernel for CPU: audit it with device=" in report.headline


@sl.op("audit_causes::slow")
def slow(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    while x.shape[0] == 16:
        x.sum()
    return x + 1


@slow.kernel("cpu")
def _(x):
    return x + 1


def test_a_slow_reference_is_no_hang_of_the_op():
    report = audit(slow, checks=("edges",), seed=1, limits=ChildLimits(busy_s=1.0), isolate=True)
    assert report.verdict == "incomplete"
    assert "the reference takes too long for this sample (1 s of processor time" in report.headline


@sl.op("audit_causes::row_lse", requires=("c >= 1",))
def row_lse(x: Float[Tensor, "n c"]) -> Float32[Tensor, "n"]:
    return torch.logsumexp(x, 1).float()


@row_lse.backward(saves=("x",))
def _(grad, saved, needs):
    return {"x": torch.softmax(saved.x, 1) * grad[:, None].to(saved.x.dtype)}


@pytest.mark.long
def test_results_in_a_fixed_dtype_have_no_finite_differences():
    finding = look(row_lse, "gradient")
    assert "finite differences: " not in finding.evidence
    assert finding.verdict == "ok", finding.evidence


def test_a_round_that_leaves_objects_itself_is_no_leak(monkeypatch):
    counted = iter(range(10_000))
    calls = [0]

    def leaking():
        calls[0] += 1

    # 40 objects of each measurement, whatever the number of calls.
    monkeypatch.setattr(process, "_memory_in_use", lambda: (40.0 * next(counted), 0.0))
    assert process._observe_leaks("a call", leaking).problem == ""
    monkeypatch.setattr(process, "_memory_in_use", lambda: (40.0 * next(counted) + calls[0], 0.0))
    assert "Python objects behind" in process._observe_leaks("a call", leaking).problem
    # A cache that is full after some hundred calls.
    calls[0] = 0
    monkeypatch.setattr(process, "_memory_in_use", lambda: (min(calls[0], 400.0), 0.0))
    assert process._observe_leaks("a call", leaking).problem == ""


def test_a_leak_of_objects_is_found_and_the_line_is_named():
    kept = []
    found = process._observe_leaks("a call", lambda: kept.append([object() for _ in range(4)]))
    first = test_a_leak_of_objects_is_found_and_the_line_is_named.__code__.co_firstlineno
    assert re.search(
        rf"leaves \d+ Python objects behind, .*; \d+ of them are made at test_causes.py:{first + 2}$", found.problem
    )


def test_names_in_the_cache_of_type_attributes_are_no_leak():
    names = (f"absent{number}" for number in count())
    objects, _ = process._measure_growth(lambda: getattr(int, next(names), None), 200)
    assert objects < 20


@sl.op("audit_causes::grid")
def grid(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    return x + torch.arange(len(x), device=x.device).float() / 4


@grid.kernel("cpu")
def _(x):
    return x + torch.tensor(0.25) * torch.arange(len(x))


def test_a_kernel_that_fails_with_another_default_dtype_is_told_so():
    finding = look(grid, "process")
    assert finding.verdict == "fail"
    assert "a call fails where the default dtype is torch.float64: SL301" in finding.evidence
    assert finding.fix == process.SETTING_FIX
