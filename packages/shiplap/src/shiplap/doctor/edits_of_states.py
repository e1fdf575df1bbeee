"""Edits of statements that only update the program's own numbers: they run in front of a call or behind its graph."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from shiplap.doctor.edits import Case, Edits, Source, indent_of, is_movable, of_statement, reindent, whole_lines
from shiplap.doctor.edits_in_front import (
    is_bound_to_place,
    is_compiled_itself,
    is_known_outside,
    may_be_earlier,
    pass_value,
)
from shiplap.doctor.edits_of_calls import can_run_later, is_outermost, only_object
from shiplap.doctor.edits_of_functions import unused_name
from shiplap.doctor.edits_of_values import assigned_names, enclosing_function, names_read_after, variables_of_functions
from shiplap.doctor.scratch import Edit

# Functions and methods that such a statement may call: they make numbers of numbers and of tensors.
_NUMBERS = re.compile(r"(min|max|int|float|abs|round|len|bool)|.*\.(item|get|mean|sum|max|min|norm|detach|any|all)")


def _updates(node: ast.stmt, *, local: bool) -> bool:
    """Return whether the statement ``node`` only assigns numbers to attributes and to items by a key, possibly under
    conditions. If ``local`` is true, it may also assign to variables.
    """
    if isinstance(node, ast.If):
        return _is_plain(node.test) and all(_updates(n, local=local) for n in (*node.body, *node.orelse))
    if isinstance(node, ast.Pass):
        return True
    if not isinstance(node, ast.Assign | ast.AugAssign) or not _is_plain(node.value):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        item = isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant | ast.Name)
        if not (item or isinstance(target, ast.Attribute) or (local and isinstance(target, ast.Name))):
            return False
    return True


def _is_plain(value: ast.expr) -> bool:
    """Return whether evaluating ``value`` calls nothing but functions that make numbers."""
    kinds = ast.Lambda | ast.NamedExpr | ast.Await | ast.Yield | ast.Starred | ast.comprehension
    calls = [ast.unparse(n.func) for n in ast.walk(value) if isinstance(n, ast.Call)]
    return not any(isinstance(n, kinds) for n in ast.walk(value)) and all(map(_NUMBERS.fullmatch, calls))


def update_in_front(case: Case) -> Iterator[Edits]:
    """Yield the edits that run the statements at the beginning of the compiled function which only update numbers of
    the program, such as a counter, in front of each call.
    """
    for source in case.sources():
        for function in (n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef)):
            if function.name != case.function or not function.lineno <= case.line <= (function.end_lineno or 0):
                continue
            body = [n for n in function.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
            block = body[: next((i for i, n in enumerate(body) if not _updates(n, local=False)), len(body))]
            if not block or len(block) == len(body) or not may_be_earlier(case, source, function, block[0]):
                continue
            values = [n for each in block for n in ast.walk(each) if isinstance(n, ast.expr)]
            if not all(is_known_outside(source, function, block[0], n, tensors=True) for n in values):
                continue
            yield from _block_in_front(case, source, function, block)


def _block_in_front(case: Case, source: Source, function: ast.FunctionDef, block: list[ast.stmt]) -> Iterator[Edits]:
    """Yield the edits that run the statements ``block`` of ``function`` in a function of their own, which is called in
    front of each call.
    """
    used = list(dict.fromkeys(n for each in block for n in variables_of_functions(source, each)))
    name, flag = unused_name(source, f"update_{function.name}"), unused_name(source, "is_updated")
    if f"def {name}(" in source.text or not is_movable(source, block):
        return
    body = reindent(whole_lines(source, block), "    ")
    made = source.before_definition(function.lineno, f"def {name}({', '.join(used)}):\n{body}\n    return True")
    indent = indent_of(source, block[0])
    first = source.span(block[0])[0]
    inner = reindent(whole_lines(source, block), f"{indent}    ")
    text = f"if not {flag}:\n{inner}"
    span = (first, source.span(block[-1])[1])
    for edits in pass_value(case, source, function, span, flag, f"{name}({', '.join(used)})", text=text):
        if made is not None:
            yield made, *edits


@of_statement
def update_later(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that run statements which only update numbers of the program behind the compiled part.

    They are the statement at fault and those that use what it assigns. No function may use what they update besides.
    """
    function, parents = enclosing_function(source, node), source.parents()
    while function is not None and parents.get(node) is not function and isinstance(parents.get(node), ast.stmt):
        above = parents[node]
        assert isinstance(above, ast.stmt)
        node = above
    if function is None or node not in function.body:
        return
    rest, end = function.body[function.body.index(node) :], 1
    while end < len(rest) and set(assigned_names(rest[:end])) & names_read_after(source, rest[end - 1]):
        end += 1
    block = rest[:end]
    outermost = is_outermost(case, source, node) or is_compiled_itself(case, source, function)
    if not outermost or not all(_updates(n, local=True) for n in block) or not can_run_later(source, block[-1]):
        return
    if set(assigned_names(block)) & names_read_after(source, block[-1]) or _is_used_besides(case, source, block):
        return
    yield from _block_later(case, source, function, block)


def _block_later(case: Case, source: Source, function: ast.FunctionDef, block: list[ast.stmt]) -> Iterator[Edits]:
    """Yield the edits that run the statements ``block`` of ``function`` in a function which torch calls behind the
    graph, with the tensors and numbers that they use.
    """
    made = set(assigned_names(block))
    used = list(dict.fromkeys(n for each in block for n in variables_of_functions(source, each) if n not in made))
    named, naming = "", tuple[Edit, ...]()
    code = whole_lines(source, block)
    if "self" in used:
        around = source.parents().get(function)
        named, naming = only_object(case, source, around) if isinstance(around, ast.ClassDef) else ("", ())
        if not named:
            return
        used.remove("self")
        if any("self" in str(n.value) for each in block for n in ast.walk(each) if isinstance(n, ast.Constant)):
            return
        code = re.sub(r"(?<![\w.])self\b", named, code)
    name = unused_name(source, f"update_{function.name}_later")
    if f"def {name}(" in source.text or not is_movable(source, block):
        return
    missing = "" if source.imports("torch") else "import torch\n"
    text = (
        f"{missing}\n\n@torch.compiler.disable\ndef {name}({', '.join(used)}):\n{reindent(code, '    ')}\n\n\n"
        f"torch._dynamo.config.reorderable_logging_functions.add({name})\n"
    )
    start, end = source.span(block[0])[0], source.span(block[-1])[1]
    called = source.replace_span(start, end, f"{name}({', '.join(used)})")
    yield source.after_imports(text), called, *naming


def _is_used_besides(case: Case, source: Source, block: Sequence[ast.stmt]) -> bool:
    """Return whether a function other than ``__init__`` uses, outside of the statements ``block``, an attribute or an
    object of the module level that they update, or updates an attribute that they read.
    """
    inside = {n for each in block for n in ast.walk(each)}
    stored = [n for n in inside if isinstance(n, ast.Attribute | ast.Subscript) and not isinstance(n.ctx, ast.Load)]
    attributes = {n.attr for n in stored if isinstance(n, ast.Attribute)}
    roots = [n.value for n in stored if isinstance(n, ast.Subscript)]
    attributes |= {n.attr for n in roots if isinstance(n, ast.Attribute)}
    names = {n.id for n in roots if isinstance(n, ast.Name)}
    read = {n.attr for n in inside if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    for each in (source, *(s for s in case.sources() if s.file != source.file)):
        for function in (n for n in ast.walk(each.tree) if isinstance(n, ast.FunctionDef) and n.name != "__init__"):
            for n in ast.walk(function):
                used = getattr(n, "attr", None) in attributes or getattr(n, "id", None) in names
                written = getattr(n, "attr", None) in read and not isinstance(getattr(n, "ctx", None), ast.Load)
                if (used or written) and n not in inside:
                    return True
    return not (attributes or names)


@of_statement
def prepare_in_front(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that run the statements at the beginning of the compiled function which use no tensor, such as
    draws of NumPy for the sizes of the arguments, in front of each call. The variables that they leave are passed as
    they are or, as an alternative, as tensors.
    """
    function, parents = enclosing_function(source, node), source.parents()
    while function is not None and parents.get(node) is not function and isinstance(parents.get(node), ast.stmt):
        above = parents[node]
        assert isinstance(above, ast.stmt)
        node = above
    if function is None or node not in function.body:
        return
    body = [n for n in function.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    end = next((i for i, n in enumerate(body) if not _prepares(source, function, body[: i + 1])), len(body))
    block = body[:end]
    left = [n for n in assigned_names(block) if block and n in names_read_after(source, block[-1])]
    # A variable that is assigned under a condition may be missing.
    always = {n.id for each in block if isinstance(each, ast.Assign) for n in ast.walk(each) if isinstance(n, ast.Name)}
    if node not in block or not left or not set(left) <= always or not may_be_earlier(case, source, function, block[0]):
        return
    used = list(dict.fromkeys(n for each in block for n in variables_of_functions(source, each)))
    used = [n for n in used if n not in assigned_names(block)]
    name, flag = unused_name(source, f"prepare_{function.name}"), unused_name(source, "prepared")
    code, indent = whole_lines(source, block), indent_of(source, block[0])
    if is_bound_to_place(source, code) or f"def {name}(" in source.text or not is_movable(source, block):
        return
    values = f"({', '.join(left)},)"
    text = f"if {flag} is None:\n{reindent(code, f'{indent}    ')}\n{indent}else:\n{indent}    {values} = {flag}"
    span = (source.span(block[0])[0], source.span(block[-1])[1])
    for returned in (values, f"tuple(map(torch.as_tensor, {values}))"):
        lines = f"def {name}({', '.join(used)}):\n{reindent(code, '    ')}\n    return {returned}"
        made = source.before_definition(function.lineno, lines)
        for edits in pass_value(case, source, function, span, flag, f"{name}({', '.join(used)})", text=text):
            if made is not None:
                yield made, *edits


def _prepares(source: Source, function: ast.FunctionDef, block: list[ast.stmt]) -> bool:
    """Return whether the last statement of ``block``, the beginning of ``function``, uses no tensor, writes to nothing
    that outlives the block, and leaves neither the function nor the block.
    """
    made, node = set(assigned_names(block)), block[-1]
    if made & {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}:
        return False
    leaves = ast.Return | ast.Raise | ast.Yield | ast.YieldFrom | ast.Await | ast.Try | ast.With | ast.Global
    for n in ast.walk(node):
        if isinstance(n, leaves | ast.Nonlocal | ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            return False
        stored = isinstance(n, ast.Attribute | ast.Subscript) and not isinstance(n.ctx, ast.Load)
        if stored and not (isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name) and n.value.id in made):
            return False
    return is_known_outside(source, function, block[0], node, tensors=False, made=made)
