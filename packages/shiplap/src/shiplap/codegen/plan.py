"""The steps of a call as C++: the same conditions in the same order, and the same error texts, as in Python."""

from __future__ import annotations

from collections.abc import Iterable

from shiplap.declare.cpp_expression import quote
from shiplap.plan.expression import Term, Text
from shiplap.plan.rule import TRUE, Rule
from shiplap.plan.steps import Allocate, Check, Each, Evaluate, Let, Meet, Pack, Present, Step, Unset


class NoCpp(ValueError):
    """Raised for a step that has no C++ form, which the text names."""


def lines(steps: Iterable[Step]) -> list[str]:
    """Return C++ statements. Raises NoCpp."""
    return [line for step in steps for line in _lines(step)]


def _lines(step: Step) -> list[str]:
    match step:
        case Unset(variable, type):
            return [f"{type.cpp} {variable} = {type.unset};", f'[[maybe_unused]] const char* from_{variable} = "";']
        case Let(variable, type, term):
            return [f"[[maybe_unused]] const {type.cpp.removeprefix('const ')} {variable} = {_known(term.cpp)};"]
        case Evaluate(variable, type, _, term, rule):
            tried = f"try {{ {variable} = {_known(term.cpp)}; }}"
            return [f"{type.cpp} {variable};", f"{tried} catch (const NoValue& why) {{ {refusal(rule)} }}"]
        case Check(rule):
            return check(rule)
        case Meet(variable, type, term, origin, rules):
            first = f"{variable} = {_known(term.cpp)}; from_{variable} = {quote(_plain(origin))};"
            # The first tensor with a dim sets its size, and each later one is compared with it.
            others = [line for rule in rules for line in check(rule)]
            return [f"if ({type.is_unset(variable)}) {{ {first} }} else {{", *_inside(others), "}"]
        case Allocate(at, sizes, dtype):
            return [f"Tensor {at.tensor.cpp} = empty({_known(sizes.cpp)}, {dtype.cpp}, device);"]
        case Pack(at, strided, align):
            packed = f"pack({at.tensor.cpp}, {str(strided).lower()}, {align})"
            return [f"[[maybe_unused]] const Tensor original_{at.arg} = {packed};"]
        case Present(at, steps):
            return [f"if ({at.tensor.cpp}) {{", *_inside(lines(steps)), "}"]
        case Each(at, _):
            raise NoCpp(f"the list {at.arg!r}")


def _inside(text: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in text]


def _known(cpp: str) -> str:
    # A step without a C++ form has an empty text, so that Python can still run it.
    if not cpp:
        raise NoCpp("an expression or a dim that C++ cannot compute")
    return cpp


def check(rule: Rule) -> list[str]:
    """Return the check of one rule. No line for a rule that is checked elsewhere."""
    # A condition that is always true would only cost time in each call.
    return [] if rule.condition.cpp == TRUE.cpp else [f"if (!({condition(rule)})) [[unlikely]] {refusal(rule)}"]


def condition(rule: Rule) -> str:
    return _known(rule.condition.cpp)


def refusal(rule: Rule) -> str:
    """Return the statement that raises the error for a call which breaks ``rule``."""
    texts = (rule.where, rule.got, rule.expected)
    messages = ", ".join(quote(braced(text)) for text in texts)
    values = ", ".join(_known(part.shown[1]) for text in texts for part in text if isinstance(part, Term))
    return f"refuse({quote(rule.id)}, {quote(rule.error_title)}, {messages}, {quote(rule.error_fix)}, {{{values}}});"


def braced(text: Text) -> str:
    """Return a text with ``{}`` for each value, such as ``n = {}``, into which ``refuse`` puts the values."""
    return "".join(part.replace("{", "{{") if isinstance(part, str) else "{}" for part in text)


def _plain(text: Text) -> str:
    if not all(isinstance(p, str) for p in text):
        raise NoCpp("a label that is only known at run time")
    return "".join(p for p in text if isinstance(p, str))
