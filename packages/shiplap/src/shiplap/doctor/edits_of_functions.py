"""Edits of functions and loops that end early, by a return or a break that depends on values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shiplap.doctor.edits import Case, Edits, Source, indent_of, of_statement, reindent, whole_lines
from shiplap.doctor.edits_of_values import (
    assigned_names,
    condition_of_tensors,
    enclosing_function,
    expressions_asked,
    expressions_read,
    names_before,
    names_read_after,
    outer_names,
)
from shiplap.doctor.scratch import Edit


@of_statement
def where_for_exit(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that turn an early return into a value which ``torch.where`` picks at the end of the function.

    ``node`` is an ``if`` that only returns a value. It may be in ``for`` loops. The function must end in a ``return``,
    and have no further one. What follows the early return is then computed in each call. It must not write to an
    object, which may be the early value or outlive the call.
    """
    function = enclosing_function(source, node)
    if function is None or not isinstance(node, ast.If) or node.orelse or len(node.body) != 1:
        return
    early, last = node.body[0], function.body[-1]
    values = [s.value for s in (early, last) if isinstance(s, ast.Return)]
    if len(values) != 2 or any(v is None or isinstance(v, ast.Tuple) for v in values):
        return
    if _returns_of(source, function) != [early, last] or not _is_in_for_loops(source, node, function):
        return
    outermost = next(s for s in function.body if s.lineno <= node.lineno <= (s.end_lineno or s.lineno))
    if writes_to_objects(function, min(node.lineno, outermost.lineno)):
        return
    # What follows would run without the value that the condition has asked for, and a global variable would change.
    behind = function.body[function.body.index(outermost) :]
    inside = [n for n in ast.walk(outermost) if isinstance(n, ast.stmt) and n.lineno > node.lineno]
    asked = expressions_asked(node.test) & expressions_read([*inside, *behind[1:]])
    if asked or outer_names(source, node) & set(assigned_names(behind)):
        return
    left, right = (source.code(v) for v in values if v is not None)
    name, done = unused_name(source, "early"), unused_name(source, "is_early")
    test, indent = condition_of_tensors(node.test), indent_of(source, node)
    if outermost is node:
        first = source.replace(node, f"{name}, {done} = {left}, {test}")
        end = source.replace(last, f"return torch.where({done}, {name}, {right})")
        yield *source.with_import(first, "torch"), end
        return
    at = source.span(outermost)[0]
    first = Edit(source.file, at, at, f"{name} = {done} = None\n{indent_of(source, outermost)}")
    lines = (
        f"{name} = {left} if {name} is None else torch.where({done}, {name}, {left})",
        f"{done} = {test} if {done} is None else {done} | ({test})",
    )
    end = source.replace(last, f"return {right} if {name} is None else torch.where({done}, {name}, {right})")
    yield *source.with_import(first, "torch"), source.replace(node, f"\n{indent}".join(lines)), end


# Functions and methods that draw numbers. One more draw would change all later ones.
DRAWING = re.compile(
    r"rand|dropout|multinomial|bernoulli|binomial|poisson|\bnormal\b|normal_|rrelu|gumbel|cauchy_|exponential_|geometric_"
)


def writes_to_objects(function: ast.stmt, line: int = 0) -> bool:
    """Return whether a function or another statement may write to an object in a line from ``line`` on, or assigns
    within an expression.

    Writes are assignments to attributes and items, operators such as ``+=``, methods such as ``add_``, and calls with
    ``out=`` or ``inplace=``.
    """
    for n in ast.walk(function):
        if getattr(n, "lineno", 0) < line:
            continue
        if isinstance(n, ast.Attribute | ast.Subscript) and not isinstance(n.ctx, ast.Load):
            return True
        if isinstance(n, ast.NamedExpr | ast.AugAssign):
            return True
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and re.search(r"[^_]_$", n.func.attr):
            return True
        if isinstance(n, ast.Call) and any(k.arg in ("out", "inplace") for k in n.keywords):
            return True
    return False


def _returns_of(source: Source, function: ast.FunctionDef) -> list[ast.Return]:
    """Return the ``return`` statements of ``function`` in the order of their lines. Those of functions that are defined
    inside it are left out.
    """
    found = (n for n in ast.walk(function) if isinstance(n, ast.Return) and enclosing_function(source, n) is function)
    return sorted(found, key=lambda n: n.lineno)


def _is_in_for_loops(source: Source, node: ast.stmt, function: ast.FunctionDef) -> bool:
    """Return whether all statements around ``node`` in ``function`` are ``for`` loops, if there are any. A ``while``
    may end only by the early return.
    """
    parents, around = source.parents(), source.parents()[node]
    while around is not function:
        if not isinstance(around, ast.For):
            return False
        around = parents[around]
    return True


def unused_name(source: Source, name: str) -> str:
    """Return ``name``, with underscores at its end if the file has the name already."""
    used = {n.id for n in ast.walk(source.tree) if isinstance(n, ast.Name)}
    used |= {n.arg for n in ast.walk(source.tree) if isinstance(n, ast.arg)}
    while name in used:
        name += "_"
    return name


@of_statement
def where_for_break(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that run all rounds of a ``for`` loop which ``node``, an ``if`` with a ``break``, ends early.

    The variables that the loop leaves behind keep the values of the last round that the loop would have run. The loop
    must not write to objects, call functions for their effects, or draw random numbers, since all of its rounds run.
    """
    loop = source.parents().get(node)
    if not isinstance(node, ast.If) or not isinstance(loop, ast.For) or loop.orelse or node not in loop.body:
        return
    ends = ast.Return | ast.Break | ast.Continue | ast.Raise | ast.Yield | ast.YieldFrom | ast.Expr | ast.Await
    if node.orelse or len(node.body) != 1 or not isinstance(node.body[0], ast.Break):
        return
    if any(isinstance(n, ends) and n is not node.body[0] for n in ast.walk(loop)) or writes_to_objects(loop):
        return
    names, before = assigned_names(loop.body), names_before(source, loop)
    after = names_read_after(source, loop)
    if outer_names(source, loop) & set(names):
        return
    targets = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    if targets & (after | set(names)) or DRAWING.search(source.code(loop)):
        return
    kept = [n for n in names if n in before or n in after]
    done = unused_name(source, "is_done")
    at = loop.body.index(node)
    first, rest, lines = loop.body[:at], loop.body[at + 1 :], list[str]()
    lines += _kept_lines(source, first, kept, done)
    test = condition_of_tensors(node.test)
    lines.append(f"{done} = {test} if {done} is None else {done} | ({test})")
    lines += _kept_lines(source, rest, kept, done)
    indent = indent_of(source, loop)
    inner = indent_of(source, loop.body[0])
    start, end = source.span(loop.body[0])[0], source.span(loop.body[-1])[1]
    body = Edit(source.file, start, end, reindent("\n".join(lines), inner).lstrip())
    new = [f"{n} = None" for n in kept if n not in before]
    at_loop = source.span(loop)[0]
    above = Edit(source.file, at_loop, at_loop, "".join(f"{each}\n{indent}" for each in (*new, f"{done} = None")))
    yield *source.with_import(above, "torch"), body


def _kept_lines(source: Source, body: list[ast.stmt], kept: list[str], done: str) -> list[str]:
    """Return the lines of the statements ``body``, after which the variables ``kept`` that they assign have their old
    values where the tensor ``done`` is true.
    """
    names = [n for n in assigned_names(body) if n in kept]
    old = {n: unused_name(source, f"old_{n}") for n in names}
    lines = [f"{old[n]} = {n}" for n in names]
    if body:
        lines += reindent(whole_lines(source, body), "").splitlines()
    lines += [f"{n} = {n} if {done} is None else torch.where({done}, {old[n]}, {n})" for n in names]
    return lines


@of_statement
def hoist_import(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that import the module or name of ``node`` once, above the function, if a failure is caught.

    The function raises the ``ImportError`` itself where the import has failed, so that its handler runs as before.
    ``node`` must be an import of one name in a ``try`` statement that catches ``ImportError`` or
    ``ModuleNotFoundError``.
    """
    if not isinstance(node, ast.Import | ast.ImportFrom) or len(node.names) != 1 or node.names[0].name == "*":
        return
    around = source.parents().get(node)
    if not isinstance(around, ast.Try) or node not in around.body or enclosing_function(source, node) is None:
        return
    caught = [ast.unparse(h.type) if h.type else "Exception" for h in around.handlers]
    if not any(re.search(r"\b(ImportError|ModuleNotFoundError|Exception)\b", each) for each in caught):
        return
    # A handler of the narrower error does not catch the wider one.
    narrow = not any(re.search(r"\b(ImportError|Exception)\b", each) for each in caught)
    kind = "ModuleNotFoundError" if narrow else "ImportError"
    (alias,) = node.names
    bound = alias.asname or alias.name.partition(".")[0]
    name = unused_name(source, "IMPORTED_" + re.sub(r"\W+", "_", alias.name).upper())
    if isinstance(node, ast.ImportFrom):
        kept = f"from {'.' * node.level}{node.module or ''} import {alias.name} as {name}"
    elif alias.asname:
        kept = f"import {alias.name} as {name}"
    else:  # an import without a name binds the outermost package
        kept = f"import {alias.name}\n    {name} = {bound}"
    above = source.before_definition(node.lineno, f"try:\n    {kept}\nexcept {kind}:\n    {name} = None")
    indent = indent_of(source, node)
    text = f"if {name} is None:\n{indent}    raise {kind}({alias.name!r})\n{indent}{bound} = {name}"
    if above:
        yield above, source.replace(node, text)
