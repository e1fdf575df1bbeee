"""Edits for a question about a tensor whose answer lets the program leave a value out: each call keeps the value."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from shiplap.doctor.edits import Case, Edits, Source, indent_of, of_statement
from shiplap.doctor.edits_of_values import is_question_of_python


@dataclass(frozen=True)
class Shortcut:
    """An ``if`` after which a value is None: ``if not mask.any(): mask = None``, or ``if mask.any(): return mask`` in
    front of ``return None``.

    Attributes:
        node: the ``if``.
        asked: the operands of its condition that Python decides, such as ``mask is not None``, as source code.
        question: the operands about values of tensors, as source code.
        kept: the ``return`` of the value in the body of the ``if``, or None if the body sets the value to None.
    """

    node: ast.If
    asked: str
    question: str
    kept: ast.Return | None


def find_shortcut(source: Source, node: ast.stmt) -> Shortcut | None:
    """Return the shortcut at the statement ``node``, or None if it is none."""
    if not isinstance(node, ast.If) or node.orelse or len(node.body) != 1:
        return None
    joined = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
    operands = node.test.values if isinstance(node.test, ast.BoolOp) and joined else [node.test]
    asked = [v for v in operands if is_question_of_python(v)]
    questions = [v for v in operands if v not in asked]
    body = node.body[0]
    sets_none = (
        isinstance(body, ast.Assign)
        and _is_none(body.value)
        and [type(t) for t in body.targets] == [ast.Name]
        and ast.unparse(body.targets[0]) in {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
    )
    kept = body if isinstance(body, ast.Return) and body.value is not None and not _is_none(body.value) else None
    if not questions or not (sets_none or (kept is not None and _returns_none_next(source, node))):
        return None
    named, question = (" and ".join(_operand(source, v) for v in part) for part in (asked, questions))
    return Shortcut(node, named, question, kept)


def _operand(source: Source, node: ast.expr) -> str:
    """Return the source code of ``node`` as an operand of ``and`` on a line of its own, in parentheses if need be."""
    code = source.code(node)
    loose = isinstance(node, ast.BoolOp | ast.IfExp | ast.Lambda | ast.NamedExpr) or "\n" in code
    return f"({code})" if loose else code


def _is_none(value: ast.expr | None) -> bool:
    """Return whether ``value`` is the constant None, or missing as in a bare ``return``."""
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _returns_none_next(source: Source, node: ast.If) -> bool:
    """Return whether the statement behind ``node`` returns None, or the function ends there."""
    parent = source.parents().get(node)
    if not isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    following = parent.body[parent.body.index(node) + 1 :][:1]
    return not following or (isinstance(following[0], ast.Return) and _is_none(following[0].value))


@of_statement
def keep_value(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits after which the value is kept in each call in which Python's part of the condition holds."""
    found = find_shortcut(source, node)
    if found is None:
        return
    if found.kept is None:
        yield (source.replace(found.node, "pass"),)
    elif found.asked:
        yield (source.replace(found.node.test, found.asked),)
    else:
        yield (source.replace(found.node, source.code(found.kept)),)


@of_statement
def refuse_without_value(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits after which the program raises where it leaves the value out. A program that still ends as before
    never did, so that its results do not show what the value changes.
    """
    found = find_shortcut(source, node)
    if found is None:
        return
    raised = 'raise AssertionError("the value is left out")'
    if found.kept is None:
        yield (source.replace(found.node.body[0], raised),)
        return
    space = indent_of(source, found.node)
    test = found.asked or "True"
    returned = source.code(found.kept)
    text = f"if {test}:\n{space}    if {found.question}:\n{space}        {returned}\n{space}    {raised}"
    yield (source.replace(found.node, text),)
