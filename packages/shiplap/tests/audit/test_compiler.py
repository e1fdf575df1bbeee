"""fake, opcheck, compile: what torch.compile is told, and what it makes of it."""

from __future__ import annotations

import os

import pytest
import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

import shiplap as sl
from shiplap.audit import audit
from shiplap.audit.check import Observation
from shiplap.audit.checks import compile as compile_check
from shiplap.audit.checks.opcheck import DATA_FIX
from shiplap.sampling.samples import Samples
from shiplap.torch_private import dynamo
from tests.audit.common import SEED, look, register


@sl.op("audit_compiler::scale")
def scale(x: Float[Tensor, "n c"], a: float = 2.0) -> Float[Tensor, "n c"]:
    return x * a


@sl.op("audit_compiler::unique", bounds={"m": "n"})
def unique(x: Int32[Tensor, "n"]) -> Int32[Tensor, "m"]:
    return torch.unique(x)


# --8<-- [start:fake]
def _keeps_strides(x):
    # a transposed input gives a transposed result; the fake says contiguous
    return x * 2


register(
    "audit_compiler::stride_bug",
    "(Tensor x) -> Tensor",
    _keeps_strides,
    lambda x: x.new_empty(x.shape),
)


@sl.adopt("audit_compiler::stride_bug")
def stride_bug(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x * 2


# --8<-- [end:fake]


# --8<-- [start:compile]
register(
    "audit_compiler::pins",
    "(Tensor x) -> Tensor",
    lambda x: x * 2,
    lambda x: x.new_empty([int(s) for s in x.shape]),
)


@sl.adopt("audit_compiler::pins")
def pins(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x * 2


# --8<-- [end:compile]


register("audit_compiler::wrong_dtype", "(Tensor x) -> Tensor", lambda x: x > 0, lambda x: torch.empty_like(x))


@sl.adopt("audit_compiler::wrong_dtype")
def wrong_dtype(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return (x > 0).to(x.dtype)


# --8<-- [start:opcheck]
register(
    "audit_compiler::no_fake",
    "(Tensor x) -> Tensor",
    lambda x: torch.from_numpy(x.detach().numpy() * 2),
)


@sl.adopt("audit_compiler::no_fake")
def no_fake(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2


# --8<-- [end:opcheck]


def test_the_base_and_other_forms_are_compiled_and_other_sizes_are_not(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        compile_check, "_compare_with_eager", lambda op, case, *rest: compiled.append(case.recipe) or Observation()
    )
    samples = Samples(scale, SEED)
    forms = [samples.base, samples.base.but(layouts={"x": "transposed"}), samples.base.but(sizes={"n": 3, "c": 4})]
    for recipe in forms:
        compile_check.observe_compile(scale, samples.make(recipe))
    assert compiled == forms[:2]


def test_fake_fires():
    finding = look(stride_bug, "fake")
    assert finding.verdict == "fail"
    assert "strides" in finding.evidence
    assert "transposed" in finding.input
    assert "pins dim" in look(pins, "fake").evidence
    assert "dtype torch.bool is real, torch.float32 is promised" in look(wrong_dtype, "fake").evidence
    assert look(no_fake, "fake").verdict == "fail"


@pytest.mark.long
def test_fake_is_silent():
    assert look(scale, "fake").verdict == "ok"
    assert look(unique, "fake").verdict == "ok"


def test_opcheck_fires():
    finding = look(no_fake, "opcheck")
    assert finding.verdict == "fail"
    assert "test_faketensor" in finding.evidence


@sl.op("audit_compiler::tail")
def tail(x: Float[Tensor, "n c"], first: Int64[Tensor, ""]) -> Float[Tensor, "n c"]:
    return torch.where(torch.arange(x.shape[0])[:, None] >= first, x, 0)


@tail.samples
def _(rng, sizes, dtype, device):
    return torch.randn(sizes["n"], sizes["c"], generator=rng, dtype=dtype), torch.tensor(sizes["n"] // 2)


@tail.backward
def _(grad, saved, needs):
    result = torch.zeros_like(grad)
    result[saved.first :] = grad[saved.first :]  # no graph knows how many rows
    return {"x": result}


def test_opcheck_says_how_a_slice_by_a_value_is_written():
    finding = look(tail, "opcheck")
    assert finding.verdict == "fail"
    assert "GuardOnDataDependentSymNode" in finding.evidence
    assert finding.fix == DATA_FIX


def test_opcheck_is_silent():
    assert look(scale, "opcheck").verdict == "ok"


def test_compile_fires_on_a_result_that_is_not_as_promised():
    finding = look(stride_bug, "compile")
    assert finding.verdict == "fail"
    assert finding.reproducer


@pytest.mark.long
def test_compile_fires_on_recompilation():
    finding = look(pins, "compile")
    assert finding.verdict == "fail"


@pytest.mark.long
def test_compile_is_silent():
    finding = look(scale, "compile")
    assert finding.verdict == "ok"
    assert "0 graph breaks over 5 sizes" in finding.evidence
    assert look(unique, "compile").verdict == "ok"


def test_what_the_processor_can_is_found_out_once_for_all_children(ns, monkeypatch):
    """Inductor starts a Python process for each kind of vectors, in each process that compiles."""

    @sl.op(f"{ns}::doubled")
    def doubled(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x * 2

    asked = []
    monkeypatch.setattr(dynamo, "processor_features", lambda: asked.append(os.getpid()))
    audit(doubled, checks=["numerics"], seed=1, isolate=True)
    assert not asked
    audit(doubled, checks=["compile"], seed=1, isolate=True, budget=0)
    assert asked == [os.getpid()]
