"""Edits of calls that are made for their effect: an op makes them when the graph runs, in the order of the program."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator

from shiplap.doctor.edits import EFFECT_NAME, Case, Edits, Source, of_statement, reindent, whole_lines
from shiplap.doctor.edits_of_calls import measures_time
from shiplap.doctor.edits_of_draws import CALL_COUNTER, counting_op
from shiplap.doctor.edits_of_functions import writes_to_objects
from shiplap.doctor.edits_of_values import (
    assigned_names,
    enclosing_function,
    names_read_after,
    outer_names,
    variables_of_functions,
)
from shiplap.doctor.scratch import Edit

# Functions and methods that make a number, a text or a size of a tensor, or a tensor without a gradient, which the op
# copies. The effect then holds no tensor of the graph.
_NUMBERS = frozenset({"bool", "float", "int", "len", "repr", "str", "item", "tolist", "size", "dim", "numel", "detach"})
OP = "torch.library.custom_op"
_PROPERTIES = frozenset({"shape", "dtype", "device", "ndim"})
# Functions and methods that write their arguments as a text.
_WRITING = re.compile(r"(^|\.)(print|warn|debug|info|warning|error|exception|critical|write)$")


@of_statement
def effect_in_op(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that make the call of the statement ``node`` in an op, which the graph runs where the call stood.
    Statements that follow it move with it if they use a variable that it assigns.

    The op gets the variables of the function that the statements use. Those whose numbers, texts, sizes or detached
    values they take are tensors. The others are texts or, as an alternative, integers. What the statements use besides
    must belong to the module level, and no function may use it other than here: the objects that a function changes
    have not changed yet when its graph runs. A logger may be used by others, too.
    """
    block = _block_from(source, node)
    # The graph runs an op beside its other operations, in no order by time.
    if block is None or any(measures_time(source, each) for each in block):
        return
    made = set(assigned_names(block))
    used = list(dict.fromkeys(n for each in block for n in variables_of_functions(source, each) if n not in made))
    calls = [each.value for each in block if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
    named = [ast.unparse(call.func) for call in calls]
    roots = [name.partition(".")[0].partition("(")[0] for name in named]
    if "self" in used or set(roots) & set(used):
        return
    writers = {root for root, name in zip(roots, named, strict=True) if _WRITING.search(name)}
    if _is_used_by_functions(source, block, but=writers):
        return
    tensors = [name for name in used if all(_is_reduced(source, each, name) for each in block)]
    others = [name for name in used if name not in tensors]
    if not tensors and not any(re.search(EFFECT_NAME, name) for name in named):
        return
    code = whole_lines(source, block)
    copied = [f"{name} = {name}.detach().clone()" for name in tensors if ".detach()" in code]
    # A text that is written may show a tensor itself.
    kinds = ("str", "int", *(("torch.Tensor",) if writers else ())) if others else ("",)
    for kind in kinds:
        parameters = ", ".join(f"{n}: torch.Tensor" if n in tensors else f"{n}: {kind}" for n in used)
        body = [*copied, *reindent(code, "").splitlines()]
        name, lines = counting_op(source, calls[-1], parameters, body)
        start, end = source.span(node)[0], source.span(block[-1])[1]
        made_call = Edit(source.file, start, end, f"{name}({', '.join([CALL_COUNTER, *used])})")
        yield source.after_imports("\n".join(lines)), made_call


def writes_out_of_order(texts: Iterable[str]) -> bool:
    """Return whether one of the program's files ``texts`` has an op that writes a line when a graph runs, and one has
    a call which writes another line and is moved behind graphs. The lines of a branch that no run of a trial takes
    could change places.
    """
    trees = [ast.parse(text) for text in texts]
    functions = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    writing = {each for each in functions if any(map(_writes, ast.walk(each)))}
    in_graph = any(isinstance(d, ast.Call) and ast.unparse(d.func) == OP for n in writing for d in n.decorator_list)
    moved = re.findall(r"reorderable_logging_functions\.add\(([\w.]+)\)", "\n".join(map(ast.unparse, trees)))
    behind = any(_WRITING.search(name) or name in {n.name for n in writing} for name in moved)
    return in_graph and behind


def _writes(node: ast.AST) -> bool:
    """Return whether ``node`` is a call that writes its arguments as a text."""
    return isinstance(node, ast.Call) and _WRITING.search(ast.unparse(node.func)) is not None


def _block_from(source: Source, node: ast.stmt) -> list[ast.stmt] | None:
    """Return the statements from ``node`` to the last one that uses a variable which they assign. Return None if they
    are other than calls and assignments to variables, if something behind them may use these variables, or if the last
    one is no call. Return None as well inside of ``with`` and ``try``, whose context the graph does not have.
    """
    parents, around = source.parents(), source.parents().get(node)
    parent = around
    while around is not None and not isinstance(around, ast.FunctionDef):
        if isinstance(around, ast.With | ast.AsyncWith | ast.Try | ast.TryStar):
            return None
        around = parents.get(around)
    body = next((b for b in (getattr(parent, f, []) for f in ("body", "orelse", "finalbody")) if node in b), [])
    function = enclosing_function(source, node)
    if function is None or not body:
        return None
    end = body.index(node) + 1
    while set(assigned_names(body[body.index(node) : end])) & names_read_after(source, body[end - 1]):
        if end == len(body):
            return None
        end += 1
    block, known = body[body.index(node) : end], set[str]()
    # The op would assign variables of its own.
    if outer_names(source, node) & set(assigned_names(block)):
        return None
    for each in block:
        call = isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)
        assigned = isinstance(each, ast.Assign) and all(isinstance(target, ast.Name) for target in each.targets)
        read = {n.id for n in ast.walk(each) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        # A variable that is read first has a value from before the block.
        early = read & set(assigned_names(block)) - known
        if not (call or assigned) or early or _runs_code_of_its_own(source, each) or writes_to_objects(each):
            return None
        known |= set(assigned_names([each]))
    # Lines of a text are part of it and keep their indentation.
    several = re.search(r"\"\"\"|'''|\\\n", whole_lines(source, block))
    return block if isinstance(block[-1], ast.Expr) and not several else None


def _runs_code_of_its_own(source: Source, node: ast.stmt) -> bool:
    """Return whether ``node`` assigns within an expression or unpacks arguments, or reads an attribute of an imported
    module, whose value a function may have changed.
    """
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    called = {n for each in calls for n in ast.walk(each.func)}
    imported = {n for n in ast.walk(source.tree) if isinstance(n, ast.Import | ast.ImportFrom)}
    names = {a.asname or a.name.partition(".")[0] for n in imported for a in n.names} - {"torch"}
    loose = any(isinstance(n, ast.Name) and n.id in names and n not in called for n in ast.walk(node))
    kinds = ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom | ast.Starred | ast.Lambda
    return loose or any(isinstance(n, kinds) or (isinstance(n, ast.keyword) and n.arg is None) for n in ast.walk(node))


def _is_used_by_functions(source: Source, block: list[ast.stmt], but: set[str]) -> bool:
    """Return whether a function of the file uses an object of the module level that the statements ``block`` use, other
    than in these statements. An object may be imported or defined at the module level. The variables ``but``, imported
    modules, and functions and classes that are only called do not count.
    """
    inside = {n for each in block for n in ast.walk(each)}
    nodes = list(ast.walk(source.tree))
    own = {n for each in block for n in variables_of_functions(source, each)} | set(assigned_names(block))
    modules = {a.asname or a.name.partition(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)} | set(dir(builtins))
    called = {n.func for n in inside if isinstance(n, ast.Call)}
    read = {n.id for n in inside if isinstance(n, ast.Name) and not (n in called and n.id in defined)}
    names = read - own - modules - but
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
    uses = (n for each in functions for n in ast.walk(each) if isinstance(n, ast.Name) and n not in inside)
    return any(n.id in names for n in uses)


def _is_reduced(source: Source, node: ast.stmt, name: str) -> bool:
    """Return whether the statement ``node`` only takes numbers, texts, sizes or detached values of the variable
    ``name``, so that no object outlives the statement with the tensor.
    """
    parents = source.parents()
    uses = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]
    return all(_is_reduced_above(parents, use, node) for use in uses)


def _is_reduced_above(parents: dict[ast.AST, ast.AST], use: ast.AST, node: ast.stmt) -> bool:
    """Return whether an expression of the statement ``node`` around ``use`` makes a number, a text, a size or a
    detached value of it. ``parents`` are those of the file's syntax nodes.
    """
    dotted = False
    while use is not node:
        above = parents[use]
        if isinstance(above, ast.Attribute):
            dotted = True
            if above.attr in _NUMBERS | _PROPERTIES:
                return True
        if isinstance(above, ast.FormattedValue):
            return True
        if isinstance(above, ast.Call) and use in above.args:
            called = ast.unparse(above.func)
            if called in _NUMBERS:
                return True
            # Arguments that are written as a text are tensors if a method is called on them, as in x.norm().
            if _WRITING.search(called) and parents[above] is node:
                return dotted
        use = above
    return False
