"""Edits that compile a part of a function: what stands before or behind it runs as it is, in each call."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shiplap.doctor.edits import Case, Edits, Source, indent_of, is_movable, reindent, whole_lines
from shiplap.doctor.edits_in_front import is_compiled_itself
from shiplap.doctor.edits_of_calls import is_call_of_torch, is_outermost
from shiplap.doctor.edits_of_compilation import find_compile_sites, with_option
from shiplap.doctor.edits_of_values import assigned_names, enclosing_function
from shiplap.doctor.scratch import Edit

# Modes and backends that capture CUDA graphs: each call of a compiled function overwrites what an earlier one returned.
_CAPTURING = ("reduce-overhead", "max-autotune", "cudagraphs")
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


@dataclass(frozen=True)
class _Part:
    """Consecutive statements of a function that get a function of their own.

    Attributes:
        nodes: the statements.
        others: the syntax nodes of the function's body beside them.
        before: the statements of the function's body in front of them, if they are in that body themselves, and else
            all of ``others``: what is in a loop may run in front of them as well.
        rounds: how often they count: four times for each loop around them.
    """

    nodes: list[ast.stmt]
    others: list[ast.AST]
    before: list[ast.AST]
    rounds: int


def compile_part(case: Case) -> Iterator[Edits]:
    """Yield the edits that move statements of the compiled function, or of a function that it calls, to functions of
    their own and compile these in place of the whole.

    The statement at fault stays: that of the function which leads to the break, or all that mention the value which
    varied. The alternatives move what stands in front of it and behind it, also inside of the loops, conditions and
    ``with`` statements around it, then the one or the other, and then what stands beside it there alone. Each
    statement runs as often and in the same order as before.
    """
    if any(_OF_COMPILED.search(each.text) for each in case.sources()):
        return
    groups = list[tuple[Source, ast.FunctionDef, list[_Part]]]()
    for source, function in _find_functions(case):
        seen = list[tuple[list[list[ast.stmt]], tuple[str, ...]]]()
        for parts, more, looped in _choices(case, source, function):
            if ([p.nodes for p in parts], more) in seen:
                continue
            # Of several functions on the way to the statement, all parts are compiled at last.
            groups += [(source, function, parts)] if not seen else []
            seen.append(([p.nodes for p in parts], more))
            # Where a graph breaks in a loop, torch compiles nothing of the function, so that no operations are counted.
            weight = sum(_weight(p.nodes) * p.rounds for p in parts)
            if not looped or _weight(function.body) - weight <= weight:
                yield from _split(case, [(source, function, parts)], more)
    if len(groups) > 1 and all(source.file == groups[0][0].file for source, _, _ in groups):
        yield from _split(case, groups, ())


def _choices(
    case: Case, source: Source, function: ast.FunctionDef
) -> Iterator[tuple[list[_Part], tuple[str, ...], bool]]:
    """Yield ``(parts, options, looped)`` of the alternatives for ``function``: its parts, further options with which
    they are compiled, and whether a loop is around the statement at fault.
    """
    blocks = list(_blocks_at_fault(case, source, function))
    body, first, last = blocks[0]
    start = 1 if ast.get_docstring(function) is not None else 0
    front, behind = body[start:first], body[last + 1 :] if last >= 0 else []
    inner = [run for block, begin, end in blocks[1:] for run in _runs(block, begin, end)]
    alone = [run for block, begin, end in blocks[-1:] for run in _runs(block, begin, end)]
    choices: list[tuple[list[list[ast.stmt]], tuple[str, ...]]]
    choices = [([front, *inner, behind], ()), ([front], ()), ([behind], ()), (alone if inner else [], ())]
    # A number that the statement at fault makes for a part may vary.
    choices += [(choices[0][0], ("dynamic=True",))] if case.cause in ("item", "system", "numpy") else []
    looped = any(isinstance(n, ast.For | ast.While) for b, begin, end in blocks for n in b[begin : end + 1])
    for choice, more in choices:
        parts = [_part_of(function, nodes) for nodes in choice if _weight(nodes)]
        parts = [p for p in parts if _passes(source, function, p)]
        parts = [p for p in parts if all(_gets(function, p, other) for other in parts if other is not p)]
        if parts:
            yield parts, more, looped


def _find_functions(case: Case) -> Iterator[tuple[Source, ast.FunctionDef]]:
    """Yield ``(file, function)`` of the functions on the way to the break or recompile, from the compiled one on. Yield
    nothing if another function may call that one in compiled code, and leave out functions that are defined in others.
    """
    found = list[tuple[Source, ast.FunctionDef]]()
    places = [(case.file, case.line)] if case.file is not None else []
    for file, line in (*places, *case.callers):
        source = case.source(file)
        node = source.statement(line)
        function = node if isinstance(node, ast.FunctionDef) else enclosing_function(source, node) if node else None
        if function is None or enclosing_function(source, function) is not None:
            continue
        if all((source.file, function.lineno) != (s.file, f.lineno) for s, f in found):  # it may call itself
            found.append((source, function))
        if is_outermost(case, source, function.body[0]) or is_compiled_itself(case, source, function):
            yield from reversed(found)
            return


def _blocks_at_fault(
    case: Case, source: Source, function: ast.FunctionDef
) -> Iterator[tuple[list[ast.stmt], int, int]]:
    """Yield ``(block, first, last)`` of the body of ``function`` and of the loops, conditions and ``with`` statements
    around the statement at fault, from the outermost on. The statements at fault are those from the position ``first``
    to ``last``. If none is, they are 0 and -1.
    """
    block: list[ast.stmt] = function.body
    while block:
        first, last = _statements_at_fault(case, source, block)
        yield block, first, last
        node = block[first] if first == last else None
        inner = [node.body, node.orelse] if isinstance(node, ast.For | ast.While | ast.If) else []
        inner = [node.body] if isinstance(node, ast.With) and _are_settings(node) else inner
        inner = [block for each in inner for block in _without_elif(source, each)]
        block = next((each for each in inner if _statements_at_fault(case, source, each)[1] >= 0), [])
        # The head of the statement is at fault, such as a condition on values, and all of its body stands beside it.
        yield from ((each, 0, -1) for each in inner if each and not block)


def _without_elif(source: Source, block: list[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of an ``elif``, and of those behind it, if ``block`` is one, and else ``block`` itself."""
    node = block[0] if block else None
    if isinstance(node, ast.If) and source.code(node).startswith("elif"):
        yield node.body
        yield from _without_elif(source, node.orelse)
    else:
        yield block


# Context managers that compiled code finds as it would have entered them.
_SETTINGS = re.compile(r"torch\.(\w+\.)*(no_grad|enable_grad|set_grad_enabled|autocast|fork_rng|record_function)\(")


def _are_settings(node: ast.With) -> bool:
    """Return whether ``node`` enters nothing but settings of torch, such as ``no_grad``."""
    return all(_SETTINGS.match(ast.unparse(i.context_expr)) for i in node.items)


def _statements_at_fault(case: Case, source: Source, block: list[ast.stmt]) -> tuple[int, int]:
    """Return the positions in ``block`` of the first and the last statement at fault, or ``(0, -1)`` if none is."""
    lines = [line for file, line in ((case.file, case.line), *case.callers) if file == source.file]
    named = re.match(r"\w+(\.\w+)*", case.subject) if case.varies else None
    found = []
    for number, node in enumerate(block):
        inside = any(node.lineno <= line <= (node.end_lineno or node.lineno) for line in lines)
        mentions = {ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)}
        if named[0] in mentions if named is not None else inside:
            found.append(number)
    return (found[0], found[-1]) if found else (0, -1)


def _runs(block: list[ast.stmt], first: int, last: int) -> Iterator[list[ast.stmt]]:
    """Yield consecutive statements of ``block``, the body of a loop, condition or ``with`` statement, that can be moved
    to a function: none of those from the position ``first`` to ``last``, none that leaves the block, and none that only
    counts or makes a call other than of a method in place. A list that grows, or a number that varies, would be
    compiled again in each round.
    """
    run = list[ast.stmt]()
    for number, node in enumerate(block):
        counts = isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant)
        called = ast.unparse(node.value.func) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else ""
        calls = isinstance(node, ast.Expr) and not re.search(r"[^_]_$", called)
        if first <= number <= last or counts or calls or _leaves(node):
            yield run
            run = []
        else:
            run.append(node)
    yield run


def _leaves(node: ast.stmt) -> bool:
    """Return whether ``node`` may leave the function, or a loop around it."""
    inner = {n for loop in ast.walk(node) if isinstance(loop, ast.For | ast.While) for n in _walk(loop.body)}
    nodes = list(ast.walk(node))
    ended = any(isinstance(n, ast.Break | ast.Continue) and n not in inner for n in nodes)
    return ended or any(isinstance(n, ast.Return | ast.Raise) for n in nodes)


def _part_of(function: ast.FunctionDef, nodes: list[ast.stmt]) -> _Part:
    """Return the part of ``function`` that the consecutive statements ``nodes`` are."""
    others = [n for each in function.body for n in _beside(each, nodes)]
    if nodes[0] in function.body:
        before: list[ast.AST] = [*function.body[: function.body.index(nodes[0])]]
        return _Part(nodes, others, before, 1)
    around = [n for n in _walk(function.body) if isinstance(n, ast.For | ast.While)]
    loops = [n for n in around if any(each is nodes[0] for each in ast.walk(n))]
    return _Part(nodes, others, others, 4 ** len(loops))


def _beside(node: ast.AST, nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """Yield the syntax nodes in ``node`` that contain none of the statements ``nodes`` and are in none of them."""
    if node in nodes:
        return
    if all(each is not nodes[0] for each in ast.walk(node)):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _beside(child, nodes)


def _passes(source: Source, function: ast.FunctionDef, part: _Part) -> bool:
    """Return whether ``part`` of ``function`` can be a function that gets and returns its variables."""
    passed, left = _names_passed(function, part)
    ends = _is_last(function, part)
    nested = part.nodes[0] not in function.body
    return passed is not None and (ends or nested or bool(left)) and _is_separable(source, function, part)


def _gets(function: ast.FunctionDef, part: _Part, other: _Part) -> bool:
    """Return whether the part ``other`` leaves each variable that it assigns and that ``part`` gets."""
    passed, (_, left) = _names_passed(function, part)[0], _names_passed(function, other)
    return set(passed or []) & set(_bound(other.nodes)) <= set(left)


def _is_last(function: ast.FunctionDef, part: _Part) -> bool:
    """Return whether ``function`` ends with ``part``."""
    return part.nodes[-1] is function.body[-1]


def _split(
    case: Case, groups: Sequence[tuple[Source, ast.FunctionDef, list[_Part]]], more: tuple[str, ...]
) -> Iterator[Edits]:
    """Yield the edits that compile parts of functions alone, with the further options ``more``. Yield nothing if the
    program has such an option itself. ``groups`` has the file, the function and the parts of each function.
    """
    for source, function, _ in groups:
        of_class = isinstance(source.parents().get(function), ast.ClassDef)
        if of_class and [a.arg for a in function.args.args[:1]] != ["self"]:
            return
    for place, site, decorated in find_compile_sites(case):
        if place.file != groups[0][0].file or not (decorated is not None or is_call_of_torch(site)):
            continue
        given = site.keywords if isinstance(site, ast.Call) else []
        fixed = all(isinstance(k.value, ast.Constant) and k.arg not in (None, "disable") for k in given)
        if _is_optional(place, site) or not fixed or any(o.startswith(f"{k.arg}=") for k in given for o in more):
            return
        once = [len(parts) == 1 and parts[0].nodes[0] in function.body for _, function, parts in groups]
        if once != [True] and any(isinstance(k.value, ast.Constant) and k.value.value in _CAPTURING for k in given):
            return
        options = ", ".join([*(f"{k.arg}={place.code(k.value)}" for k in given), *more])
        edits, inserted = [with_option(place, site, "disable", "True")], ""
        for source, function, parts in groups:
            text, name = "", f"{function.name}_part"
            for part in parts:
                while re.search(rf"\b{name}\b", source.text + inserted + text):
                    name += "_"
                made, called = _moved(source, function, part, name, options)
                text += made
                edits.append(called)
            at = source.offset(min([function.lineno, *(m.lineno for m in function.decorator_list)]), 0)
            edits.append(Edit(source.file, at, at, text))
            inserted += text
        yield tuple(edits) if place.imports("torch") else (place.after_imports("import torch"), *edits)


def _moved(source: Source, function: ast.FunctionDef, part: _Part, name: str, options: str) -> tuple[str, Edit]:
    """Return ``(code, edit)`` of the function ``name`` that has the statements of ``part`` and is compiled with the
    source code ``options``, and of its call in place of them.
    """
    passed, left = _names_passed(function, part)
    of_class = isinstance(source.parents().get(function), ast.ClassDef)
    arguments = [n for n in passed or [] if not (of_class and n == "self")]
    called = f"{'self.' if of_class else ''}{name}({', '.join(arguments)})"
    parameters = ", ".join(["self", *arguments] if of_class else arguments)
    indent, ends = indent_of(source, function), _is_last(function, part)
    inner = indent + indent_of(source, function.body[0]).removeprefix(indent)
    body = reindent(whole_lines(source, part.nodes), inner)
    returned = "" if ends or not left else f"\n{inner}return {', '.join(left)}"
    target = "return " if ends else f"{', '.join(left)} = " if left else ""
    text = f"{indent}@torch.compile({options})\n{indent}def {name}({parameters}):\n{body}{returned}\n\n"
    start, end = source.span(part.nodes[0])[0], source.span(part.nodes[-1])[1]
    return text, source.replace_span(start, end, target + called)


def _names_passed(function: ast.FunctionDef, part: _Part) -> tuple[list[str] | None, list[str]]:
    """Return ``(variables that the statements of part need, variables that they leave to other statements)``. The first
    one is None if such a variable may be missing, as where a condition decides whether it is assigned.
    """
    given, nodes, ends = function.args, part.nodes, _is_last(function, part)
    named = (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg)
    arguments, assigned = [a.arg for a in named if a is not None], _bound(nodes)
    # What is deleted, or caught by a handler, may be missing even where it was assigned.
    handlers = [n for n in _walk([*part.before, *nodes]) if isinstance(n, ast.ExceptHandler)]
    ended = {n.name for n in handlers} | _names(part.before, ast.Del)
    certain = _certain_names(function, part)
    always = [n for n in (*arguments, *certain) if n not in ended]
    made = _always_assigned(nodes)
    kept = {n for n in (*made, *always) if n not in ended}
    # A variable of the module is found by both, also where a call has changed it in between.
    declared = {name for n in ast.walk(function) if isinstance(n, ast.Global) for name in n.names}
    nested = nodes[0] not in function.body
    elsewhere = [n for n in _bound(part.others) if nested or n not in assigned]
    known = dict.fromkeys([*arguments, *_bound(part.before), *elsewhere])
    needed = _read_first(nodes) if nested else _read(nodes)
    passed = [n for n in known if n in needed - declared]
    used = _read(part.others) | needed if nested else _read([n for n in part.others if n not in part.before])
    left = [] if ends else [n for n in assigned if n in used]
    # A variable that the part may leave as it was is passed to it.
    passed += [n for n in left if n in always and n not in passed and n not in made]
    # One that only the part assigns would be one of the module in front of it.
    lost = (_read(part.before) & set(assigned)) - {*arguments, *_bound(part.before), *(left if nested else ())}
    # One that an earlier round has left, and that only the part assigns, is missing in the first one.
    lost |= (needed & set(assigned)) - {*passed, *declared} if nested else set()
    missing = lost or not set(passed) <= set(always) or not set(left) <= kept
    return (None if missing else passed), left


def _certain_names(function: ast.FunctionDef, part: _Part) -> list[str]:
    """Return the variables that are assigned whenever ``part`` of ``function`` begins, besides the arguments."""
    found, block = list[str](), function.body
    while part.nodes[0] not in block:
        around = next(n for n in block if any(each is part.nodes[0] for each in ast.walk(n)))
        found += _always_assigned(block[: block.index(around)])
        if isinstance(around, ast.For) and any(each is part.nodes[0] for each in _walk(around.body)):
            found += _names([around.target], ast.Store)
        found += _names(around.items, ast.Store) if isinstance(around, ast.With) else []
        inner = [getattr(around, name, []) for name in ("body", "orelse")]
        block = next(b for b in inner if any(each is part.nodes[0] for each in _walk(b)))
    return found + _always_assigned(block[: block.index(part.nodes[0])])


def _read_first(nodes: Sequence[ast.stmt]) -> set[str]:
    """Return the variables that the statements ``nodes`` may read before they assign them."""
    found, made = set[str](), set[str]()
    for node in nodes:
        if isinstance(node, ast.For):
            inner = _read_first(node.body) - _names([node.target], ast.Store)
            read = inner | _read([node.target, node.iter, *node.orelse])
        elif isinstance(node, ast.If):
            read = _read([node.test]) | _read_first(node.body) | _read_first(node.orelse)
        else:
            read = _read([node])
        found |= read - made
        made |= set(_always_assigned([node]))
    return found


def _bound(nodes: Sequence[ast.AST]) -> list[str]:
    """Return the names that the syntax nodes ``nodes`` bind or delete, in order and without repetitions: those of
    assignments, imports, definitions, handlers of exceptions and patterns. Those of comprehensions are their own.
    """
    found = list[str | None]()
    own = {n for c in _walk(nodes) if isinstance(c, ast.comprehension) for n in ast.walk(c.target)}
    for n in _walk(nodes):
        if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load) and n not in own:
            found.append(n.id)
        elif isinstance(n, ast.alias):
            found.append((n.asname or n.name).partition(".")[0])
        elif isinstance(n, ast.MatchMapping):
            found.append(n.rest)
        elif isinstance(n, _NAMED):
            found.append(n.name)
    return list(dict.fromkeys(name for name in found if name is not None))


def _read(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the variables whose values the syntax nodes ``nodes`` read, change by an operator, or delete. In the body
    of a loop and in a comprehension, the variables of the loop have its values.
    """
    found = set[str]()
    for node in nodes:
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.For):
            found |= _read([node.target, node.iter, *node.orelse])
            found |= _read(node.body) - _names([node.target], ast.Store)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            own = {name for c in node.generators for name in _names([c.target], ast.Store)}
            found |= _read([node.generators[0].iter]) | (_read(children) - own)
        elif isinstance(node, ast.Name):
            found |= set() if isinstance(node.ctx, ast.Store) else {node.id}
        else:
            found |= _read(children) | (_names([node.target], ast.Store) if isinstance(node, ast.AugAssign) else set())
    return found


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


def _is_separable(source: Source, function: ast.FunctionDef, part: _Part) -> bool:
    """Return whether the statements of ``part`` mean the same in a function of their own, beside the others."""
    nodes, others = part.nodes, part.others
    leaves = (
        ast.Yield | ast.YieldFrom | ast.Await | ast.Global | ast.Nonlocal | ast.Delete | ast.Import | ast.ImportFrom
    )
    follows = not _is_last(function, part)
    for n in _walk(nodes):
        if isinstance(n, leaves) or (follows and isinstance(n, ast.Return) and _is_own(source, function, n)):
            return False
        if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.NamedExpr):
            return False
    if any(isinstance(n, ast.Yield | ast.YieldFrom | ast.Await | ast.Nonlocal) for n in _walk(others)):
        return False
    declared = {name for n in _walk(others) if isinstance(n, ast.Global) for name in n.names}
    # A function that one side defines, or an iterator, would keep its own variables.
    lazy = ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef | ast.GeneratorExp
    for one, other in ((nodes, others), (others, nodes)):
        captured = _names([n for n in _walk(one) if isinstance(n, lazy)], ast.Load)
        if captured & _names(other, ast.Store):
            return False
    # The functions that the rounds of a loop make have the variables of the last one in common.
    made = [n for n in _walk(nodes) if isinstance(n, ast.Lambda)]
    if part.rounds > 1 and _names(made, ast.Load) & _names(nodes, ast.Store):
        return False
    of_frame = _OF_FRAME.search(source.code(function))
    return is_movable(source, nodes) and not declared & {*assigned_names(nodes)} and of_frame is None


def _is_optional(source: Source, site: ast.expr) -> bool:
    """Return whether a condition of the program, such as an option, decides whether ``site`` compiles anything."""
    parents, tests = source.parents(), list[ast.expr]()
    around: ast.AST = site
    while around in parents:
        around = parents[around]
        tests += [around.test] if isinstance(around, ast.If | ast.IfExp) else []
    return any("__name__" not in ast.unparse(test) for test in tests)


def _weight(nodes: Sequence[ast.AST]) -> int:
    """Return the number of calls and operators in the syntax nodes ``nodes``. Those of a loop count four times, and
    calls of builtin functions and of methods of lists not at all.
    """
    found = 0
    for n in nodes:
        called = ast.unparse(n.func).rpartition(".") if isinstance(n, ast.Call) else ("", "", "")
        of_python = (called[0] == "" and hasattr(builtins, called[2])) or called[2] in ("append", "extend")
        counted = isinstance(n, ast.BinOp) or (isinstance(n, ast.Call) and not of_python)
        inner = _weight(list(ast.iter_child_nodes(n))) + counted
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
