"""The printer of call plans as straight-line Python, compiled once for each declaration.

Each function has two versions. The *quick* one is for real calls. Its sizes are plain ints, and a condition is a plain
``if``. The *careful* one also accepts symbolic sizes. A condition on symbols becomes a guard or a run-time assertion of
the graph (``torch._check``). If a call breaks a rule, the generated code passes the rule's number and its texts, with
the values of the call, to ``refuse``, which raises the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch

from shiplap.declare.generated_code import define_function
from shiplap.errors import ShiplapError, error
from shiplap.plan.rule import ArgumentRule, format_template
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
from shiplap.plan.values import Constant, Scope, rule_scope
from shiplap.torch_private.symbolic_sizes import check_condition


class PythonWriter:
    """A writer that collects the lines of a function body and the rules that they check. If ``careful`` is true, the
    lines accept symbolic sizes.
    """

    def __init__(self, *, careful: bool) -> None:
        """Start a function body without lines and rules. ``careful`` selects conditions that also accept symbolic
        sizes.
        """
        self.careful, self.lines, self.rules = careful, list[str](), list[ArgumentRule]()
        self.constants: dict[str, Constant] = {}

    def write(self, steps: Iterable[Step], indent: str = "    ") -> None:
        """Append the Python lines of ``steps`` (such as checks and assignments of a call) to ``lines``, each after
        ``indent``.
        """
        for step in steps:
            for line in self.step(step):
                self.lines.append(indent + line)

    def step(self, step: Step) -> list[str]:
        """Return the Python lines of one step of a call, such as a check or an assignment, with the lines of nested
        blocks. They are not yet indented for the body of a function.
        """
        match step:
            case UnsetStep(variable):
                # The twin ``from_...`` is only read where the variable is set, but Python has to know the name.
                return [f"{variable} = from_{variable} = None"]
            case LetStep(variable, _, term):
                return [f"{variable} = {term.python}"] if term.python else []
            case EvaluateStep(variable, _, _, term, rule):
                return [
                    "try:",
                    f"    {variable} = {term.python}",
                    "except (ArithmeticError, LookupError, TypeError, ValueError) as why:",
                    f"    refuse({self.refusal(rule)})",
                ]
            case CheckStep(rule):
                return self.check(rule)
            case MeetStep(variable, _, term, origin, rules):
                first = f"{variable}, from_{variable} = {term.python}, {format_template(origin)}"
                return [f"if {variable} is None:", f"    {first}", "else:", *self.inside(map(CheckStep, rules))]
            case AllocateStep(at, sizes, dtype):
                return [f"{at.tensor.python} = empty({sizes.python}, dtype={dtype.python}, device=device)"]
            case PackStep():
                return self.pack(step)
            case PresentStep(at, steps):
                return [f"if {at.tensor.python} is not None:", *self.inside(steps)]
            case EachStep(at, steps, optional):
                members = f"a_{at.arg} or ()" if optional else f"a_{at.arg}"
                return [f"for i_{at.arg}, {at.tensor.python} in enumerate({members}):", *self.inside(steps)]

    def inside(self, steps: Iterable[Step]) -> list[str]:
        """Return the Python lines of ``steps``, indented by four spaces for the body of a statement."""
        return [f"    {line}" for step in steps for line in self.step(step)]

    def pack(self, step: PackStep) -> list[str]:
        """Return the Python lines that replace an argument by a contiguous copy if the kernel does not accept its
        layout or address. If the op writes to the argument, the lines also append the pair (original, copy) to
        ``copies``.
        """
        t = step.at.tensor.python
        kept = [] if step.strided else [f"{t}.is_contiguous()"]
        kept += [f"{t}.data_ptr() % {step.align} == 0"] if step.align > 1 else []
        copied = f"{t}.clone(memory_format=contiguous_format)"
        before = [f"    copies.append(({t}, {copied}))", f"    {t} = copies[-1][1]"]
        return (
            [f"if not ({' and '.join(kept)}):", *(before if step.written else [f"    {t} = {copied}"])] if kept else []
        )

    def check(self, rule: ArgumentRule) -> list[str]:
        """Return, as a list, the one Python line that checks ``rule`` in a call. It is an ``if`` that refuses the call,
        or, if sizes may be symbols, a call of ``expect``.
        """
        condition, refusal = rule.condition.python, self.refusal(rule)
        number, _, texts = refusal.partition(", ")
        return [
            f"expect({condition}, {number}, lambda: ({texts}))"
            if self.careful
            else f"if not ({condition}): refuse({refusal})"
        ]

    def refusal(self, rule: ArgumentRule) -> str:
        """Return, as source text, the arguments with which generated code calls ``refuse`` to raise the error of
        ``rule``.

        They are the number of the rule and its texts, which the values of the call complete. Append the rule to
        ``rules``.
        """
        self.constants |= rule.constants
        self.rules.append(rule)
        return ", ".join([str(len(self.rules) - 1), *map(format_template, (rule.where, rule.got, rule.expected))])


def compile_function(
    name: str, head: str, body: Sequence[str], writer: PythonWriter, names: Scope
) -> Callable[..., object]:
    """Return a compiled generated function.

    ``head`` is its ``def`` line. Its body has the lines of ``writer``, followed by ``body``. ``names`` are further
    globals. ``name`` is shown in tracebacks.
    """
    rules = tuple(writer.rules)

    def refused(number: int, where: str, got: str, expected: str) -> ShiplapError:
        """Return the catalogue error of rule ``number`` with the given texts and the rule's own title and fix.
        ``number`` is the position among the rules that the generated function checks.
        """
        rule = rules[number]
        return error(rule.id, where=where, got=got, expected=expected, what=rule.title, fix=rule.fix_for(got))

    def refuse(number: int, where: str, got: str, expected: str) -> NoReturn:
        """Raise the error of rule ``number`` with the given texts, in place of the exception that is being handled.
        ``number`` is the position among the rules that the generated function checks.
        """
        rule = rules[number]
        # ``from None``: the exception of a failed evaluation is quoted in ``got`` already.
        raise error(rule.id, where=where, got=got, expected=expected, what=rule.title, fix=rule.fix_for(got)) from None

    def expect(holds: bool | torch.SymBool, number: int, texts: Callable[[], tuple[str, str, str]]) -> None:
        """Check ``holds``, the condition of rule ``number``. If it is symbolic, it becomes a guard or an assertion of
        the graph.

        If it is False, raise the rule's error. ``texts`` returns the texts of the error, and is called only in that
        case.
        """
        if isinstance(holds, torch.SymBool):
            # The texts are made only where the condition fails: printing symbols would add guards.
            check_condition(holds, lambda: str(refused(number, *texts())))
        elif not holds:
            refuse(number, *texts())

    # On plain ints the builtins are right and faster than the functions for symbols.
    plain: Scope = {} if writer.careful else {"min": min, "max": max}
    namespace = {**rule_scope(writer.constants), **plain, "refuse": refuse, "expect": expect, **names}
    function = head.partition("(")[0].removeprefix("def ")
    return define_function(function, [head, *writer.lines, *body], name, namespace)


def possibly_unset(steps: Iterable[Step]) -> tuple[str, ...]:
    """Return the names of the variables that may still be None after ``steps`` have run, because only some arguments
    set them.
    """
    return tuple(step.variable for step in steps if isinstance(step, UnsetStep))
