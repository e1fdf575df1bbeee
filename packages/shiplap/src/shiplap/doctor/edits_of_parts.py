"""Edits that compile a part of a function: what stands before or behind it runs as it is, in each call."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from shiplap.doctor.edits import Case, Edits, Source, indent_of, is_movable, whole_lines
from shiplap.doctor.edits_in_front import is_compiled_itself
from shiplap.doctor.edits_of_calls import is_call_of_torch, is_outermost
from shiplap.doctor.edits_of_compilation import find_compile_sites, with_option
from shiplap.doctor.edits_of_values import assigned_names, enclosing_function
from shiplap.doctor.scratch import Edit

# What reads the variables or the callers of the function in which it stands.
_OF_FRAME = re.compile(
    r"(?<![\w.])(locals|vars|super|eval|exec)\(|__class__|stacklevel|_getframe|\b(inspect|traceback)\b"
)
# The syntax nodes that bind their ``name``.
_NAMED = ast.ExceptHandler | ast.MatchAs | ast.MatchStar | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# The program reads something of the compiled object, or differentiates twice what it may call uncompiled.
_OF_COMPILED = re.compile(
    r"_orig_mod|_torchdynamo|state_dict|OptimizedModule|\b(is_compiling|named_\w+|create_graph|retain_graph)\b"
    r"|\b(gradgradcheck|hessian|hvp|vhp)\b"
)


def compile_part(case: Case) -> Iterator[Edits]:
    """Yield the edits that move the statements of the compiled function which stand before the statement at fault to a
    function of their own, and compile that in place of the whole. Then yield, as an alternative, those that do so with
    the statements behind it.

    The statement at fault is that of the compiled function itself which leads to the break, or all that mention the
    value which varied. Each statement runs as often and in the same order as before.
    """
    found = _find_function(case)
    if found is None or any(_OF_COMPILED.search(each.text) for each in case.sources()):
        return
    source, function = found
    first, last = _statements_at_fault(case, source, function)
    start = 1 if ast.get_docstring(function) is not None else 0
    if first > start:
        yield from _split(case, source, function, function.body[start:first], function.body[first:])
    if 0 <= last < len(function.body) - 1:
        yield from _split(case, source, function, function.body[last + 1 :], [])


def _find_function(case: Case) -> tuple[Source, ast.FunctionDef] | None:
    """Return ``(file, function)`` of the function around a line that leads to the break or recompile which is compiled
    itself, or None if there is none, or if it is defined in another function.
    """
    places = [(case.file, case.line)] if case.file is not None else []
    for file, line in (*places, *case.callers):
        source = case.source(file)
        node = source.statement(line)
        function = node if isinstance(node, ast.FunctionDef) else enclosing_function(source, node) if node else None
        if function is None or enclosing_function(source, function) is not None:
            continue
        if is_outermost(case, source, function.body[0]) or is_compiled_itself(case, source, function):
            return source, function
    return None


def _statements_at_fault(case: Case, source: Source, function: ast.FunctionDef) -> tuple[int, int]:
    """Return the positions in ``function`` of the first and the last statement at fault, or ``(0, -1)`` if none is."""
    lines = [line for file, line in ((case.file, case.line), *case.callers) if file == source.file]
    named = re.match(r"\w+(\.\w+)*", case.subject) if case.varies else None
    found = []
    for number, node in enumerate(function.body):
        inside = any(node.lineno <= line <= (node.end_lineno or node.lineno) for line in lines)
        mentions = {ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)}
        if named[0] in mentions if named is not None else inside:
            found.append(number)
    return (found[0], found[-1]) if found else (0, -1)


def _split(
    case: Case, source: Source, function: ast.FunctionDef, part: list[ast.stmt], rest: list[ast.stmt]
) -> Iterator[Edits]:
    """Yield the edits that compile the statements ``part`` of ``function`` alone. The statements ``rest`` follow them.
    If there are none, the function ends with the part.
    """
    others = [n for n in function.body if n not in part]
    passed, left = _names_passed(function, part, rest)
    name = f"{function.name}_part"
    while re.search(rf"\b{name}\b", source.text):
        name += "_"
    if passed is None or left is None or not _is_separable(source, function, part, others) or (rest and not left):
        return
    if not _weight(part):
        return
    # Where a graph breaks in a loop, torch compiles nothing of the function, so that no count of operations decides.
    if any(isinstance(n, ast.For | ast.While) for n in _walk(others)) and _weight(others) > _weight(part):
        return
    of_class = isinstance(source.parents().get(function), ast.ClassDef)
    if of_class and [a.arg for a in function.args.args[:1]] != ["self"]:
        return
    arguments = [n for n in passed if not (of_class and n == "self")]
    passed = ["self", *arguments] if of_class else arguments
    called = f"{'self.' if of_class else ''}{name}({', '.join(arguments)})"
    indent, inner = indent_of(source, function), indent_of(source, part[0])
    returned = f"\n{inner}return {', '.join(left)}" if rest else ""
    start, end = source.span(part[0])[0], source.span(part[-1])[1]
    target = f"{', '.join(left)} = " if rest else "return "
    at = source.offset(min([function.lineno, *(m.lineno for m in function.decorator_list)]), 0)
    for place, site, decorated in find_compile_sites(case):
        marked = decorated is not None and decorated.lineno == function.lineno
        if place.file != source.file or not (marked or is_call_of_torch(site)):
            continue
        if _is_optional(place, site):
            return
        given = site.keywords if isinstance(site, ast.Call) else []
        if any(not isinstance(k.value, ast.Constant) or k.arg in (None, "disable") for k in given):
            return
        options = ", ".join(f"{k.arg}={source.code(k.value)}" for k in given)
        text = f"{indent}@torch.compile({options})\n{indent}def {name}({', '.join(passed)}):\n"
        made = Edit(source.file, at, at, f"{text}{whole_lines(source, part)}{returned}\n\n")
        outer = with_option(source, site, "disable", "True")
        edits = made, source.replace_span(start, end, target + called), outer
        yield edits if source.imports("torch") else (source.after_imports("import torch"), *edits)


def _names_passed(
    function: ast.FunctionDef, part: list[ast.stmt], rest: list[ast.stmt]
) -> tuple[list[str] | None, list[str] | None]:
    """Return ``(variables that the statements part need, variables that they leave to the statements rest)``. One of
    them is None if such a variable may be missing, as where a condition decides whether it is assigned.
    """
    given, before = function.args, function.body[: function.body.index(part[0])]
    named = (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg)
    arguments, assigned = [a.arg for a in named if a is not None], _bound(part)
    # What is deleted, or caught by a handler, may be missing even where it was assigned.
    ended = {n.name for n in _walk([*before, *part]) if isinstance(n, ast.ExceptHandler)} | _names(before, ast.Del)
    always = [n for n in (*arguments, *_always_assigned(before)) if n not in ended]
    kept = {n for n in (*_always_assigned(part), *always) if n not in ended}
    # A variable of the module is found by both, also where a call has changed it in between.
    declared = {name for n in ast.walk(function) if isinstance(n, ast.Global) for name in n.names}
    elsewhere = [n for n in _bound(rest) if n not in assigned]
    known = dict.fromkeys([*arguments, *_bound(before), *elsewhere])
    passed = [n for n in known if n in _read(part) - declared]
    left = [n for n in assigned if n in _read(rest)]
    # A variable that the part may leave as it was is passed to it.
    passed += [n for n in left if n in always and n not in passed and n not in _always_assigned(part)]
    # One that only the part assigns would be one of the module in front of it.
    lost = (_read(before) & set(assigned)) - {*arguments, *_bound(before)}
    missing = lost or not set(passed) <= set(always) or not set(left) <= kept
    return (None, None) if missing else (passed, left)


def _bound(nodes: Sequence[ast.AST]) -> list[str]:
    """Return the names that the syntax nodes ``nodes`` bind or delete, in order and without repetitions: those of
    assignments, imports, definitions, handlers of exceptions and patterns.
    """
    found = list[str | None]()
    for n in _walk(nodes):
        if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load):
            found.append(n.id)
        elif isinstance(n, ast.alias):
            found.append((n.asname or n.name).partition(".")[0])
        elif isinstance(n, ast.MatchMapping):
            found.append(n.rest)
        elif isinstance(n, _NAMED):
            found.append(n.name)
    return list(dict.fromkeys(name for name in found if name is not None))


def _read(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the variables whose values the syntax nodes ``nodes`` read, change by an operator, or delete."""
    added = [n.target for n in _walk(nodes) if isinstance(n, ast.AugAssign)]
    return _names(nodes, ast.Load) | _names(nodes, ast.Del) | _names(added, ast.Store)


def _always_assigned(nodes: Sequence[ast.stmt]) -> list[str]:
    """Return the variables that each run of the statements ``nodes`` assigns."""
    found = list[str]()
    for n in nodes:
        if isinstance(n, ast.Assign | ast.AugAssign) or (isinstance(n, ast.AnnAssign) and n.value is not None):
            targets = n.targets if isinstance(n, ast.Assign) else [n.target]
            found += [name for name in assigned_names([n]) if name in _names(targets, ast.Store)]
        elif isinstance(n, ast.If) and n.orelse:
            found += [name for name in _always_assigned(n.body) if name in _always_assigned(n.orelse)]
        elif isinstance(n, ast.With) and all(ast.unparse(i.context_expr).startswith("torch.") for i in n.items):
            found += _always_assigned(n.body)
    return list(dict.fromkeys(found))


def _is_separable(source: Source, function: ast.FunctionDef, part: list[ast.stmt], others: list[ast.stmt]) -> bool:
    """Return whether the statements ``part`` of ``function`` mean the same in a function of their own, beside
    ``others``, those that stay.
    """
    leaves = (
        ast.Yield | ast.YieldFrom | ast.Await | ast.Global | ast.Nonlocal | ast.Delete | ast.Import | ast.ImportFrom
    )
    follows = any(n.lineno > part[-1].lineno for n in others)
    for n in _walk(part):
        if isinstance(n, leaves) or (follows and isinstance(n, ast.Return) and _is_own(source, function, n)):
            return False
        if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.NamedExpr):
            return False
    if any(isinstance(n, ast.Yield | ast.YieldFrom | ast.Await | ast.Nonlocal) for n in _walk(others)):
        return False
    declared = {name for n in _walk(others) if isinstance(n, ast.Global) for name in n.names}
    # A function that one side defines, or an iterator, would keep its own variables.
    lazy = ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef | ast.GeneratorExp
    for one, other in ((part, others), (others, part)):
        captured = _names([n for n in _walk(one) if isinstance(n, lazy)], ast.Load)
        if captured & _names(other, ast.Store):
            return False
    of_frame = _OF_FRAME.search(source.code(function))
    return is_movable(source, part) and not declared & {*assigned_names(part)} and of_frame is None


def _is_optional(source: Source, site: ast.expr) -> bool:
    """Return whether a condition of the program, such as an option, decides whether ``site`` compiles anything."""
    parents, tests = source.parents(), list[ast.expr]()
    around: ast.AST = site
    while around in parents:
        around = parents[around]
        tests += [around.test] if isinstance(around, ast.If | ast.IfExp) else []
    return any("__name__" not in ast.unparse(test) for test in tests)


def _weight(nodes: Sequence[ast.AST]) -> int:
    """Return the number of calls and operators in the syntax nodes ``nodes``. Those of a loop count four times."""
    found = 0
    for n in nodes:
        inner = _weight(list(ast.iter_child_nodes(n))) + isinstance(n, ast.Call | ast.BinOp)
        found += inner * (4 if isinstance(n, ast.For | ast.While | ast.comprehension) else 1)
    return found


def _is_own(source: Source, function: ast.FunctionDef, node: ast.AST) -> bool:
    """Return whether ``node`` is in ``function`` itself rather than in one that it defines."""
    return enclosing_function(source, node) is function


def _walk(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield the syntax nodes in ``nodes``."""
    for each in nodes:
        yield from ast.walk(each)


def _names(nodes: Sequence[ast.AST], context: type[ast.expr_context]) -> set[str]:
    """Return the variables that the syntax nodes ``nodes`` use in ``context``, which is ``ast.Load`` or another one."""
    return {n.id for n in _walk(nodes) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}
