"""Edits that compute a value in front of the compiled function, which gets it as one more argument."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Collection, Iterator

from shiplap.doctor.clocks import reads_clock
from shiplap.doctor.edits import Case, Edits, Source, calls_on_line, indent_of, of_statement
from shiplap.doctor.edits_of_branches import METHODS, modules_of_torch
from shiplap.doctor.edits_of_calls import is_call_of_torch, is_outermost, may_be_inlined, with_helper
from shiplap.doctor.edits_of_compilation import find_compile_sites
from shiplap.doctor.edits_of_functions import DRAWING, unused_name
from shiplap.doctor.edits_of_values import enclosing_function, expressions_asked, names_before
from shiplap.doctor.once import change_nothing, runs_once
from shiplap.doctor.scratch import Edit

# The helper that the edits insert into the program. A compiled module stays a module, since the program may read its
# attributes.
_COMPILE_WITH = '''
def compile_with(values, **options):
    """Return a decorator that compiles a function and passes it ``values``, each a function of its other arguments that
    is called in front of each call. Each truth value, and each function of a module, has a version of its own.
    """
    import functools

    def is_kept(value):  # a method of an object, or a generator, may be made anew for each call
        owner, name = getattr(value, "__self__", None), getattr(value, "__qualname__", "<")
        return callable(value) and "<" not in name and isinstance(owner, (type, type(torch), type(None)))

    def decorate(fn):
        versions = {}
        owner = (fn,) if isinstance(fn, torch.nn.Module) else (fn.__self__,) if hasattr(fn, "__self__") else ()

        @functools.wraps(fn.forward if isinstance(fn, torch.nn.Module) else fn, updated=())
        def call(*args, **kwargs):
            given = {name: value(*owner, *args, **kwargs) for name, value in values.items()}
            key = tuple((name, each) for name, each in given.items() if is_kept(each) or isinstance(each, bool))
            if key not in versions:
                versions[key] = torch.compile(fn, isolate_recompiles=True, **options)
            return versions[key](*args, **kwargs, **given)

        if not isinstance(fn, torch.nn.Module):
            return call
        compiled = torch.compile(fn, **options)
        compiled.forward = call
        return compiled

    return decorate
'''
# The time at which a clock is read is its result, and an object of the call has no place in front of it.
_BOUND = re.compile(
    r"\b(time|timeit|now|today|utcnow|synchronize|record|super|locals|globals|vars|print|is_(dynamo_)?compiling)\b"
)
# What makes a number, a size or a property of a tensor, by its source code behind the variable.
_PROPERTY = re.compile(r"\.(shape|dtype|device|ndim|size|dim|numel|is_cuda)$")


def is_bound_to_place(source: Source, code: str) -> bool:
    """Return whether the source code ``code`` of the file reads a clock, or what only its place in the program has."""
    return bool(_BOUND.search(code)) or reads_clock(source, code)


@of_statement
def condition_in_front(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that evaluate the condition of ``node``, an ``if`` of the compiled function itself, in front of
    each call. The answer is passed to the function, of which each answer has a compiled version.

    The condition may only read arguments that hold what the caller has passed, attributes of the compiled object and
    variables of the module level, and call functions of torch.
    """
    function = enclosing_function(source, node)
    if not isinstance(node, ast.If) or function is None or not may_be_earlier(case, source, function, node):
        return
    modules = modules_of_torch(source)
    for called in (ast.unparse(n.func) for n in ast.walk(node.test) if isinstance(n, ast.Call)):
        of_torch = called.partition(".")[0] in modules or called.rpartition(".")[2] in METHODS
        if not (of_torch or called in _QUESTIONS) or DRAWING.search(called) or re.search(r"[^_]_$", called):
            return
    if is_bound_to_place(source, source.code(node.test)):
        return
    if is_known_outside(source, function, node, node.test, tensors=True):
        code = f"bool({source.code(node.test)})"
        yield from pass_value(case, source, function, node.test, "condition_value", code)


# Functions of Python that a condition may call.
_QUESTIONS = frozenset({"abs", "bool", "float", "int", "isinstance", "len", "max", "min"})


@of_statement
def compute_in_front(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that make the call at fault, or one that leads to it, in front of the compiled function.

    The call may only read sizes and other properties of arguments, attributes of the compiled object and variables of
    the module level. The call at fault itself may also get arguments as they are. As an alternative, a number is passed
    as a tensor.
    """
    places = [(source, node, case.line), *_statements_that_lead_to(case)]
    for number, (each, statement, line) in enumerate(places):
        function = enclosing_function(each, statement)
        if function is None or not may_be_earlier(case, each, function, statement):
            continue
        for call in calls_on_line(statement, line):
            code = each.code(call)
            own = number == 0 and ast.unparse(call.func) == case.subject
            if isinstance(statement, ast.Expr) and statement.value is call:
                yield from _call_in_front(case, each, function, statement)
                continue
            if is_bound_to_place(each, code) or not runs_once(each, function, call):
                continue
            if not is_known_outside(each, function, statement, call, tensors=own):
                continue
            name = re.sub(r"\W+", "_", ast.unparse(call.func)).strip("_").lower() + "_value"
            yield from pass_value(case, each, function, call, name, code)
            yield from pass_value(case, each, function, call, name, f"torch.as_tensor({code})")


def _statements_that_lead_to(case: Case) -> Iterator[tuple[Source, ast.stmt, int]]:
    """Yield (file, statement, line) of each call that leads to the line of the break, from the innermost on. If torch
    compiled the function around that line by itself, yield the statements that call a function of its name.
    """
    for file, line in case.callers:
        source = case.source(file)
        if (caller := source.statement(line)) is not None:
            yield source, caller, line
    for source in () if case.callers else case.sources():
        for call in (n for n in ast.walk(source.tree) if isinstance(n, ast.Call)):
            if ast.unparse(call.func).rpartition(".")[2] == case.function:
                statement = source.statement(call.lineno)
                if statement is not None:
                    yield source, statement, call.lineno


def _call_in_front(case: Case, source: Source, function: ast.FunctionDef, node: ast.Expr) -> Iterator[Edits]:
    """Yield the edits that make the call of the statement ``node`` in front of each call of ``function``, of which it
    is the first statement.
    """
    before = function.body[: function.body.index(node)]
    documented = all(isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) for n in before)
    if not documented or is_bound_to_place(source, source.code(node)):
        return
    if not is_known_outside(source, function, node, node.value, tensors=True):
        return
    called, name = source.code(node), unused_name(source, "is_called")
    text = f"if not {name}:\n{indent_of(source, node)}    {called}"
    yield from pass_value(case, source, function, node, name, f"({called}, True)[1]", text=text)


def compute_sizes_in_front(case: Case) -> Iterator[Edits]:
    """Yield the edits that make a call of the compiled function which only reads sizes and other properties of its
    arguments in front of the function, for a recompile for a size or for what such a call keeps.
    """
    for source, function in _compiled_functions(case):
        for node in function.body:
            if not may_be_earlier(case, source, function, node):
                continue
            for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
                code = source.code(call)
                root = ast.unparse(call.func).partition(".")[0]
                own = root == "self" or root in _defined(source)
                if not own or is_bound_to_place(source, code) or not _PROPERTY.search(_property_in(call)):
                    continue
                if not runs_once(source, function, call):
                    continue
                if is_known_outside(source, function, node, call, tensors=False):
                    name = re.sub(r"\W+", "_", ast.unparse(call.func)).strip("_").lower() + "_value"
                    yield from pass_value(case, source, function, call, name, code, more=("dynamic=True",))


def _compiled_functions(case: Case) -> Iterator[tuple[Source, ast.FunctionDef]]:
    """Yield, with its source file, each function of the program that has the name of the compiled function of ``case``
    and is among its frames.
    """
    for source in case.sources():
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.FunctionDef) or node.name != case.function:
                continue
            if (source.file, node.lineno) in case.frames:
                yield source, node


def _defined(source: Source) -> set[str]:
    """Return the names of the functions and classes that the module level of the file defines."""
    return {n.name for n in source.tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}


def _property_in(call: ast.Call) -> str:
    """Return the source code of a property of a tensor that the arguments of ``call`` read, such as ``x.shape``, or an
    empty string if there is none.
    """
    values = [*call.args, *(k.value for k in call.keywords)]
    found = [ast.unparse(n) for value in values for n in ast.walk(value) if isinstance(n, ast.Attribute)]
    return next((text for text in found if _PROPERTY.search(text)), "")


def may_be_earlier(case: Case, source: Source, function: ast.FunctionDef, node: ast.stmt) -> bool:
    """Return whether each call of ``function`` reaches the statement ``node``, and what precedes it in the function
    changes nothing that is read there, as far as the source code shows.
    """
    outermost = is_outermost(case, source, node) or is_compiled_itself(case, source, function)
    if node not in function.body or function.args.kwarg or not outermost:
        return False
    if not change_nothing(source, function, function.body[: function.body.index(node)]):
        return False
    # Such a hook changes the arguments behind the call in front, or an object that the call reads.
    return not any(re.search(r"forward_(pre_)?hook", each.text) for each in case.sources())


def is_compiled_itself(case: Case, source: Source, function: ast.FunctionDef) -> bool:
    """Return whether all known uses of ``torch.compile`` behind the break or recompile compile ``function`` itself, or
    an object of a class of the file whose method ``forward`` it is. Another compiled function must not call it.
    """
    if may_be_inlined(case, function):
        return False
    around, compiled = source.parents().get(function), set[str]()
    kind = around.name if isinstance(around, ast.ClassDef) else ""
    for place, site, decorated in find_compile_sites(case):
        if decorated is not None:
            compiled.add(decorated.name if place.file == source.file and decorated.lineno == function.lineno else "")
            continue
        given = ast.unparse(site.args[0]) if isinstance(site, ast.Call) and site.args else ""
        owner = given.removesuffix(f".{function.name}") if kind else given
        nodes = [n for n in ast.walk(place.tree) if isinstance(n, ast.Assign)]
        made = [n.value for n in nodes if ast.unparse(n.targets[0]) == owner]
        of_object = bool(kind) and (function.name == "forward" or owner != given)
        text = ast.unparse(made[0]) if len(made) == 1 else owner
        compiled.add(function.name if of_object and text.partition("(")[0] == kind else text)
    return compiled == {function.name}


def is_known_outside(
    source: Source,
    function: ast.FunctionDef,
    node: ast.stmt,
    value: ast.expr | ast.stmt,
    *,
    tensors: bool,
    made: Collection[str] = (),
) -> bool:
    """Return whether ``value``, an expression of the statement ``node`` or a statement, only reads what is known in
    front of a call of ``function``, and the variables ``made``. If ``tensors`` is false, it may read properties of
    arguments alone, such as sizes.
    """
    before = function.body[: function.body.index(node)]
    inner = [n for each in before for n in ast.walk(each)]
    stored = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    given = function.args
    arguments = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    optional = {a.arg for a in given.args[len(given.args) - len(given.defaults) :]} | {a.arg for a in given.kwonlyargs}
    outside = source.assigned_names() | _defined(source) | modules_of_torch(source) | set(dir(builtins))
    asked = expressions_asked(value) if isinstance(value, ast.expr) else set[str]()
    parents = source.parents()
    kinds = ast.Lambda | ast.NamedExpr | ast.Await | ast.Starred | ast.comprehension | ast.Yield
    for n in ast.walk(value):
        if isinstance(n, kinds) or (isinstance(n, ast.keyword) and n.arg is None):
            return False
        if not isinstance(n, ast.Name) or n.id in made:
            continue
        known = n.id in arguments or n.id in outside or source.imports(n.id)
        if n.id in stored or not known or (n.id in optional and n.id not in asked):
            return False
        above = parents.get(n)
        bare = not isinstance(above, ast.Attribute) or not _PROPERTY.search(ast.unparse(above))
        counted = isinstance(above, ast.Call) and ast.unparse(above.func) == "len"
        if n.id in arguments - {"self"} and bare and not counted and not tensors:
            return False
    return True


def pass_value(
    case: Case,
    source: Source,
    function: ast.FunctionDef,
    value: ast.expr | ast.stmt | tuple[int, int],
    name: str,
    code: str,
    *,
    text: str = "",
    more: tuple[str, ...] = (),
) -> Iterator[Edits]:
    """Yield the edits that pass ``code``, which is evaluated in front of each call of ``function``, as its argument
    ``name``, which then stands for the expression ``value`` in it. Other callers leave it out.

    ``value`` may also be given by its offsets. ``text`` replaces it where it is a statement, and ``more`` has further
    options of ``torch.compile``.
    """
    name, given = unused_name(source, name), function.args
    parameters = [*given.posonlyargs, *given.args, *([given.vararg] if given.vararg else []), *given.kwonlyargs]
    defaults = [d for d in (*given.defaults, *given.kw_defaults) if d is not None]
    span = value if isinstance(value, tuple) else source.span(value)
    # Lines of a text are part of it, and the value of a default is computed where the function is defined.
    if not parameters or "#" in code or re.search(r"\"\"\"|'''|\\\n", code) or not all(map(_is_constant, defaults)):
        return
    code = re.sub(r"\s*\n\s*", " ", code)
    ends = [(n.end_lineno or 0, n.end_col_offset or 0) for n in parameters]
    ends += [(n.end_lineno or 0, n.end_col_offset or 0) for n in defaults]
    at = source.offset(*max(ends))
    star = "" if given.vararg or given.kwonlyargs else ", *"
    edits = [
        Edit(source.file, at, at, f"{star}, {name}={'None' if text else '...'}"),
        source.replace_span(*span, text or f"({name} if {name} is not ... else {source.text[span[0] : span[1]]})"),
    ]
    for place, site, decorated in find_compile_sites(case):
        if place.file != source.file or (
            decorated.lineno != function.lineno if decorated else not is_call_of_torch(site)
        ):
            continue
        kept = [k for k in _keywords(site) if not any(o.startswith(f"{k.arg}=") for o in more)]
        options = [*(f"{'**' if k.arg is None else f'{k.arg}='}{source.code(k.value)}" for k in kept), *more]
        passed = source.code(site.args[0]) if decorated is None and isinstance(site, ast.Call) else ""
        # A variable of the function around the call of torch.compile hides one of the module level.
        hidden = names_before(place, site) - {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
        # A decorator of the function itself, such as no_grad, does not hold in front of it.
        marks = function.decorator_list
        inner = [m.lineno for m in marks[-1:]] != [site.lineno] if decorated else bool(marks)
        if inner or hidden & set(re.findall(r"\w+", code)):
            continue
        made = f"compile_with({', '.join([f'{{{name!r}: lambda {_signature(function)}: {code}}}', *options])})"
        replaced = source.replace(site, f"{made}({passed})" if decorated is None else made)
        yield with_helper([(source, e) for e in (*edits, replaced)], "compile_with", _COMPILE_WITH)


def _keywords(site: ast.expr) -> list[ast.keyword]:
    """Return the keyword arguments of ``site``, a call of ``torch.compile`` or the bare function as a decorator."""
    return site.keywords if isinstance(site, ast.Call) else []


def _is_constant(value: ast.expr) -> bool:
    """Return whether the expression ``value`` is a constant, possibly with a sign."""
    return isinstance(value.operand if isinstance(value, ast.UnaryOp) else value, ast.Constant)


def _signature(function: ast.FunctionDef) -> str:
    """Return the source code of the parameters of ``function`` without annotations."""
    copied = ast.parse(f"def f({ast.unparse(function.args)}): pass").body[0]
    assert isinstance(copied, ast.FunctionDef)
    for each in ast.walk(copied.args):
        if isinstance(each, ast.arg):
            each.annotation = None
    return ast.unparse(copied.args)
