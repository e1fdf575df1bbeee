"""The checks and allocations of a call as plain Python, printed from the op's call plan."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shiplap.declare.dim_expression import Expr
from shiplap.declare.spec import OpSpec
from shiplap.packaging.eject.copied_source import CannotCopy, SourceCopy
from shiplap.plan import CallPlan
from shiplap.plan.expression import argument_variable, declared_value
from shiplap.plan.python_source import PythonWriter
from shiplap.plan.rule import ArgumentRule, format_template
from shiplap.plan.steps import Block, EvaluateStep, Step
from shiplap.plan.values import rule_scope

INDENT = "    "
_WORD = re.compile(r"\b[A-Za-z_]\w*\b")
_STRING = re.compile(r"('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")")
TORCH_NAMES = ("Tensor", "strided", "is_grad_enabled", "empty", "contiguous_format")  # of generated code


class PlainWriter(PythonWriter):
    """A writer of the Python lines that check the arguments of a call. Each check contains the strings of its error, so
    that no table of rules is needed.
    """

    def check(self, rule: ArgumentRule) -> list[str]:
        """Return the Python lines that check one rule for arguments. They call ``support.expect`` of the ejected
        package with the condition and with a function that returns the strings of the error.
        """
        # The constants of a check are written into the new module as literals.
        self.constants |= rule.constants
        what, where, got, expected, fix = self._texts(rule)
        return [
            "support.expect(",
            f"    {rule.condition.python},",
            "    lambda: (",
            *(f"        {text}," for text in (what, where, got, expected, fix)),
            "    ),",
            ")",
        ]

    def step(self, step: Step) -> list[str]:
        """Return the Python lines of one step of a call's checks. If the step evaluates an expression that can fail,
        the lines raise ``ValueError`` in that case, with the strings of the step's rule.
        """
        match step:
            case EvaluateStep(variable, _, _, term, rule):
                self.constants |= rule.constants
                return [
                    "try:",
                    f"    {variable} = {term.python}",
                    "except (ArithmeticError, LookupError, TypeError, ValueError) as why:",
                    f"    raise ValueError(support.message({', '.join(self._texts(rule))})) from None",
                ]
        return super().step(step)

    def _texts(self, rule: ArgumentRule) -> list[str]:
        """Return the five strings of a rule's error as Python expressions. They are the title, place, observation,
        expectation and fix. Advice about the declaration is left out.
        """
        fix = rule.error_fix
        if "declaration" in fix:  # which the plain source does not have
            fix = fix.partition(", or ")[0]
        words = repr(rule.error_title), repr(fix)
        where, got, expected = map(format_template, (rule.where, rule.got, rule.expected))
        return [words[0], where, got, expected, words[1]]


class CallPrinter:
    """A printer of the Python functions that check the calls of one op.

    Attributes:
        sizes: the variables that ``_check_<op>`` returns, in order.
    """

    def __init__(self, spec: OpSpec, plan: CallPlan, stem: str, copy: SourceCopy, asked: Iterable[str]) -> None:
        """Find the variables that the check function of the op returns. They are the device, the dtypes, and the sizes
        that the outputs and the names ``asked`` need.
        """
        self.spec, self.plan, self.stem, self.copy = spec, plan, stem, copy
        named = {*self._output_names(), *asked} - spec.dynamic.keys() - {"threads", "itemsize"}
        # Scalars are parameters of the function already.
        scalars = {a.name for a in spec.scalars}
        known = [plan.names(n) for n in sorted(named) if n not in scalars]
        self.sizes = (*(["device"] if spec.tensors else []), *known, *(f"dtype_{c}" for c in spec.dtype_classes))

    def _output_names(self) -> set[str]:
        """Return the names of the dims and scalars that occur in the sizes of the op's outputs. Those in the upper
        bounds of data-dependent sizes are included.
        """
        dims = [d for o in self.spec.outputs for d in o.tensor.dims]
        plain = {d.text for d in dims if d.kind in ("name", "variadic") and d.text != "..."}
        bounds = [e for _, e in self.spec.bounds]
        return plain.union(*(d.expr.names for d in dims if d.expr), *(e.names for e in bounds))

    def check_function(self) -> str:
        """Return the Python source of ``_check_<op>``. It raises for wrong arguments and returns the device, sizes and
        dtypes of the call. It accepts fake tensors, too.
        """
        parameters = ", ".join(argument_variable(a) for a in self.spec.args)
        lines = self.lines(self.plan.arguments)
        result = f"    return {', '.join(self.sizes)}" if self.sizes else "    return ()"
        # One size is returned as a tuple as well, since callers unpack it.
        if len(self.sizes) == 1:
            result += ","
        return "\n".join(
            [
                f"def _check_{self.stem}({parameters}):",
                f'    """Refuse arguments that {self.spec.name} does not take, and return sizes and dtypes."""',
                *lines,
                result,
            ]
        )

    def memory_function(self) -> str:
        """Return the source of ``_check_memory_<op>``, which raises if an argument shares memory with one that is
        written to. Return an empty string for an op that writes to none.
        """
        if not self.plan.sharing:
            return ""
        parameters = ", ".join(argument_variable(a) for a in self.spec.args)
        doc = f'    """Refuse arguments of {self.spec.name} that share memory with one that is written to."""'
        return "\n".join([f"def _check_memory_{self.stem}({parameters}):", doc, *self.lines(self.plan.sharing)])

    def call(self, body: Sequence[str], *, memory: bool = True) -> list[str]:
        """Return the lines of a function with the op's own parameters. They call the check functions and then run the
        lines ``body``. The results of the checks are assigned to the names that ``body`` reads.

        If ``memory`` is true, the check for shared memory is included. If it is false, the check is left out. This
        serves fake tensors, which have no memory.
        """
        given = ", ".join(a.name for a in self.spec.args)
        words = {word for line in body for word in _WORD.findall(line)}
        # Unused names would be flagged by linters of the ejected package.
        left = [name if name in words else "_" for name in self.sizes]
        kept = f"{', '.join(left)}{',' * (len(left) == 1)} = " if {*left} - {"_"} else ""
        checks = [f"{kept}_check_{self.stem}({given})"]
        checks += [f"_check_memory_{self.stem}({given})"] if memory and self.plan.sharing else []
        return [*checks, *body]

    def bounds(self) -> list[str]:
        """Return the Python lines that set the variable of each data-dependent size to its declared upper bound."""
        return [f"{self.plan.names(dim)} = {self.expression(expr)}" for dim, expr in self.spec.bounds]

    def allocated(self) -> list[str]:
        """Return the Python lines that compute the outputs' sizes and allocate the outputs as ``t_<output>``."""
        outputs = self.plan.outputs
        lines = [line.removeprefix(INDENT) for line in self.lines((*outputs.measured, *outputs.allocated))]
        return [_replace_words(line, self._parameters) for line in lines]

    def expression(self, expr: Expr) -> str:
        """Return ``expr``, an expression of the declaration such as ``n // 2``, as Python source. It is meant for a
        function with the op's own parameters and the variables of the checks.
        """
        (text,) = self._copy_called([declared_value(expr, self.plan.names).python])
        return _replace_words(text, self._parameters)

    @property
    def _parameters(self) -> dict[str, str]:
        """A mapping from the names that the op's scalar parameters have in generated checks to their own names."""
        return {self.plan.names(a.name): a.name for a in self.spec.scalars}

    def text_with(self, expr: Expr, variable: Callable[[str], str]) -> str:
        """Return ``expr``, an expression of the declaration such as ``n // 2``, as Python source. ``variable(name)``
        takes the place of each name.
        """
        (text,) = self._copy_called([ast.unparse(_Renamed(variable).visit(ast.parse(expr.source, mode="eval")))])
        return text

    def lines(self, steps: Block | Sequence[Step]) -> list[str]:
        """Return the Python lines of ``steps``, the checks and conversions of a call. Functions of Shiplap that they
        call are copied into the new module.
        """
        # One function serves real and fake calls, so sizes may be symbols.
        writer = PlainWriter(careful=True)
        writer.write(steps)
        fixed = {f"want_{o.name}": getattr(torch, o.tensor.dtypes[0]) for o in self.spec.outputs if o.tensor.concrete}
        constants = {name: _constant_text(value) for name, value in (writer.constants | fixed).items()}
        return self._copy_called([_replace_words(line, constants) for line in writer.lines])

    def _copy_called(self, lines: Iterable[str]) -> list[str]:
        """Return the generated ``lines`` with calls of Shiplap's functions replaced by calls of their copies in the new
        module. Copies and imports are made as needed.
        """
        scope, renamed, given = rule_scope(), dict[str, str](), list(lines)
        for name in sorted({word for line in given for word in _WORD.findall(line)} & scope.keys()):
            value: Any = scope[name]
            if name in TORCH_NAMES:
                renamed[name] = f"torch.{name}"
            elif name == "gcd":
                renamed[name] = f"{self.copy.module(math)}.gcd"
            # ``len`` is a builtin. Any other function is one of Shiplap's.
            elif name != "len":
                renamed[name] = self.copy.helper(value)
        return [_replace_words(line, renamed) for line in given]


def _replace_words(line: str, words: Mapping[str, str]) -> str:
    """Return a line of source in which each name that is a key of ``words`` is replaced by its value. Names in string
    literals and behind a dot are not replaced.
    """
    parts = _STRING.split(line)
    # A name in front of a single ``=`` is a keyword of a call, which stays.
    pattern = re.compile(r"(?<![\w.])[A-Za-z_]\w*\b(?!=[^=])")
    # Even parts lie between string literals, whose words must stay.
    parts[::2] = [pattern.sub(lambda m: words.get(m[0], m[0]), part) for part in parts[::2]]
    return "".join(parts)


class _Renamed(ast.NodeTransformer):
    """A transformer that replaces names by expressions in a syntax tree. The names of called functions are not
    replaced.
    """

    def __init__(self, variable: Callable[[str], str]) -> None:
        """Keep ``variable``, the function that returns the replacement of a name."""
        self.variable = variable

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Return the call with the names in its arguments replaced. The name of the called function is not replaced."""
        return ast.Call(node.func, [self.visit(a) for a in node.args], [])

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the expression that replaces the name of this node."""
        return ast.parse(self.variable(node.id), mode="eval").body


def _constant_text(value: Any) -> str:
    """Return ``value``, a constant that a rule for arguments compares with, as Python source. It is a dtype, or a set
    of dtypes, which becomes a tuple. Raise ``CannotCopy`` for any other value.
    """
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, frozenset):
        return f"({', '.join(sorted(map(str, value)))},)"
    raise CannotCopy(f"a check needs {value!r}")
