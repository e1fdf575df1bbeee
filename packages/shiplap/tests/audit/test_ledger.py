"""The ledger of an audit: what no sample reached makes the verdict incomplete, and axes are tried side by side."""

from __future__ import annotations

import json

import pytest
import torch
from jaxtyping import Float, Float32
from torch import Tensor

import shiplap as sl
from shiplap.audit import CHECKS, Report, Samples, audit
from shiplap.audit.checks import load_check
from shiplap.render.findings import findings_html, findings_json, print_findings
from shiplap.sampling.ledger import AUDIT, OBLIGATIONS
from tests.audit.common import look, register

M = Float[Tensor, "n c"]


@sl.op("audit_ledger::scaled")
def scaled(x: Float[Tensor, "*b c"], w: Float[Tensor, "c"]) -> Float[Tensor, "*b c"]:
    return x * w


@scaled.backward(saves=("x", "w"))
def _(grad, saved, needs):
    summed = grad * saved.x
    while summed.dim() > 2:  # the fault: it reads the first of several batches
        summed = summed[0]
    return {"x": grad * saved.w, "w": summed.sum(0) if summed.dim() == 2 else summed}


def test_checks_of_the_table_exist_and_observe_what_it_says():
    for (_, obligation), name in AUDIT.items():
        assert obligation in load_check(name).obligations, name
    for name in CHECKS:
        assert set(load_check(name).obligations) <= set(OBLIGATIONS)


def test_the_rank_is_varied_in_the_gradient():
    finding = look(scaled, "gradient")
    assert finding.verdict == "fail"
    assert "d/dw" in finding.evidence


def test_a_cell_that_no_sample_reaches_makes_the_verdict_incomplete(monkeypatch):
    monkeypatch.setattr(Samples, "ranks", lambda self: iter(()))
    monkeypatch.setattr(Samples, "edges", lambda self: iter(()))
    report = audit(scaled, checks=["gradient"], seed=1)
    assert report.verdict == "incomplete"
    assert "rank x gradient is untouched: no sample varied the rank" in report.headline


def test_the_table_is_shown_in_each_form(capsys):
    report = audit(scaled, checks=["edges"], seed=1)
    print_findings(report.findings, reports=[report])
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if line[:4] in ("size", "rank", "layo")] == [
        "size",
        "rank",
        "layout",
    ]
    cells = json.loads(findings_json(report.findings, {}, reports=[report]))["verdicts"][scaled.spec.name]["ledger"]
    rank = next(c for c in cells if (c["axis"], c["obligation"]) == ("rank", "value"))
    assert (rank["state"], rank["looked_by"]) == ("covered", "edges")
    assert rank["samples"] >= 2
    assert "required and untouched" in findings_html(report.findings, {}, reports=[report])


def test_checks_that_do_not_apply_are_not_counted():
    names = ("numerics", "edges", "fresh", "schema", "stateless", "c_abi", "bound", "distribution")
    report = audit(scaled, checks=names, seed=1)
    assert report.headline == (
        "audit_ledger::scaled: proven by 4 checks; only the reference ran, since the op has no kernel for cpu"
    )


register(
    "audit_ledger::halved_square",
    "(Tensor x) -> Tensor",
    lambda x: 0.5 * (x * x).sum(),
    lambda x: x.new_empty(()),
)
torch.library.register_autograd(
    "audit_ledger::halved_square",
    lambda ctx, grad: ctx.saved_tensors[0] if bool((grad == 1).all()) else grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@sl.adopt("audit_ledger::halved_square", autocast=None)
def halved_square(x: M) -> Float[Tensor, ""]:
    return 0.5 * (x * x).sum()


def test_a_gradient_that_is_memory_of_an_input_is_a_fault():
    finding = look(halved_square, "backward")
    assert finding.verdict == "fail"
    assert "the gradient of x shares the memory of the input x" in finding.evidence


def _reads_from_the_start(grad: Tensor) -> Tensor:
    """Read a gradient as if it began where its storage begins."""
    return grad.as_strided(grad.shape, grad.stride(), 0).clone()


register("audit_ledger::twice", "(Tensor x) -> Tensor", lambda x: (x * 2).contiguous(), lambda x: x.new_empty(x.shape))
torch.library.register_autograd("audit_ledger::twice", lambda ctx, grad: _reads_from_the_start(grad) * 2)


@sl.adopt("audit_ledger::twice", autocast=None)
def twice(x: M) -> M:
    return x * 2


@pytest.mark.long
def test_a_gradient_that_begins_inside_of_its_storage_is_tried():
    finding = look(twice, "gradient")
    assert finding.verdict == "fail"
    assert "offset gradient of the output" in finding.evidence or "padded gradient" in finding.evidence


register(
    "audit_ledger::padded",
    "(Tensor x) -> Tensor",
    lambda x: (x * 2).contiguous(),
    lambda x: x.new_empty((x.shape[0], 1024 if x.shape[1] > 1024 else x.shape[1])),
)


@sl.adopt("audit_ledger::padded", autocast=None)
def padded(x: M) -> M:
    return x * 2


def test_the_fake_is_called_at_large_sizes():
    finding = look(padded, "fake")
    assert finding.verdict == "fail"
    assert "1025" in finding.evidence


register(
    "audit_ledger::leaky",
    "(Tensor x, float slope=0.1) -> Tensor",
    lambda x, slope=0.1: torch.where(x > 0, x, x * slope),
    lambda x, slope=0.1: x.new_empty(x.shape),
)


@sl.adopt("audit_ledger::leaky", autocast=None)
def leaky(x: M, slope: float = 0.2) -> M:
    return torch.where(x > 0, x, x * slope)


def test_a_default_of_an_adopted_op_that_differs_is_a_fault():
    finding = look(leaky, "schema")
    assert finding.verdict == "fail"
    assert "slope is 0.1 by default" in finding.evidence
    assert "declared 0.2" in finding.evidence


@sl.op("audit_ledger::noise", random="seed")
def noise(x: Float32[Tensor, "n"], seed: int = 0) -> Float32[Tensor, "n"]:
    mixed = seed + (seed >> 32) * 7919  # torch's generator of the CPU has 32 bits
    return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(mixed))


@noise.kernel("cpu")
def _(x, seed):
    return x + torch.rand(x.shape, generator=torch.Generator().manual_seed(seed & 0xFFFFFFFF))


def test_the_high_half_of_a_seed_is_tried():
    finding = look(noise, "distribution")
    assert finding.verdict == "fail"
    assert "seeds that are 4294967296 apart" in finding.evidence


def test_a_report_without_a_record_has_no_ledger():
    assert Report("lib::op", (), ()).ledger == ()
    with pytest.raises(Exception, match="SL504"):
        assert Report("lib::op", (), ())
