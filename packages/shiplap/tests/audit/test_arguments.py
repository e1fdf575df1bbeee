"""arguments: wrong calls."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from tests.audit.common import look, register


@sl.op("audit_arguments::careful", mutates=("acc",), contiguous=("x",), requires=("step >= 1",))
def careful(acc: Float[Tensor, "n c"], x: Float[Tensor, "n c"], step: int = 1) -> None:
    acc += x * step


@sl.op("audit_arguments::topmost", requires=("k <= c",))
def topmost(x: Float[Tensor, "n c"], k: Literal[1, 2, 500] = 1) -> Float[Tensor, "n k"]:
    return x.topk(k, 1).values


# --8<-- [start:arguments]
def _broadcasts(x, y):
    return x * 2 + y.sum()


SCHEMA = "(Tensor x, Tensor y) -> Tensor"
register("audit_arguments::lenient", SCHEMA, _broadcasts, _broadcasts)


@sl.adopt("audit_arguments::lenient")
def lenient(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2 + (x * 0 + y).sum()


# --8<-- [end:arguments]


def _checks(x, y):
    if x.shape != y.shape or x.dim() != 1 or x.device != y.device:
        raise ValueError("x and y differ")
    return x + y


register("audit_arguments::strict", "(Tensor x, Tensor y) -> Tensor", _checks, _checks)


@sl.adopt("audit_arguments::strict")
def strict(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + y


def test_arguments_lists_what_was_refused():
    finding = look(careful, "arguments")
    assert finding.verdict == "ok", finding.evidence
    for kind in ("wrong rank", "wrong size", "wrong dtype", "wrong device", "overlapping", "wrong layout", "violated"):
        assert kind in finding.evidence


def test_arguments_breaks_a_requirement_by_a_choice_of_an_argument_with_choices():
    """Another value would be refused as no choice, before the requirement is looked at."""
    finding = look(topmost, "arguments")
    assert finding.verdict == "ok", finding.evidence
    assert "1 wrong choice, 1 violated requirement" in finding.evidence


def test_arguments_fires_when_a_check_is_missing(monkeypatch):
    """A shiplap op cannot lose its checks by accident, so they are taken away here."""
    quick = careful.plan.quick

    def without_ranks(*args):
        return quick(*[a.squeeze(0) if isinstance(a, Tensor) and a.dim() == 3 else a for a in args])

    monkeypatch.setattr(careful.plan, "quick", without_ranks)
    finding = look(careful, "arguments")
    assert finding.verdict == "fail"
    assert "was accepted" in finding.evidence


def test_arguments_fires_on_an_adopted_op_that_accepts_anything():
    finding = look(lenient, "arguments")
    assert finding.verdict == "fail"
    assert "was accepted" in finding.evidence


def test_arguments_is_silent_on_an_adopted_op_that_raises_in_its_own_words():
    assert look(strict, "arguments").verdict == "ok"


register(
    "audit_arguments::faked", "(Tensor x, Tensor y) -> Tensor", lambda x, y: x + y, lambda x, y: x.new_empty(x.shape)
)


@sl.adopt("audit_arguments::faked")
def faked(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + y


def test_what_torch_answers_with_the_fake_is_not_held_against_an_adopted_op():
    """A call with a tensor on ``meta`` reaches the fake, which looks at no device."""
    finding = look(faked, "arguments")
    assert finding.verdict == "ok", finding.evidence
