"""The steps of a call as C++: the same conditions in the same order, and the same error texts, as in Python."""

from __future__ import annotations

from collections.abc import Iterable

from shiplap.declare.cpp_expression import quote_cpp
from shiplap.plan.expression import Expression, Text
from shiplap.plan.rule import TRUE, ArgumentRule
from shiplap.plan.steps import (
    AllocateStep,
    CheckStep,
    EachStep,
    EvaluateStep,
    LetStep,
    MeetStep,
    PackStep,
    PresentStep,
    Step,
    UnsetStep,
)


class NoCppForm(ValueError):
    """Raised for a step that has no C++ form, which the text names."""


def step_statements(steps: Iterable[Step]) -> list[str]:
    """Return the C++ statements of the steps of a call plan, in order. Raises NoCppForm for a step that C++ cannot
    express.
    """
    return [line for step in steps for line in _statements_of_step(step)]


def _statements_of_step(step: Step) -> list[str]:
    """Return the C++ statements of one plan step. Raises NoCppForm where the step has no C++ form, such as one for each
    member of a list.
    """
    match step:
        case UnsetStep(variable, type):
            return [f"{type.cpp} {variable} = {type.unset};", f'[[maybe_unused]] const char* from_{variable} = "";']
        case LetStep(variable, type, term):
            return [f"[[maybe_unused]] const {type.cpp.removeprefix('const ')} {variable} = {_require_cpp(term.cpp)};"]
        case EvaluateStep(variable, type, _, term, rule):
            tried = f"try {{ {variable} = {_require_cpp(term.cpp)}; }}"
            return [f"{type.cpp} {variable};", f"{tried} catch (const NoValue& why) {{ {refuse_statement(rule)} }}"]
        case CheckStep(rule):
            return rule_check(rule)
        case MeetStep(variable, type, term, origin, rules):
            first = f"{variable} = {_require_cpp(term.cpp)}; from_{variable} = {quote_cpp(_constant_text(origin))};"
            # The first tensor with a dim sets its size, and each later one is compared with it.
            others = [line for rule in rules for line in rule_check(rule)]
            return [f"if ({type.is_unset(variable)}) {{ {first} }} else {{", *_indent_lines(others), "}"]
        case AllocateStep(at, sizes, dtype):
            return [f"Tensor {at.tensor.cpp} = empty({_require_cpp(sizes.cpp)}, {dtype.cpp}, device);"]
        case PackStep(at, strided, align):
            packed = f"pack({at.tensor.cpp}, {str(strided).lower()}, {align})"
            return [f"[[maybe_unused]] const Tensor original_{at.arg} = {packed};"]
        case PresentStep(at, steps):
            return [f"if ({at.tensor.cpp}) {{", *_indent_lines(step_statements(steps)), "}"]
        # Native code has no loop over a list's members.
        case EachStep(at, _):
            raise NoCppForm(f"the list {at.arg!r}")


def _indent_lines(text: Iterable[str]) -> list[str]:
    """Return each line indented by two spaces."""
    return [f"  {line}" for line in text]


def _require_cpp(cpp: str) -> str:
    """Return ``cpp``, a C++ expression. Raises NoCppForm if it is empty, which marks an expression that only Python can
    compute.
    """
    # A step without a C++ form has an empty text, so that Python can still run it.
    if not cpp:
        raise NoCppForm("an expression or a dim that C++ cannot compute")
    return cpp


def rule_check(rule: ArgumentRule) -> list[str]:
    """Return the C++ statement, as a list, that refuses a call which breaks ``rule``. Empty for a rule whose condition
    is always true in C++.
    """
    # A condition that is always true would only cost time in each call.
    return (
        []
        if rule.condition.cpp == TRUE.cpp
        else [f"if (!({rule_condition(rule)})) [[unlikely]] {refuse_statement(rule)}"]
    )


def rule_condition(rule: ArgumentRule) -> str:
    """Return the C++ condition of a rule, which is true for valid calls. Raises NoCppForm for a rule that only Python
    can check.
    """
    return _require_cpp(rule.condition.cpp)


def refuse_statement(rule: ArgumentRule) -> str:
    """Return the C++ statement that raises the catalogue error of ``rule``, with the values of the call put into its
    texts.
    """
    texts = (rule.where, rule.got, rule.expected)
    messages = ", ".join(quote_cpp(braced_text(text)) for text in texts)
    values = ", ".join(_require_cpp(part.shown[1]) for text in texts for part in text if isinstance(part, Expression))
    id, title, fix = map(quote_cpp, (rule.id, rule.error_title, rule.error_fix))
    return f"refuse({id}, {title}, {messages}, {fix}, {{{values}}});"


def braced_text(text: Text) -> str:
    """Return a text in which ``{}`` stands for each run-time value, such as ``n = {}``, and braces of the constant
    parts are doubled.
    """
    return "".join(part.replace("{", "{{") if isinstance(part, str) else "{}" for part in text)


def _constant_text(text: Text) -> str:
    """Return a text of constant parts joined. Raises NoCppForm if a part is only known at run time."""
    if not all(isinstance(p, str) for p in text):
        raise NoCppForm("a label that is only known at run time")
    return "".join(p for p in text if isinstance(p, str))
