"""Every rule has its three forms: a condition in Python, one in C++ or who sees to it there, and what an error says."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import torch
from jaxtyping import Float, Float32, Int32, Shaped
from torch import Tensor

import shiplap as sl
from shiplap.codegen.plan import refuse_statement, rule_check, step_statements
from shiplap.codegen.tvm_ffi import narrowed_steps
from shiplap.plan import CallPlan
from shiplap.plan.expression import Expression
from shiplap.plan.rule import TRUE, ArgumentRule, format_template
from shiplap.plan.rules.outputs import WithinBound
from shiplap.plan.steps import CheckStep, EachStep, EvaluateStep, MeetStep, PresentStep, Step
from tests.test_plan import plan_of


def conv(
    x: Float[Tensor, "n 4 *rest"],
    table: Int32[Tensor, "k n//2"],
    bias: Float[Tensor, "#k"] | None,
    taps: list[int],
    mode: str,
) -> tuple[Float[Tensor, "n k-1"], Float32[Tensor, "3"]]: ...


class Held(sl.Opaque):
    """An object."""


def held(handle: Held, x: Float[Tensor, "n"]) -> Float[Tensor, "n"]: ...


def many(xs: list[Shaped[Tensor, "*b n"]], y: Shaped[Tensor, "..."]) -> Shaped[Tensor, "n"]: ...


PLANS = [
    plan_of(conv, dims={"k": "prod(taps)"}, requires=("taps[0] > 1",), mutates=("x",), contiguous=("table",)),
    plan_of(many),
    plan_of(many, mutates=("xs",)),
    plan_of(held),
]


def rules_in(steps: tuple[Step, ...]) -> Iterator[ArgumentRule]:
    for step in steps:
        match step:
            case CheckStep(rule) | EvaluateStep(rule=rule):
                yield rule
            case MeetStep(rules=rules):
                yield from rules
            case PresentStep(steps=inner) | EachStep(steps=inner):
                yield from rules_in(inner)


def every_rule(plan: CallPlan) -> Iterator[ArgumentRule]:
    outputs = plan.outputs
    blocks = plan.arguments, plan.sharing, outputs.bounds, outputs.measured, outputs.fitting, outputs.disjoint
    for block in (*blocks, outputs.scratch, outputs.room):
        yield from rules_in(block)
    yield from plan.kinds
    yield outputs.no_gradient
    yield WithinBound("plan::op, kernel f", "m", "n * 2")
    yield from rules_in(tuple(narrowed_steps(plan.spec, "f", dtypes=("float32",), strided=frozenset(), align=16)))


RULES = {type(rule): rule for plan in reversed(PLANS) for rule in every_rule(plan)}


def concrete(kind: type[ArgumentRule]) -> Iterator[type[ArgumentRule]]:
    for sub in kind.__subclasses__():
        yield from concrete(sub)
        if not sub.__abstractmethods__ and sub.__module__.startswith("shiplap"):
            yield sub


def test_all_rules_are_here():
    assert set(concrete(ArgumentRule)) == RULES.keys()


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_a_rule_has_three_forms(kind):
    rule = RULES[kind]
    assert rule.__doc__
    assert rule.what
    assert rule.remedy, "every error names one fix"
    ast.parse(rule.holds().python, mode="eval")
    for text in (rule.where(), rule.got(), rule.expected()):
        assert text
        ast.parse(format_template(text), mode="eval")
    if rule.cpp_by:
        assert rule.holds().cpp == TRUE.cpp, "one of the two: a condition in C++, or somebody who sees to it"
        assert rule_check(rule) == []
    else:
        (line,) = rule_check(rule)
        assert line.startswith("if (!(")
        assert refuse_statement(rule) in line
        assert f'refuse("{rule.id}", ' in line


def test_what_cpp_leaves_to_python_it_hands_over():
    """Whoever is named as seeing to a rule is the dispatcher, or Python; and Python is asked."""
    deferring = {kind.__name__ for kind, rule in RULES.items() if rule.defers(0)}
    assert deferring == {"IsTensor", "OutsideAutograd", "NoGradient"}
    assert all(bool(rule.undecided) == bool(rule.defers(0)) for rule in RULES.values())


def test_a_rule_explains_itself():
    """Out of line too, where there is no generated function."""
    rule = WithinBound("op, kernel f", "m", "n * 2")
    rule.hold({"extent_m": 3, "d_m": 4})
    with pytest.raises(
        Exception, match=r"SL302.*\n  where    op, kernel f\n  got      m = 5\n  expected m <= n \* 2 = 4"
    ):
        rule.hold({"extent_m": 5, "d_m": 4})


def test_a_new_rule_is_one_class(monkeypatch):
    """What follows from an argument alone is one class in one file: Python, C++ and errors have it at once."""
    from dataclasses import dataclass

    from shiplap.plan.rules import tensors

    @dataclass(frozen=True)
    class FewDims(tensors.OfTensor):
        """C ABI views have eight dims."""

        id = "SL201"

        def holds(self) -> Expression:
            return Expression(f"{self.at.rank.python} <= 8", f"{self.at.rank.cpp} <= 8")

        def got(self):
            return (self.at.rank, " dims")

        def expected(self):
            return ("at most 8 dims",)

    known = tensors.argument_rules
    monkeypatch.setattr(tensors, "argument_rules", lambda at, arg: [*known(at, arg), FewDims(at)])

    def anything(x: Shaped[Tensor, "..."]) -> Shaped[Tensor, ""]: ...

    plan = plan_of(anything)
    for bind in (plan.quick, plan.careful):
        with pytest.raises(Exception, match=r"SL201(.|\n)*argument 'x'\n  got      9 dims\n  expected at most 8 dims"):
            bind(torch.zeros([1] * 9))
    printed = "\n".join(step_statements(plan.arguments))
    assert "if (!(rank_x <= 8)) [[unlikely]] refuse(" in printed
    assert '"{} dims", "at most 8 dims"' in printed
    assert "{rank_x});" in printed
