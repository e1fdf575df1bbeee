"""The steps of a call as C++. The conditions, their order and the error texts are the same as in Python."""

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
    """The error which says that a step of a call plan, such as a check, cannot be written in C++. Its message names the
    step.
    """


def step_statements(steps: Iterable[Step]) -> list[str]:
    """Return the C++ statements of ``steps``, which are checks, allocations and copies of a call plan, in order. Raise
    ``NoCppForm`` if C++ cannot express a step.
    """
    return [line for step in steps for line in _statements_of_step(step)]


def _statements_of_step(step: Step) -> list[str]:
    """Return the C++ statements of one step of a call plan, such as a check. Raise ``NoCppForm`` if the step cannot be
    written in C++, as for a step that runs for each member of a list.
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
    """Return the lines ``text`` as a list, each indented by two spaces."""
    return [f"  {line}" for line in text]


def _require_cpp(cpp: str) -> str:
    """Return ``cpp``, a C++ expression. Raise ``NoCppForm`` if it is empty, since only Python can compute such an
    expression.
    """
    # A step without a C++ form has an empty text, so that Python can still run it.
    if not cpp:
        raise NoCppForm("an expression or a dim that C++ cannot compute")
    return cpp


def rule_check(rule: ArgumentRule) -> list[str]:
    """Return a list with the C++ statement that raises the error of ``rule``, a check of an argument, if a call
    violates it. Return an empty list if the condition of the rule is always true in C++. Raise ``NoCppForm`` if only
    Python can check the rule.
    """
    # A condition that is always true would only cost time in each call.
    return (
        []
        if rule.condition.cpp == TRUE.cpp
        else [f"if (!({rule_condition(rule)})) [[unlikely]] {refuse_statement(rule)}"]
    )


def rule_condition(rule: ArgumentRule) -> str:
    """Return the C++ condition of ``rule``, a check of an argument, which is true for valid calls. Raise ``NoCppForm``
    if only Python can check the rule.
    """
    return _require_cpp(rule.condition.cpp)


def refuse_statement(rule: ArgumentRule) -> str:
    """Return the C++ statement that raises the error of ``rule``, a check of an argument. Values of the call are
    inserted into the error's texts at run time. Raise ``NoCppForm`` if only Python can compute one of these values.
    """
    texts = (rule.where, rule.got, rule.expected)
    messages = ", ".join(quote_cpp(braced_text(text)) for text in texts)
    values = ", ".join(_require_cpp(part.shown[1]) for text in texts for part in text if isinstance(part, Expression))
    id, title, fix = map(quote_cpp, (rule.id, rule.error_title, rule.error_fix))
    if rule.fix_of_one:
        fix = f"{rule.cpp_is_one} ? {quote_cpp(rule.fix_of_one)} : {fix}"
    return f"refuse({id}, {title}, {messages}, {fix}, {{{values}}});"


def braced_text(text: Text) -> str:
    """Return a text of an error as one format string, such as ``n = {}``. ``{}`` stands for each value that is known
    only at run time. Opening braces of the constant parts are doubled.
    """
    return "".join(part.replace("{", "{{") if isinstance(part, str) else "{}" for part in text)


def _constant_text(text: Text) -> str:
    """Return ``text``, the parts of an error's text, as one string. Raise ``NoCppForm`` if a part is known only at run
    time.
    """
    if not all(isinstance(p, str) for p in text):
        raise NoCppForm("a label that is only known at run time")
    return "".join(p for p in text if isinstance(p, str))
