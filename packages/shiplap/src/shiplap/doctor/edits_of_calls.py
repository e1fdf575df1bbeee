"""Edits of calls: how arguments are passed, and which calls are made later."""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections.abc import Collection, Iterator, Sequence

from shiplap.doctor.clocks import reads_clock
from shiplap.doctor.edits import (
    EFFECT_NAME,
    Case,
    Editor,
    Edits,
    Source,
    calls_on_line,
    guarded_statement,
    of_statement,
    reindent,
)
from shiplap.doctor.edits_of_compilation import find_compile_sites
from shiplap.doctor.edits_of_functions import DRAWING, unused_name, writes_to_objects
from shiplap.doctor.edits_of_values import enclosing_function, variables_of_functions
from shiplap.doctor.scratch import Edit

# Helpers that the edits insert into the program. A compiled module stays a module, since the program may read its
# attributes.
_CONTIGUOUS = '''
def contiguous_arguments(compiled):
    """Return ``compiled``, whose calls get contiguous copies of tensors that are not contiguous."""
    import functools

    inner = compiled.forward if isinstance(compiled, torch.nn.Module) else compiled

    @functools.wraps(inner, updated=())
    def call(*args, **kwargs):
        made = [a.contiguous() if isinstance(a, torch.Tensor) else a for a in (*args, *kwargs.values())]
        return inner(*made[: len(args)], **dict(zip(kwargs, made[len(args) :])))

    if isinstance(compiled, torch.nn.Module):
        compiled.forward = call
        return compiled
    return call
'''

_FIRST_CALL = '''
def first_call_uncompiled(compiled):
    """Return ``compiled``, whose first call runs uncompiled and creates what later calls find."""
    import functools

    inner = compiled.forward if isinstance(compiled, torch.nn.Module) else compiled
    called = []

    @functools.wraps(inner, updated=())
    def call(*args, **kwargs):
        if called:
            return inner(*args, **kwargs)
        called.append(True)
        with torch.compiler.set_stance("force_eager"):
            return inner(*args, **kwargs)

    if isinstance(compiled, torch.nn.Module):
        compiled.forward = call
        return compiled
    return call
'''

_LISTED = '''
def {helper}(compiled):
    """Return ``compiled``, whose calls get a list in place of an iterator ``{name}``."""
    import collections.abc
    import functools

    inner = compiled.forward if isinstance(compiled, torch.nn.Module) else compiled

    def listed(value):
        return list(value) if isinstance(value, collections.abc.Iterator) else value

    @functools.wraps(inner, updated=())
    def call(*args, **kwargs):
        args = [listed(each) if place == {place} else each for place, each in enumerate(args)]
        return inner(*args, **{{key: listed(each) if key == "{name}" else each for key, each in kwargs.items()}})

    if isinstance(compiled, torch.nn.Module):
        compiled.forward = call
        return compiled
    return call
'''


def _wrap_compiled(name: str, helper: str) -> Editor:
    """Return an editor that inserts the function ``helper``, called ``name``, and applies it to what is compiled.

    An editor is a function that proposes edits for a break or recompile.
    """

    def edit(case: Case) -> Iterator[Edits]:
        """Yield the edits that apply the helper of the enclosing function to the function at fault, if a decorator
        compiles it. Yield, as an alternative, those that apply it to the results of the calls of ``torch.compile``.
        """
        decorated: list[tuple[Source, Edit]] = []
        called: list[tuple[Source, Edit]] = []
        for source, node, function in find_compile_sites(case):
            if function is not None:
                at = source.offset(node.lineno, 0)
                indent = source.text[at : source.span(node)[0] - 1]  # what precedes the sign of the decorator
                decorated.append((source, Edit(source.file, at, at, f"{indent}@{name}\n")))
            elif is_call_of_torch(node):
                called.append((source, source.replace(node, f"{name}({source.code(node)})")))
        for group in (decorated, called):
            if group:
                yield with_helper(group, name, helper)

    return edit


wrap_contiguous = _wrap_compiled("contiguous_arguments", _CONTIGUOUS)
wrap_first_call = _wrap_compiled("first_call_uncompiled", _FIRST_CALL)


@of_statement
def wrap_listed(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that pass a list in place of an iterator, for a loop ``node`` over an argument.

    The loop must use the iterator up, and the compiled function neither write to an object nor draw numbers, which the
    iterator may read, or draw as well. A module that it calls may draw numbers, so that no iterator of the program may.
    """
    function = enclosing_function(source, node)
    if not isinstance(node, ast.For) or not isinstance(node.iter, ast.Name) or function is None:
        return
    given = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    uses = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == node.iter.id]
    leaves = any(isinstance(n, ast.Break | ast.Return | ast.Raise) for n in ast.walk(node))
    plain = not writes_to_objects(function) and not DRAWING.search(source.code(function))
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    consumed = node.iter.id in given and len(uses) == 1 and node in function.body and not leaves
    if not consumed or not plain or calls or _an_iterator_draws(case) or not is_outermost(case, source, node):
        return
    # A compiled module, or method of an object, gets its arguments without the object.
    bound = given[0] == "self" and not _is_decorated(function)
    place, name = given.index(node.iter.id) - bound, node.iter.id
    helper = f"with_listed_{name}_{place}"
    yield from _wrap_compiled(helper, _LISTED.format(helper=helper, name=name, place=place))(case)


def _an_iterator_draws(case: Case) -> bool:
    """Return whether a generator or an iterator of the program may draw random numbers itself."""
    for source in case.sources():
        for n in ast.walk(source.tree):
            lazy = isinstance(n, ast.FunctionDef) and (
                n.name == "__next__" or any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(n))
            )
            mapped = isinstance(n, ast.Call) and ast.unparse(n.func) in ("map", "filter", "iter")
            if (lazy or mapped or isinstance(n, ast.GeneratorExp)) and DRAWING.search(ast.unparse(n)):
                return True
    return False


def is_call_of_torch(node: ast.expr) -> bool:
    """Return whether an expression is a call ``torch.compile(f, ...)``. A method ``compile`` of a module returns
    nothing.
    """
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.compile" and len(node.args) == 1


def with_helper(edits: list[tuple[Source, Edit]], name: str, helper: str) -> Edits:
    """Return ``edits``, each with its file, and in front of them the edits that insert the function ``helper``, called
    ``name``, into each of these files that does not have it yet.
    """
    sources = {source.file: source for source, _ in edits}
    inserted = []
    for source in sources.values():
        missing = "" if source.imports("torch") else "import torch\n"
        if f"def {name}(" not in source.text:
            inserted.append(source.after_imports(f"{missing}\n{helper}\n"))
    return *inserted, *(edit for _, edit in edits)


def in_outermost_function(editor: Editor) -> Editor:
    """Return an editor that proposes the edits of ``editor`` for lines of the outermost compiled function alone.

    Torch moves calls behind the graph, but loses those in functions that the outermost one calls (torch 2.13).
    An editor is a function that proposes edits for a break or recompile.
    """

    def edit(case: Case) -> Iterator[Edits]:
        """Yield the edits of ``editor`` of the enclosing function if the line is in the outermost compiled function."""
        node = case.own.statement(case.line) if case.own is not None else None
        if case.own is not None and node is not None and is_outermost(case, case.own, node):
            yield from editor(case)

    return edit


def is_outermost(case: Case, source: Source, node: ast.stmt | ast.expr) -> bool:
    """Return whether ``node`` is known to be in the outermost compiled function: that has the decorator
    ``torch.compile``, or the break or recompile came in the compilation of no other one. It is not outermost if another
    compiled function may call it.
    """
    function = enclosing_function(source, node)
    if function is None or may_be_inlined(case, function):
        return False
    return _is_decorated(function) or set(case.frames) == {(source.file, function.lineno)}


def _is_decorated(function: ast.FunctionDef) -> bool:
    """Return whether ``function`` has the decorator ``torch.compile``."""
    return any(re.match(r"torch\.compile\b", ast.unparse(mark)) for mark in function.decorator_list)


def may_be_inlined(case: Case, function: ast.FunctionDef) -> bool:
    """Return whether a compiled function other than ``function`` may call it, directly or through others.

    All functions of the program count that name it, or that name one of these. The methods among them count as
    compiled, since a module may be compiled anywhere, and so do functions that an argument of ``compile`` names.
    """
    defined, methods, given = list[ast.FunctionDef](), set[ast.AST](), set[str]()
    for source in case.sources():
        for n in ast.walk(source.tree):
            if isinstance(n, ast.FunctionDef):
                defined.append(n)
            elif isinstance(n, ast.ClassDef):
                methods.update(n.body)
            elif isinstance(n, ast.Call) and ast.unparse(n.func).endswith("compile"):
                given |= {name for value in n.args for name in _names_in(value)}
    named = {each: _names_in(each) for each in defined if each.name != function.name}
    names, callers = {function.name}, list[ast.FunctionDef]()
    while found := [each for each in named if each not in callers and named[each] & names]:
        callers += found
        names |= {each.name for each in found}
    # A call by a name that the program computes shows only in the frames of the break.
    frames = [(case.source(file), line) for file, line in case.callers]
    around = [enclosing_function(s, node) for s, line in frames if (node := s.statement(line)) is not None]
    callers += [each for each in around if each is not None and each.name != function.name]
    return any(each in methods or each.name in given or _is_decorated(each) for each in callers)


def _names_in(node: ast.AST) -> set[str]:
    """Return the names of variables and attributes in the syntax node ``node``."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def call_later(case: Case) -> Iterator[Edits]:
    """Yield the edits that run statements which only make a call behind the compiled part around them.

    They are the statement at fault, or those that add to the list or set which has varied. A function of the module
    runs the statement, with the tensors and numbers that it uses. The statement must be in the outermost function.
    """
    if case.cause != "length":
        node = case.own.statement(case.line) if case.own is not None else None
        if case.own is not None and node is not None:
            yield from _moved_statements(case, case.own, [node])
        return
    added = re.compile(rf"{re.escape(case.subject)}\.(append|appendleft|add|insert|update|extend)")
    for source in case.sources():
        calls = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call)]
        parents = source.parents()
        yield from _moved_statements(case, source, [parents[n] for n in calls if added.fullmatch(ast.unparse(n.func))])


def _moved_statements(case: Case, source: Source, nodes: Sequence[ast.AST]) -> Iterator[Edits]:
    """Yield the edits that let torch move the statements ``nodes`` behind the graph, unless one of them has to stay.

    Torch moves no call with a number that varies. As alternatives, one of the variables that are used is passed as a
    tensor, and becomes a number again in the call.
    """
    used = (variables_of_functions(source, node) for node in nodes if isinstance(node, ast.Expr))
    named, naming = _name_of_self(case, source, nodes[0]) if nodes else ("", ())
    for number in ("", *dict.fromkeys(name for names in used for name in names if name != "self")):
        helpers, edits = dict[str, str](), list[Edit]()
        for node in nodes:
            if not isinstance(node, ast.Expr) or not may_run_later(case, source, node):
                return
            made = later_function(source, node, helpers, number=number, named=named)
            if made is None:
                return
            name, arguments, helpers[name] = made
            edits.append(source.replace(node, f"{name}({', '.join(arguments)})"))
        if edits:
            missing = "" if source.imports("torch") else "import torch\n"
            naming = naming if any(re.search(rf"\b{named}\b", code) for code in helpers.values()) else ()
            yield source.after_imports(missing + "".join(helpers.values())), *edits, *naming


def _name_of_self(case: Case, source: Source, node: ast.AST) -> tuple[str, Edits]:
    """Return ``(name, edits)`` of the variable of the module level that holds the only object of the class around the
    statement ``node``, which has the form ``self.a.b(...)``. The edits give a name to an object that is passed to
    ``torch.compile`` without one.

    Return an empty string for other statements, if the function uses ``self.a`` besides, and if there may be several
    objects of the class.
    """
    parents, around = source.parents(), node
    while around in parents and not isinstance(around, ast.ClassDef):
        around = parents[around]
    function, call = enclosing_function(source, node), getattr(node, "value", None)
    owner = re.match(r"self\.\w+(?=\.\w+\()", ast.unparse(call)) if isinstance(call, ast.Call) else None
    if not isinstance(around, ast.ClassDef) or function is None or owner is None:
        return "", ()
    # What the function reads of the object besides would not have changed yet.
    uses = [n for n in ast.walk(function) if isinstance(n, ast.Attribute) and ast.unparse(n) == owner[0]]
    if len(uses) > 1:
        return "", ()
    return only_object(case, source, around)


def only_object(case: Case, source: Source, around: ast.ClassDef) -> tuple[str, Edits]:
    """Return ``(name, edits)`` of the variable of the module level that holds the only object of the class ``around``.
    The edits give a name to an object that is passed to ``torch.compile`` without one.

    Return an empty string if it is not known that there is one object: if the program creates the class at several
    places, in a function or a loop, derives another class from it, or copies objects.
    """
    parents = source.parents()
    others = [each for each in case.sources() if each.file != source.file]
    copied = any(re.search(r"\bcopy\b|\bdeepcopy\b", each.text) for each in (source, *others))
    elsewhere = any(re.search(rf"\b{around.name}\b", each.text) for each in others)
    mentions = [n for n in ast.walk(source.tree) if isinstance(n, ast.Name) and n.id == around.name]
    made = parents[mentions[0]] if len(mentions) == 1 else None
    if copied or elsewhere or not isinstance(made, ast.Call) or made.func is not mentions[0]:
        return "", ()
    outside = parents[made]
    while outside in parents:
        if isinstance(outside, ast.FunctionDef | ast.Lambda | ast.For | ast.While | ast.ListComp | ast.GeneratorExp):
            return "", ()
        outside = parents[outside]
    holder = parents[made]
    if isinstance(holder, ast.Assign) and len(holder.targets) == 1 and isinstance(holder.targets[0], ast.Name):
        name = holder.targets[0].id
        stored = [n for n in ast.walk(source.tree) if isinstance(n, ast.Name) and n.id == name]
        return (name, ()) if sum(isinstance(n.ctx, ast.Store) for n in stored) == 1 else ("", ())
    if isinstance(holder, ast.Call) and ast.unparse(holder.func) == "torch.compile":
        name = unused_name(source, "module")
        return name, (source.replace(made, f"{name} := {source.code(made)}"),)
    return "", ()


class Renaming(ast.NodeTransformer):
    """A converter of a syntax tree in which the variable ``self`` gets another name."""

    def __init__(self, name: str) -> None:
        """Store ``name``, the new name of ``self``."""
        self.name = name

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Return the variable with its new name, or ``node`` itself if it is not ``self``."""
        return ast.Name(self.name, node.ctx) if node.id == "self" else node


def later_function(
    source: Source,
    node: ast.Expr,
    helpers: Collection[str],
    *,
    condition: str = "",
    number: str = "",
    named: str = "",
) -> tuple[str, list[str], str] | None:
    """Return ``(name, arguments, code)`` of a function that makes the call of the statement ``node`` behind the graph.
    Return None if ``node`` is no such call.

    ``helpers`` has the names of functions that the edit inserts besides. If ``condition`` is not empty, it is the name
    of the function's first parameter, a tensor, and the function makes the call only where that is true. ``number`` is
    the name of a variable that is passed as a tensor, since it is a number which varies, or an empty string. ``named``
    is the variable of the module level that holds ``self``, or an empty string if none does.
    """
    called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
    used = variables_of_functions(source, node)
    code = source.code(node)
    if named and "self" in used:
        code = ast.unparse(Renaming(named).visit(copy.deepcopy(node)))
        called = re.sub(r"^self\b", named, called)
        used.remove("self")
    # The function gets tensors and numbers alone, and what it calls is looked up in the module.
    if not called or "self" in used or called.partition(".")[0] in used:
        return None
    # The calls of a branch may not happen in a run that is compared, and what they change would be read too early.
    if condition and "." in called and _is_read_besides(source, node, called.partition(".")[0]):
        return None
    # A function such as clip_grad_norm_ writes to its arguments, which the program may read before the end.
    if re.search(r"[^_]_$", called) or re.search(r"\"\"\"|'''|\\\n", code):
        return None
    name = re.sub(r"\W+", "_", called) + "_later"
    while name in helpers or f"def {name}(" in source.text:
        name += "_"
    lines = [f"{number} = {number}.item()"] if number in used else []
    lines += reindent(" " * node.col_offset + code, "").splitlines()
    body = reindent("\n".join(lines), "        " if condition else "    ")
    test = f"    if {condition}:\n" if condition else ""
    # The function runs outside of the graph, where torch would compile it by itself.
    text = (
        f"\n\n@torch.compiler.disable\ndef {name}({', '.join([*([condition] if condition else []), *used])}):\n{test}"
        f"{body}\n\n\ntorch._dynamo.config.reorderable_logging_functions.add({name})\n"
    )
    # A float of Python has 64 bits.
    passed = f"torch.as_tensor({number}, dtype=torch.float64 if isinstance({number}, float) else None)"
    return name, [passed if each == number else each for each in used], text


def _is_read_besides(source: Source, node: ast.stmt, name: str) -> bool:
    """Return whether the function around the statement ``node`` uses the variable ``name`` other than for calls whose
    results are unused. A module that the file imports does not count.
    """
    inner = list(ast.walk(enclosing_function(source, node) or source.tree))
    calls = [n.value.func for n in inner if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)]
    called = {n for each in calls for n in ast.walk(each)}
    used = any(isinstance(n, ast.Name) and n.id == name and n not in called for n in inner)
    return used and not source.imports(name)


def may_run_later(case: Case, source: Source, node: ast.stmt) -> bool:
    """Return whether the statement ``node`` may run at the end of its function, and whether torch can move it there.

    Torch moves calls out of the outermost compiled function alone.
    """
    return is_outermost(case, source, node) and can_run_later(source, node)


def can_run_later(source: Source, node: ast.stmt) -> bool:
    """Return whether the statement ``node`` of a function may run at the end of the function.

    It may not if it is inside of ``with`` or ``try``, whose context has then ended, or if a statement that runs after
    it may write to an object, which the statement may read. It may not either if it measures a time, which would
    include what lies between.
    """
    parents, function = source.parents(), enclosing_function(source, node)
    if measures_time(source, node):
        return False
    first = (node.end_lineno or node.lineno) + 1
    around = parents[node]
    while around in parents and around is not function:
        if isinstance(around, ast.With | ast.AsyncWith | ast.Try | ast.TryStar):
            return False
        if isinstance(around, ast.For | ast.While):
            first = around.lineno  # its next round runs after the statement, too
        around = parents[around]
    return function is not None and not writes_to_objects(function, first)


def measures_time(source: Source, node: ast.stmt) -> bool:
    """Return whether the statement ``node`` reads a clock, or uses a variable or attribute to which its function
    assigns the reading of one.
    """
    function = enclosing_function(source, node)
    assigned = [n for n in ast.walk(function) if isinstance(n, ast.Assign)] if function is not None else []
    read = {ast.unparse(t) for n in assigned for t in n.targets if reads_clock(source, ast.unparse(n.value))}
    used = {ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute | ast.Subscript)}
    return reads_clock(source, ast.unparse(node)) or bool(read & used)


@of_statement
def guard_clock(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits after which compiled code neither reads the clocks of the function around ``node`` nor makes the
    calls that show a time, such as a print: graphs run in an order of their own, so that it would be no time at all.

    Yield nothing if a reading or a difference is kept, if one is subtracted from a reading that the function has not
    made, or if such a call shows something else as well, which would be lost.
    """
    function = enclosing_function(source, node)
    if function is None:
        return
    parents = source.parents()
    reads = [n for n in ast.walk(function) if isinstance(n, ast.Call) and ast.unparse(n.func) == case.subject]
    stored = [n for n in ast.walk(function) if isinstance(n, ast.Assign) and n.value in reads]
    names, kept_reads = {ast.unparse(t) for n in stored for t in n.targets}, list[ast.Call]()
    for read in reads:
        above = parents[read]
        other = above.right if isinstance(above, ast.BinOp) and isinstance(above.op, ast.Sub) else None
        differs = other is not None and ast.unparse(other) in names
        differs = differs and _showing_statement(parents, above) is not None
        kept = isinstance(above, ast.Assign) and all(isinstance(t, ast.Name) for t in above.targets)
        if not differs and not kept:
            return
        kept_reads += [read] if kept else []
    bare = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id in names and isinstance(n.ctx, ast.Load)]
    shown = [_showing_statement(parents, n) for n in (*bare, *(n for n in reads if n not in kept_reads))]
    others = [n for each in shown if each is not None for n in _shown_beside(each, (*bare, *reads))]
    if reads and all(shown) and not others and all(isinstance(parents[n], ast.BinOp) for n in bare):
        edits = [source.replace(n, f"(0.0 if torch.compiler.is_compiling() else {source.code(n)})") for n in kept_reads]
        edits += [e for n in dict.fromkeys(shown) if n is not None and (e := guarded_statement(source, n)) is not None]
        yield (*([] if source.imports("torch") else [source.after_imports("import torch")]), *edits)


def _shown_beside(shown: ast.Expr, times: Collection[ast.expr]) -> Iterator[ast.Name]:
    """Yield the variables that the call ``shown`` shows. Leave out those in ``times``, builtin functions and a file."""
    call, waiting = shown.value, list[ast.AST]()
    waiting += [*call.args, *(k for k in call.keywords if k.arg != "file")] if isinstance(call, ast.Call) else []
    for node in waiting:
        if node in times:
            continue
        if isinstance(node, ast.Name) and not hasattr(builtins, node.id):
            yield node
        waiting += ast.iter_child_nodes(node)


def _showing_statement(parents: dict[ast.AST, ast.AST], node: ast.AST) -> ast.Expr | None:
    """Return the statement around ``node`` if it is a call for its effect whose result is unused, and else None."""
    while node in parents and not isinstance(node, ast.stmt):
        node = parents[node]
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    shows = called is not None and re.match(EFFECT_NAME, ast.unparse(called).rpartition(".")[2])
    return node if shows and isinstance(node, ast.Expr) else None


@of_statement
def pass_by_position(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edit that passes the keyword arguments of a call of ``Function.apply`` by position, in the order of the
    parameters of ``forward``. If ``forward`` has keyword-only parameters, its ``*`` is removed.
    """
    for call in calls_on_line(node, case.line):
        if not (isinstance(call.func, ast.Attribute) and call.func.attr == "apply" and call.keywords):
            continue
        forward = _find_forward(case, ast.unparse(call.func.value).rpartition(".")[2])
        if forward is None:
            continue
        source_of_class, function = forward
        arguments = [*function.args.args, *function.args.kwonlyargs]
        # The first parameter of forward is the context, which apply() passes itself.
        order = [a.arg for a in arguments][1 + len(call.args) :]
        given = {k.arg: source.code(k.value) for k in call.keywords}
        if set(order) == set(given):
            values = [*(source.code(a) for a in call.args), *(given[name] for name in order)]
            edits: Edits = (source.replace(call, f"{source.code(call.func)}({', '.join(values)})"),)
            # Keyword-only parameters cannot be passed by position, so the star is removed as well.
            star = re.search(r",\s*\*\s*,", source_of_class.code(function).partition(":\n")[0])
            if star:
                at = source_of_class.span(function)[0]
                edits = (*edits, Edit(source_of_class.file, at + star.start(), at + star.end(), ","))
            yield edits


def _find_forward(case: Case, name: str) -> tuple[Source, ast.FunctionDef] | None:
    """Return (source file, function) of the method ``forward`` of the program's class ``name``, or None if there is
    none.
    """
    classes = [(s, n) for s in case.sources() for n in ast.walk(s.tree) if isinstance(n, ast.ClassDef)]
    for source, node in classes:
        for method in node.body if node.name == name else ():
            if isinstance(method, ast.FunctionDef) and method.name == "forward":
                return source, method
    return None
