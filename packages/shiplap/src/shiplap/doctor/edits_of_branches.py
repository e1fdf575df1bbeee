"""Edits of branches and loops on a tensor's value: both sides or all rounds run, and the right values are picked."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shiplap.doctor.edits import Case, Edits, Source, indent_of, of_statement, reindent, whole_lines
from shiplap.doctor.edits_of_calls import later_function, may_run_later
from shiplap.doctor.edits_of_functions import DRAWING, unused_name, writes_to_objects
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

# The helper that the edit inserts into the program. It refuses values that torch.where would turn into another kind.
_PICK = '''
def pick_values(test, yes, no):
    """Return ``yes`` where the tensor ``test`` is true and ``no`` elsewhere, for tensors and for lists of them."""
    if isinstance(yes, (list, tuple)) and type(yes) is type(no) and len(yes) == len(no):
        return type(yes)([pick_values(test, a, b) for a, b in zip(yes, no)])
    if not isinstance(yes, torch.Tensor) or not isinstance(no, torch.Tensor):
        raise TypeError(f"no choice between {type(yes).__name__} and {type(no).__name__}")
    if (yes.shape, yes.dtype, yes.device) != (no.shape, no.dtype, no.device):
        raise TypeError(f"no choice between {yes.dtype} of {yes.shape} and {no.dtype} of {no.shape}")
    return torch.where(test, yes, no)
'''

# Functions of Python that neither change an object nor fail for values that the condition keeps away.
_PURE = frozenset({"abs", "dict", "enumerate", "len", "list", "max", "min", "range", "reversed", "sum", "tuple", "zip"})
# Methods of tensors, and those of dicts and texts that change nothing.
METHODS = frozenset({*dir(Tensor), "items", "keys", "format", "join"})
# Functions of torch and methods that draw numbers, change statistics or raise errors for some values of arguments.
_RISKY = re.compile(
    rf"{DRAWING.pattern}|batch_norm|instance_norm|cholesky|inv|solve|eig|svd|gather|index|take|embedding|one_hot|item|"
    r"tolist|numpy|check|assert|save|load|seed|set_|backward|append|extend|insert|update|pop|remove|clear"
)


@dataclass
class _Branch:
    """The pieces of the code that replaces an ``if``.

    ``done`` is the name of its condition, and ``tested`` are the variables in the condition. ``modules`` are the names
    of torch and its modules. ``helpers`` has the source code of each function that makes a call of the branch later, by
    the name of the function.
    """

    case: Case
    source: Source
    done: str
    tested: frozenset[str]
    modules: frozenset[str]
    helpers: dict[str, str] = field(default_factory=dict)


@of_statement
def pick_for_branch(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that run both sides of ``node``, an ``if``, and pick the values of its variables.

    A call whose result is unused, such as a print, is made behind the compiled part if the condition holds there. The
    sides may assign to variables and to items of tensors, and call functions of torch that neither draw numbers nor
    fail for some values. All other statements, such as a ``return``, make the editor propose nothing.

    If ``node`` only leaves out the rest of a round by ``continue``, that rest is the other side.
    """
    function = enclosing_function(source, node)
    if function is None or not isinstance(node, ast.If):
        return
    first: ast.stmt = node
    last = first
    if [type(n) for n in node.body] == [ast.Continue] and not node.orelse:
        loop = source.parents()[node]
        if not isinstance(loop, ast.For) or node not in loop.body or node is loop.body[-1]:
            return
        rest = loop.body[loop.body.index(node) + 1 :]
        last, node = rest[-1], ast.If(ast.UnaryOp(ast.Not(), node.test), rest, [])
    before, read = names_before(source, first), names_read_after(source, last)
    read -= _temporary_names(function, first.lineno, last.end_lineno or last.lineno)
    tested = frozenset(n.id for n in ast.walk(node.test) if isinstance(n, ast.Name))
    branch = _Branch(case, source, unused_name(source, "is_true"), tested, modules_of_torch(source))
    assigned = dict.fromkeys(assigned_names(node.body) + assigned_names(node.orelse))
    # A variable of the module would change in each call, and a value that is None in some calls cannot be computed on.
    asked = expressions_asked(node.test) & expressions_read([*node.body, *node.orelse])
    if asked or outer_names(source, first) & {*assigned}:
        return
    both = set(assigned_names(node.body)) & set(assigned_names(node.orelse))
    names = [n for n in assigned if n in read]
    if any(n not in before and n not in both for n in names):
        return
    if any(isinstance(n, ast.AugAssign) and _may_be_shared(function, n.target) for n in ast.walk(node)):
        return
    sides = [_side_lines(branch, body, holds) for body, holds in ((node.body, True), (node.orelse, False))]
    if sides[0] is None or sides[1] is None or not (names or branch.helpers or _has_items(node)):
        return
    old = {n: unused_name(source, f"old_{n}") for n in assigned if n in before}
    new = {n: unused_name(source, f"new_{n}") for n in names}
    lines = _condition_lines(branch.done, node.test)
    lines += [f"{old[n]} = {n}" for n in old] + sides[0]
    if node.orelse:
        # The other side starts from the values that the first one has found.
        lines += [f"{new[n]} = {n}" for n in names]
        lines += [f"{n} = {old[n]}" for n in old] + sides[1]
        lines += [f"{n} = pick_values({branch.done}, {new[n]}, {n})" for n in names]
    else:
        lines += [f"{n} = pick_values({branch.done}, {n}, {old[n]})" for n in names]
    helpers = "".join(branch.helpers.values())
    yield _replacing_edits(source, first, last, lines, helpers=helpers)


def _condition_lines(name: str, test: ast.expr) -> list[str]:
    """Return the lines that assign the condition ``test`` to the variable ``name``, as a tensor of one bool."""
    value = f"torch.as_tensor({condition_of_tensors(test)}).reshape(())"
    if isinstance(test, ast.BoolOp | ast.UnaryOp):
        # The operators ~, & and | of integers are those of their bits.
        return [f"{name} = {value}", f"assert {name}.dtype == torch.bool"]
    return [f"{name} = {value}.bool()"]


def _temporary_names(function: ast.FunctionDef, first: int, last: int) -> set[str]:
    """Return the variables of ``function`` that only the lines from ``first`` to ``last`` use, which assign them before
    they read them. A loop around these lines then reads no value of an earlier round.
    """
    uses: dict[str, list[ast.Name]] = {}
    for n in ast.walk(function):
        if isinstance(n, ast.Name):
            uses.setdefault(n.id, []).append(n)
    found = set()
    for name, nodes in uses.items():
        start = min(n.lineno for n in nodes)
        stored = all(isinstance(n.ctx, ast.Store) for n in nodes if n.lineno == start)
        if stored and all(first <= n.lineno <= last for n in nodes):
            found.add(name)
    return found


def _replacing_edits(
    source: Source, first: ast.stmt, last: ast.stmt, lines: Sequence[str], *, helpers: str = "", setting: str = ""
) -> Edits:
    """Return the edits that replace the statements from ``first`` to ``last`` by ``lines`` and insert the source code
    ``helpers`` and ``setting`` below the imports. If the lines call ``pick_values``, that function is inserted, too.
    """
    above = "" if source.imports("torch") else "import torch\n"
    above += f"{setting}\n" if setting and setting not in source.text else ""
    if any("= pick_values(" in row for row in lines) and "def pick_values(" not in source.text:
        above += f"\n{_PICK}\n"
    above += helpers
    text = reindent("\n".join(lines), indent_of(source, first)).lstrip()
    edit = Edit(source.file, source.span(first)[0], source.span(last)[1], text)
    return (source.after_imports(above), edit) if above else (edit,)


def _has_items(node: ast.If) -> bool:
    """Return whether ``node`` assigns to an item, as in ``x[0] = 1``."""
    return any(isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store) for n in ast.walk(node))


def _side_lines(branch: _Branch, body: list[ast.stmt], holds: bool) -> list[str] | None:
    """Return the lines that run the statements ``body`` whether or not the condition holds, or None if that could be
    noticed. ``holds`` says whether the program runs them where the condition is true.
    """
    lines: list[str] = []
    for node in body:
        found = _statement_lines(branch, node, holds)
        if found is None:
            return None
        lines += found
    return lines


def _statement_lines(branch: _Branch, node: ast.stmt, holds: bool) -> list[str] | None:
    """Return the lines that stand for the statement ``node`` of a branch, or None if there are none. ``holds`` says
    whether the program runs the statement where the condition is true.
    """
    source = branch.source
    test = branch.done if holds else f"~{branch.done}"
    if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return []
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if not may_run_later(branch.case, source, node):
            return None
        made = later_function(source, node, branch.helpers, condition=unused_name(source, "is_made"))
        if made is None:
            return None
        name, arguments, text = made
        branch.helpers[name] = text
        return [f"{name}({', '.join([test, *arguments])})"]
    value = getattr(node, "value", None)
    if (
        not isinstance(node, ast.Assign | ast.AugAssign)
        or value is None
        or not _is_harmless(value, branch.tested, branch.modules)
    ):
        return None
    if isinstance(node, ast.AugAssign):
        # An operation in place would change the old value as well.
        old = copy.deepcopy(node.target)
        old.ctx = ast.Load()
        value = ast.BinOp(old, node.op, value)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if len(targets) != 1:
        return None
    (target,) = targets
    code = ast.unparse(ast.fix_missing_locations(value))
    indexed = isinstance(target, ast.Subscript) and _is_constant_index(target.slice, branch.tested)
    if indexed and isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
        item, owner = ast.unparse(target), target.value.id
        # An item of a list is another object, which may have another size or kind.
        return [f"assert isinstance({owner}, torch.Tensor)", f"{item} = torch.where({test}, {code}, {item})"]
    named = target.elts if isinstance(target, ast.Tuple) else [target]
    if not all(isinstance(n, ast.Name) for n in named):
        return None
    return [f"{ast.unparse(target)} = {code}"]


def modules_of_torch(source: Source) -> frozenset[str]:
    """Return the names by which the program knows torch and its modules, such as ``F``."""
    found = {"torch"}  # the edit imports it where it is missing
    for n in ast.walk(source.tree):
        if isinstance(n, ast.Import):
            found |= {a.asname or "torch" for a in n.names if a.name.partition(".")[0] == "torch"}
        elif isinstance(n, ast.ImportFrom) and (n.module or "").partition(".")[0] == "torch" and not n.level:
            found |= {a.asname or a.name for a in n.names}
    return frozenset(found)


def _may_be_shared(function: ast.FunctionDef, target: ast.expr) -> bool:
    """Return whether an operation in place on the variable ``target`` may change an object that others hold as well: an
    argument of ``function``, or what it takes from another variable, an object or a view.
    """
    if not isinstance(target, ast.Name):
        return False
    arguments = function.args
    given = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    values = [n.value for n in ast.walk(function) if isinstance(n, ast.Assign) and _names(n.targets) & {target.id}]
    # Another variable may have the object.
    passed_on = any(isinstance(n, ast.Assign) and ast.unparse(n.value) == target.id for n in ast.walk(function))
    fresh = ast.Constant | ast.BinOp | ast.UnaryOp | ast.Compare
    made = bool(values) and all(
        isinstance(v, fresh) or (isinstance(v, ast.Call) and _FRESH.search(ast.unparse(v.func))) for v in values
    )
    return target.id in given or passed_on or not made


def _names(targets: list[ast.expr]) -> set[str]:
    """Return the names of the variables in ``targets``, the left side of an assignment."""
    return {n.id for each in targets for n in ast.walk(each) if isinstance(n, ast.Name)}


# Functions and methods whose result is a new tensor.
_FRESH = re.compile(
    r"^torch\.(zeros|ones|empty|full|tensor|arange)(_like)?$|\.(clone|sum|mean|\w*_loss|cross_entropy)$"
)


def _is_harmless(value: ast.expr, tested: frozenset[str], modules: frozenset[str]) -> bool:
    """Return whether evaluating ``value`` changes nothing and fails for no value that the condition may keep away.

    ``tested`` are the variables in the condition, and ``modules`` the names of torch and its modules in the program.
    Calls of the program's own functions and modules may do both, and so may an index that is no constant.
    """
    for n in ast.walk(value):
        if isinstance(n, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom | ast.Lambda):
            return False
        if isinstance(n, ast.Subscript) and not _is_constant_index(n.slice, tested):
            return False
        if isinstance(n, ast.Call):
            called = ast.unparse(n.func)
            if isinstance(n.func, ast.Name) and n.func.id in _PURE:
                continue
            # A method of self or of another object may be a module with statistics of its own.
            method = isinstance(n.func, ast.Attribute) and not re.match(r"self\b|super\b|\w+\.add$", called)
            of_torch = called.partition(".")[0] in modules or called.rpartition(".")[2] in METHODS
            if not method or not of_torch or _RISKY.search(called) or re.search(r"[^_]_$", called):
                return False
            if any(k.arg in ("out", "inplace", None) for k in n.keywords):
                return False
    return True


def _is_constant_index(index: ast.expr, tested: frozenset[str]) -> bool:
    """Return whether ``index`` selects items that do not depend on a tensor's value, as far as the source code shows:
    it is made of constants, slices and variables that are not in ``tested``, the variables of a condition.
    """
    allowed = ast.Constant | ast.Slice | ast.Name | ast.Tuple | ast.UnaryOp | ast.USub | ast.Load
    nodes = list(ast.walk(index))
    return all(isinstance(n, allowed) and not (isinstance(n, ast.Name) and n.id in tested) for n in nodes)


@of_statement
def pick_for_loop(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that run all rounds of ``node``, a ``while`` loop with a greatest number of rounds, and keep the
    values of the last round that the program would have run.

    The loop has the form ``while x > limit and n < most``, and its last statement is ``n += 1``. It must not leave
    early, write to objects, call functions for their effects or draw random numbers.
    """
    counted = _parse_counted_loop(source, node) if isinstance(node, ast.While) and not node.orelse else None
    if not isinstance(node, ast.While) or counted is None:
        return
    count, most, test = counted
    body, before, after = node.body[:-1], names_before(source, node), names_read_after(source, node)
    leaves = ast.Return | ast.Break | ast.Continue | ast.Raise | ast.Yield | ast.YieldFrom | ast.Await | ast.Expr
    if any(isinstance(n, leaves) for each in body for n in ast.walk(each)) or any(map(writes_to_objects, body)):
        return
    names = assigned_names(body)
    fixed = {n.id for n in ast.walk(most) if isinstance(n, ast.Name)} | {count}
    if outer_names(source, node) & {*names} or expressions_asked(test) & expressions_read(body):
        return
    if fixed & {*names} or any(n in after and n not in before for n in names) or DRAWING.search(source.code(node)):
        return
    old = {n: unused_name(source, f"old_{n}") for n in names if n in before}
    done, rounds = unused_name(source, "is_done"), unused_name(source, "rounds")
    goes_on = unused_name(source, "goes_on")
    inner = [*_condition_lines(goes_on, test), f"{done} = ~{goes_on} if {done} is None else {done} | ~{goes_on}"]
    inner += [f"{old[n]} = {n}" for n in old]
    inner += reindent(whole_lines(source, body), "").splitlines() if body else []
    inner += [f"{n} = pick_values({done}, {old[n]}, {n})" for n in old]
    lines = [f"{done} = None", f"for {count} in range({count}, {source.code(most)}):"]
    setting = ""
    if count in after:
        setting = "torch._dynamo.config.capture_scalar_outputs = True"
        inner.append(f"{rounds} = {rounds} + (~{done}).long()")
        first = unused_name(source, f"first_{count}")
        lines = [f"{first}, {rounds} = {count}, torch.zeros((), dtype=torch.int64)", *lines]
    lines.append(reindent("\n".join(inner), "    "))
    lines += [f"{count} = {first} + {rounds}.item()"] if count in after else []
    yield _replacing_edits(source, node, node, lines, setting=setting)


def _parse_counted_loop(source: Source, node: ast.While) -> tuple[str, ast.expr, ast.expr] | None:
    """Return ``(count, most, test)`` of a loop ``while test and count < most`` that ends in ``count += 1`` and whose
    count starts from a number in the source code. Return None for other loops.
    """
    last, parts = node.body[-1], node.test.values if isinstance(node.test, ast.BoolOp) else []
    function = enclosing_function(source, node)
    if function is None or not isinstance(node.test, ast.BoolOp) or not isinstance(node.test.op, ast.And):
        return None
    if not isinstance(last, ast.AugAssign) or not isinstance(last.op, ast.Add) or ast.unparse(last.value) != "1":
        return None
    count = ast.unparse(last.target)
    bounds = [p for p in parts if isinstance(p, ast.Compare) and ast.unparse(p.left) == count]
    assigned = [n for n in ast.walk(function) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == count]
    rest = [p for p in parts if p not in bounds]
    if len(bounds) != 1 or not rest or len(assigned) != 1 or assigned[0].lineno > node.lineno:
        return None
    (bound,), start = bounds, assigned[0].value
    most, known = bound.comparators[0], isinstance(start, ast.Constant) and type(start.value) is int
    plain = isinstance(most, ast.Constant | ast.Name) or _is_set_once(source, most)
    if not known or [type(op) for op in bound.ops] != [ast.Lt] or not plain:
        return None
    return count, most, rest[0] if len(rest) == 1 else ast.BoolOp(ast.And(), rest)


def _is_set_once(source: Source, value: ast.expr) -> bool:
    """Return whether ``value`` is an attribute of ``self`` that only ``__init__`` sets, as far as the file shows."""
    attribute = re.fullmatch(r"self\.(\w+)", ast.unparse(value))
    stored = (n for n in ast.walk(source.tree) if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load))
    functions = [enclosing_function(source, n) for n in stored if attribute and n.attr == attribute[1]]
    return attribute is not None and all(f is not None and f.name == "__init__" for f in functions)
