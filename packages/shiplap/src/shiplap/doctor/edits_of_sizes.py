"""Edits for conditions on sizes: the function is compiled once for each outcome of them, with sizes that vary."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator

from shiplap.doctor.edits import Case, Source
from shiplap.doctor.edits_of_values import enclosing_function
from shiplap.doctor.edits_of_versions import VERSIONS, compile_by_kind

# The forms of a size, in which the group is the variable of the tensor.
_SIZE = re.compile(r"(\w+)\.shape\[-?\d+\]|(\w+)\.size\(-?\d+\)|len\((\w+)\)")


def _outcomes_of_sizes(case: Case, parameters: str, model: str) -> Iterator[str]:
    """Yield the expressions that compute, in front of a call, all conditions of the compiled function on sizes of the
    argument that varied. Yield nothing if one of them depends on anything else than sizes of arguments, numbers of the
    module level and attributes of the compiled object, whose source code is ``model``.

    A second alternative for sizes of 0 and 1 also computes whether the size is one of these. ``parameters`` are those
    of the compiled function.
    """
    source = case.own
    node = source.statement(case.line) if source is not None else None
    # Where torch names no line that reads the size, the line is that of the function.
    function = node if isinstance(node, ast.FunctionDef) else None
    if source is not None and node is not None and function is None:
        function = enclosing_function(source, node)
    argument, _, dim = case.subject.partition(", dim ")
    if source is None or function is None or function.name != case.function or argument not in _required(function):
        return
    found = list[str]()
    for test in _conditions(source, function):
        outside = _SizesOutside(source, function, test, model)
        text = ast.unparse(outside.visit(copy.deepcopy(test)))
        if argument not in outside.arguments:
            continue
        if not outside.computable:
            return
        found.append(text)
    if found:
        joined = ", ".join(dict.fromkeys(found))
        if case.cause != "small":
            yield f"({joined},)"
        yield f"({joined}, {argument}.shape[{dim or 0}] < 2)"


def _required(function: ast.FunctionDef) -> set[str]:
    """Return the parameters of ``function`` that each call has to give. Others may be None, which has no size."""
    given = [*function.args.posonlyargs, *function.args.args]
    required = given[: len(given) - len(function.args.defaults)]
    return {a.arg for a in required if a.arg != "self" and not re.search("None|Optional", _annotation(a))}


def _annotation(argument: ast.arg) -> str:
    """Return the source code of the annotation of ``argument``, or an empty string if it has none."""
    return ast.unparse(argument.annotation) if argument.annotation else ""


# What may leave out, or repeat, what is in it.
_SOMETIMES = ast.If | ast.IfExp | ast.For | ast.While | ast.Try | ast.Lambda | ast.FunctionDef | ast.BoolOp


def _conditions(source: Source, function: ast.FunctionDef) -> list[ast.expr]:
    """Return the conditions that each call of ``function`` evaluates: those of statements that are in no other
    condition, and of ``a if b else c`` in them. The comparison that ``min(a, b)`` or ``max(a, b)`` makes is one of
    them. Those behind a statement that may leave the function are left out.
    """
    parents, found = source.parents(), list[ast.expr]()
    leaves = [n.lineno for n in ast.walk(function) if isinstance(n, ast.Return | ast.Raise | ast.Assert | ast.Yield)]
    end = min(leaves, default=function.end_lineno or 0)
    for n in ast.walk(function):
        test = n.test if isinstance(n, ast.If | ast.IfExp | ast.Assert) else None
        if isinstance(n, ast.Call) and ast.unparse(n.func) in ("min", "max") and len(n.args) == 2:
            test = ast.Compare(n.args[0], [ast.LtE()], [n.args[1]], lineno=n.lineno)
        if test is None or test.lineno > end:
            continue
        around = parents[n]
        while around is not function and not isinstance(around, _SOMETIMES):
            around = parents[around]
        if around is function:
            found.append(test)
    return found


class _SizesOutside(ast.NodeTransformer):
    """A converter of a condition in a function to the same condition outside of it, in front of the call.

    Attributes:
        arguments: the arguments whose sizes the condition compares.
        computable: whether the condition has the same value outside.
    """

    def __init__(self, source: Source, function: ast.FunctionDef, test: ast.expr, model: str) -> None:
        """Collect what ``function`` has assigned in front of ``test``. ``model`` is the source code of what was
        compiled, or an empty string for a decorated function.
        """
        self.source, self.function, self.model = source, function, model
        self.arguments, self.computable = set[str](), True
        before = [n for n in ast.walk(function) if getattr(n, "lineno", test.lineno) < test.lineno]
        targets = [n for n in before if isinstance(n, ast.Name | ast.Attribute) and not isinstance(n.ctx, ast.Load)]
        self.stored = {ast.unparse(n) for n in targets}
        self.called = any(isinstance(n, ast.Call) and ast.unparse(n.func).startswith("self.") for n in before)
        self.sizes = _sizes_in_variables(function, test.lineno)

    def visit(self, node: ast.AST) -> ast.AST:
        """Return ``node`` with expressions in it that have the same value outside. Note in ``computable`` if there is
        none for a part of it.
        """
        text = ast.unparse(node) if isinstance(node, ast.expr) else ""
        if isinstance(node, ast.Name) and node.id in self.sizes:
            return self.visit(ast.parse(self.sizes[node.id], mode="eval").body)
        if size := _SIZE.fullmatch(text):
            (name,) = filter(None, size.groups())
            self.arguments.add(name)
            self.computable &= name in _required(self.function) and name not in self.stored
            return node
        if isinstance(node, ast.Attribute) and re.fullmatch(r"self(\.\w+)+", text):
            # A method may have changed it.
            self.computable &= bool(self.model) and text not in self.stored and not self.called
            return ast.parse(re.sub(r"^self\b", self.model or "self", text), mode="eval").body
        if isinstance(node, ast.Name):
            local = {a.arg for a in ast.walk(self.function.args) if isinstance(a, ast.arg)} | self.stored
            self.computable &= node.id in self.source.assigned_names() - local
            return node
        plain = ast.Compare | ast.BoolOp | ast.BinOp | ast.UnaryOp | ast.Constant
        self.computable &= isinstance(node, plain) or not isinstance(node, ast.expr)
        return self.generic_visit(node)


def _sizes_in_variables(function: ast.FunctionDef, line: int) -> dict[str, str]:
    """Return the sizes that variables of ``function`` hold at the line ``line``, as source code by the variable. They
    are assigned once, in a statement of the function itself that follows no assignment to the tensor.
    """
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    found = dict[str, str]()
    for node in function.body:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or node.lineno >= line:
            continue
        target, text = node.targets[0], ast.unparse(node.value)
        pairs = {ast.unparse(target): text}
        if isinstance(target, ast.Tuple) and (whole := re.fullmatch(r"(\w+)\.(?:shape(?:\[:\d+\])?|size\(\))", text)):
            pairs = {ast.unparse(t): f"{whole[1]}.shape[{i}]" for i, t in enumerate(target.elts)}
        for name, value in pairs.items():
            size = _SIZE.fullmatch(value)
            tensor = next(filter(None, size.groups()), "") if size else ""
            written = {n.lineno for n in names if n.id == tensor}
            if size and sum(n.id == name for n in names) == 1 and not any(at <= node.lineno for at in written):
                found[name] = value
    return found


compile_size_outcomes = compile_by_kind("compile_each", VERSIONS, _outcomes_of_sizes, ("dynamic=True",))
