"""Every rule has its three forms: a condition in Python, one in C++ or who sees to it there, and what an error says."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from jaxtyping import Float, Float32, Int32, Shaped
from torch import Tensor

import shiplap as sl
from shiplap.codegen import tvm_ffi
from shiplap.codegen.plan import refuse_statement, rule_check, step_statements
from shiplap.plan import CallPlan, call_plan, rules
from shiplap.plan.expression import Expression
from shiplap.plan.rule import TRUE, ArgumentRule, format_template
from shiplap.plan.steps import CheckStep, EachStep, EvaluateStep, MeetStep, PresentStep, Step
from tests.test_plan import plan_of


def conv(
    x: Float[Tensor, "n 4 *rest"],
    table: Int32[Tensor, "k n//2"],
    bias: Float[Tensor, "#k"] | None,
    taps: list[int],
    mode: str,
    way: Literal["up", "down"],
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
            case MeetStep(rules=checked):
                yield from checked
            case PresentStep(steps=inner) | EachStep(steps=inner):
                yield from rules_in(inner)


def every_rule(plan: CallPlan) -> Iterator[ArgumentRule]:
    outputs = plan.outputs
    blocks = plan.arguments, plan.sharing, outputs.bounds, outputs.measured, outputs.fitting, outputs.disjoint
    for block in (*blocks, outputs.scratch, outputs.room):
        yield from rules_in(block)
    yield from plan.kinds
    yield outputs.no_gradient
    yield rules.size_is_within_bound("plan::op, kernel f", "m", "n * 2")
    yield from rules_in(
        tuple(tvm_ffi.narrowed_steps(plan.spec, "f", dtypes=("float32",), strided=frozenset(), align=16))
    )


MAKERS = {
    name: make
    for name, make in inspect.getmembers(rules, inspect.isfunction)
    if make.__module__ == rules.__name__
    and inspect.signature(make).return_annotation in ("ArgumentRule", "tuple[ArgumentRule, ArgumentRule]")
}


def made_rules() -> dict[str, ArgumentRule]:
    """Return one rule of each function of ``rules``, as the plans make it."""
    made: dict[str, ArgumentRule] = {}

    def record(name, make):
        def called(*args, **kwargs):
            result = make(*args, **kwargs)
            for number, rule in enumerate(result if isinstance(result, tuple) else (result,)):
                made[f"{name} {number}" if isinstance(result, tuple) else name] = rule
            return result

        return called

    with pytest.MonkeyPatch.context() as patch:
        for module in (rules, tvm_ffi, call_plan):
            for name, make in MAKERS.items():
                if hasattr(module, name):
                    patch.setattr(module, name, record(name, make))
        for plan in reversed(PLANS):  # the rules of the first one, which has C++, stay
            list(every_rule(CallPlan(plan.spec)))
    return made


RULES = made_rules()


def test_all_rules_are_here():
    assert len(MAKERS) > 20
    assert {name.partition(" ")[0] for name in RULES} == MAKERS.keys()


@pytest.mark.parametrize("name", RULES)
def test_a_rule_has_three_forms(name):
    rule = RULES[name]
    assert MAKERS[name.partition(" ")[0]].__doc__
    assert rule.error_title
    assert rule.error_fix, "every error names one fix"
    ast.parse(rule.condition.python, mode="eval")
    for text in (rule.where, rule.got, rule.expected):
        assert text
        ast.parse(format_template(text), mode="eval")
    if rule.cpp_by:
        assert rule.condition.cpp == TRUE.cpp, "one of the two: a condition in C++, or code that checks the rule there"
        assert rule_check(rule) == []
    else:
        (line,) = rule_check(rule)
        assert line.startswith("if (!(")
        assert refuse_statement(rule) in line
        assert f'refuse("{rule.id}", ' in line


def test_what_cpp_leaves_to_python_it_hands_over():
    """Whoever is named as seeing to a rule is the dispatcher, or Python; and Python is asked."""
    deferring = {name for name, rule in RULES.items() if rule.deferral}
    assert deferring == {"is_tensor", "is_outside_autograd", "out_has_no_gradient"}
    assert all(bool(rule.undecided) == bool(rule.deferral) for rule in RULES.values())


def test_a_rule_explains_itself():
    """Out of line too, where there is no generated function."""
    rule = rules.size_is_within_bound("op, kernel f", "m", "n * 2")
    rule.check_call({"extent_m": 3, "d_m": 4})
    with pytest.raises(
        Exception, match=r"SL302.*\n  where    op, kernel f\n  got      m = 5\n  expected m <= n \* 2 = 4"
    ):
        rule.check_call({"extent_m": 5, "d_m": 4})


def test_a_new_rule_is_one_function(monkeypatch):
    """What follows from an argument alone is one function in one file: Python, C++ and errors have it at once."""

    def has_few_dims(at) -> ArgumentRule:
        """C ABI views have eight dims."""
        condition = Expression(f"{at.rank.python} <= 8", f"{at.rank.cpp} <= 8")
        return ArgumentRule("SL201", condition, at.where, (at.rank, " dims"), ("at most 8 dims",), at.arg)

    known = rules.argument_rules
    monkeypatch.setattr(rules, "argument_rules", lambda at, arg: [*known(at, arg), has_few_dims(at)])

    def anything(x: Shaped[Tensor, "..."]) -> Shaped[Tensor, ""]: ...

    plan = plan_of(anything)
    for bind in (plan.quick, plan.careful):
        with pytest.raises(Exception, match=r"SL201(.|\n)*argument 'x'\n  got      9 dims\n  expected at most 8 dims"):
            bind(torch.zeros([1] * 9))
    printed = "\n".join(step_statements(plan.arguments))
    assert "if (!(rank_x <= 8)) [[unlikely]] refuse(" in printed
    assert '"{} dims", "at most 8 dims"' in printed
    assert "{rank_x});" in printed
