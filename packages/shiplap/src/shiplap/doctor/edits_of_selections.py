"""Edits for a question about whether a mask or an index selects anything: the selection is used in each call."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from shiplap.doctor.edits import Case, Edits, Source, indent_of, of_statement, reindent, whole_lines
from shiplap.doctor.edits_of_functions import DRAWING
from shiplap.doctor.edits_of_values import assigned_names, names_read_after

_CAPTURED = "torch._dynamo.config.capture_dynamic_output_shape_ops = True"


@dataclass(frozen=True)
class Selection:
    """An ``if`` that leaves statements out where ``selected``, the source code of a mask or an index, selects nothing.

    Attributes:
        node: the ``if``.
        body: the statements that it leaves out. They are its body, or the rest of the loop or function behind it.
        leaves: whether the body of the ``if`` only leaves the round of a loop or the function.
    """

    node: ast.If
    selected: str
    body: list[ast.stmt]
    leaves: bool


# The forms of the question, in which the group is the mask or the index.
_QUESTIONS = tuple(
    re.compile(form + r"(?:\.item\(\))?(?: (?P<sign>(?:>|!=|==|<|>=) [01]))?")
    for form in (
        r"(.+)\.(?:any|sum|numel|nelement)\(\)",
        r"(.+)\.size\(0\)",
        r"(.+)\.shape\[0\]",
        r"torch\.(?:any|sum)\((.+)\)",
        r"len\((.+)\)",
    )
)
# Whether a comparison of the number of selected items holds if there are some.
_SIGNS = {"> 0": True, "!= 0": True, ">= 1": True, "== 0": False, "< 1": False}


def _question(test: ast.expr) -> tuple[str, bool] | None:
    """Return ``(source code, whether it holds if something is selected)`` for a condition that asks whether a mask or
    an index selects anything, such as ``mask.any()``, ``len(rows) == 0`` or ``not rows.numel()``. Return None for other
    conditions.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _question(test.operand)
        return None if inner is None else (inner[0], not inner[1])
    text = ast.unparse(test)
    found = next((m for form in _QUESTIONS if (m := form.fullmatch(text))), None)
    if found is None or (found["sign"] or "> 0") not in _SIGNS:
        return None
    start, end = found.span(1)
    try:
        selected = ast.parse(found[1], mode="eval").body
        # The question is about another expression if parentheses around the group change it, as in ~mask.any().
        if ast.unparse(ast.parse(f"{text[:start]}({found[1]}){text[end:]}")) != text:
            return None
    except SyntaxError:
        return None
    calls = [ast.unparse(n.func) for n in ast.walk(selected) if isinstance(n, ast.Call)]
    plain = all(re.fullmatch(r"torch\.is(nan|inf|finite)|\w+\.is(nan|inf|finite)", called) for called in calls)
    return (ast.unparse(selected), _SIGNS[found["sign"] or "> 0"]) if plain else None


def find_selection(source: Source, node: ast.stmt) -> Selection | None:
    """Return the selection at the statement ``node``, or None if it is none, or if what it leaves out may do anything
    else than use the selection.
    """
    asked = _question(node.test) if isinstance(node, ast.If) and not node.orelse else None
    if asked is None or not isinstance(node, ast.If):
        return None
    selected, if_any = asked
    parent = source.parents().get(node)
    if if_any:
        found = Selection(node, selected, node.body, leaves=False)
    elif [type(n) for n in node.body] == [ast.Continue] and isinstance(parent, ast.For) and node in parent.body:
        found = Selection(node, selected, parent.body[parent.body.index(node) + 1 :], leaves=True)
    elif _returns_nothing(node) and isinstance(parent, ast.FunctionDef) and parent.body[-1] is not node:
        rest = parent.body[parent.body.index(node) + 1 :]
        # An empty result is the same whatever it is computed from.
        only = len(rest) == 1 and isinstance(rest[0], ast.Return) and rest[0].value is not None
        indexed = only and any(
            ast.unparse(n.slice) == selected for n in ast.walk(rest[0]) if isinstance(n, ast.Subscript)
        )
        return Selection(node, selected, rest, leaves=True) if indexed else None
    else:
        return None
    return found if found.body and _only_uses(source, found) else None


def _returns_nothing(node: ast.If) -> bool:
    """Return whether the body of ``node`` only returns a new tensor whose first size is 0 in the source code."""
    value = node.body[0].value if len(node.body) == 1 and isinstance(node.body[0], ast.Return) else None
    made = r"(torch|\w+)\.(new_)?(zeros|empty|ones)\(\(?\[?0\b.*\)|\w+\[:0\]"
    return value is not None and re.fullmatch(made, ast.unparse(value)) is not None


def _only_uses(source: Source, found: Selection) -> bool:
    """Return whether the statements of ``found`` change nothing but what is selected: they assign to items of the
    selection, fill a variable by a mask, or assign variables that nothing reads behind them.
    """
    last = found.body[-1]
    read = names_read_after(source, last) - set(_own_names(source, found))
    for node in found.body:
        if DRAWING.search(source.code(node)) or not isinstance(node, ast.Assign | ast.AugAssign | ast.Expr):
            return False
        if isinstance(node, ast.Expr):
            named = r"\w+\.(?:masked_fill|index_add|index_copy|index_fill)_\((?:\w+, )?"
            if not re.fullmatch(rf"{named}{re.escape(found.selected)}, .*\)", ast.unparse(node.value)):
                return False
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Subscript):
                index = target.slice.elts[0] if isinstance(target.slice, ast.Tuple) else target.slice
                if ast.unparse(index) != found.selected:
                    return False
            elif not isinstance(target, ast.Name) or (target.id in read and not _fills(node, target, found.selected)):
                return False
    return True


def _own_names(source: Source, found: Selection) -> list[str]:
    """Return the variables that the statements of ``found`` assign before any statement of the function reads them, so
    that they hold nothing that an earlier round of a loop has left.
    """
    own = []
    for name in assigned_names(found.body):
        uses = [n for n in ast.walk(source.tree) if isinstance(n, ast.Name) and n.id == name]
        first, last = found.body[0].lineno, found.body[-1].end_lineno or 0
        inside = [n for n in uses if first <= n.lineno <= last]
        start = min(n.lineno for n in inside)
        if len(inside) == len(uses) and all(isinstance(n.ctx, ast.Store) for n in inside if n.lineno == start):
            own.append(name)
    return own


def _fills(node: ast.Assign | ast.AugAssign, target: ast.Name, selected: str) -> bool:
    """Return whether ``node`` only changes the items of the variable ``target`` that the mask ``selected`` selects."""
    mask = re.escape(selected)
    filled = rf"{target.id}\.masked_fill\({mask}, .*\)|torch\.where\({mask}, .*, {target.id}\)"
    return isinstance(node, ast.Assign) and re.fullmatch(filled, ast.unparse(node.value)) is not None


def _has_to_be_mask(found: Selection) -> bool:
    """Return whether the question is about the values of what ``found`` selects by, which the source code does not show
    to be bools. The indices ``[0]`` select an item, though their sum is 0.
    """
    asked = re.search(r"\b(any|sum)\(", ast.unparse(found.node.test))
    value = ast.parse(found.selected, mode="eval").body
    return asked is not None and not isinstance(value, ast.Compare)


@of_statement
def use_selection(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that use the selection in each call, also where nothing is selected. As an alternative, they also
    let torch keep operations in the graph whose results have as many items as are selected.
    """
    found = find_selection(source, node)
    if found is None:
        return
    indent = indent_of(source, node)
    lines = [f"{indent}assert ({found.selected}).dtype == torch.bool"] if _has_to_be_mask(found) else []
    lines += [] if found.leaves else [reindent(whole_lines(source, found.body), indent)]
    edit = source.replace(node, "\n".join(lines).lstrip() or "pass")
    yield source.with_import(edit, "torch") if _has_to_be_mask(found) else (edit,)
    if _CAPTURED not in source.text:
        missing = "" if source.imports("torch") else "import torch\n"
        yield source.after_imports(missing + _CAPTURED), edit


@of_statement
def refuse_no_selection(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits after which the program raises where nothing is selected. A program that still ends as before
    always selected something, so that its results do not show that using the selection changes nothing.
    """
    found = find_selection(source, node)
    if found is None:
        return
    raised = 'raise AssertionError("nothing is selected")'
    if found.leaves:
        yield (source.replace(found.node.body[0], raised),)
    else:
        indent = indent_of(source, node)
        yield (source.replace(node, f"{source.code(node)}\n{indent}else:\n{indent}    {raised}"),)
