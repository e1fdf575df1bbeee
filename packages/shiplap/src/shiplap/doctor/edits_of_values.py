"""Edits that keep a value a tensor: numbers, branches, loops and checks that depend on values, and opaque calls."""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections.abc import Iterable, Iterator
from typing import TypeGuard

from torch import Tensor

from shiplap.doctor.edits import Case, Edits, Source, indent_of, of_statement, reindent, whole_lines
from shiplap.doctor.scratch import Edit


@of_statement
def keep_tensor(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that remove ``.item()``, ``float()`` and ``bool()``, so that values stay tensors. As an
    alternative, they also replace functions of ``math`` by those of torch, which take no plain numbers.

    The calls are removed if their results are operands of arithmetic or arguments of functions of torch.
    """
    parents = source.parents()
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    of_math = [c for c in calls if len(c.args) == 1 and _MATH.fullmatch(ast.unparse(c.func))]
    proposed: list[Edits] = [()]
    for replaced in ([], of_math):
        edits = [source.replace(c.func, ast.unparse(c.func).replace("math", "torch", 1)) for c in replaced]
        for call in calls:
            if (value := _tensor_of_number(call)) is None:
                continue
            parent = parents.get(call)
            arithmetic = isinstance(parent, ast.BinOp | ast.UnaryOp | ast.Compare)
            # torch.tensor() of a tensor would copy it, and detach it from the graph.
            torch_call = isinstance(parent, ast.Call) and re.match(r"torch\.(?!tensor)", ast.unparse(parent.func))
            if arithmetic or torch_call or parent in replaced:
                edits.append(source.replace(call, f"({source.code(value)})"))
        if tuple(edits) not in proposed:
            proposed.append(tuple(edits))
            imported = () if source.imports("torch") else (source.after_imports("import torch"),)
            yield *imported, *edits


@of_statement
def join_values(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that replace ``a and b``, ``a or b`` and ``not a`` in the value of a statement by torch's logical
    functions. Python has to know the value of the first operand, to return it or the second one.
    """
    if not isinstance(node, ast.Return | ast.Assign | ast.AnnAssign | ast.Expr) or node.value is None:
        return
    parents = source.parents()
    joined = [n for n in ast.walk(node.value) if _is_logical(n) and not _is_logical(parents.get(n))]
    edits = [source.replace(n, ast.unparse(_AsLogical().visit(copy.deepcopy(n)))) for n in joined]
    if edits:
        imported = () if source.imports("torch") else (source.after_imports("import torch"),)
        yield *imported, *edits


def _is_logical(node: ast.AST | None) -> TypeGuard[ast.expr]:
    """Return whether ``node`` is ``and``, ``or`` or ``not`` with their operands."""
    return isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))


class _AsLogical(ast.NodeTransformer):
    """A converter of ``and``, ``or`` and ``not`` to torch's logical functions, which return tensors of bools."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """Return ``torch.logical_not(x)`` for ``not x``."""
        self.generic_visit(node)
        return _torch_call("logical_not", node.operand) if isinstance(node.op, ast.Not) else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """Return nested calls of ``torch.logical_and`` or ``torch.logical_or``."""
        self.generic_visit(node)
        name, joined = "logical_and" if isinstance(node.op, ast.And) else "logical_or", node.values[0]
        for value in node.values[1:]:
            joined = _torch_call(name, joined, value)
        return joined


def _torch_call(name: str, *arguments: ast.expr) -> ast.Call:
    """Return the syntax tree of the call of ``torch.name`` with ``arguments``."""
    return ast.Call(ast.Attribute(ast.Name("torch", ast.Load()), name, ast.Load()), list(arguments), [])


# The functions of the module math that torch has under the same name, except those whose result is an int.
_MATH = re.compile(r"math\.(sqrt|exp|expm1|log|log2|log10|log1p|sin|cos|tan|tanh|isnan|isinf)")


def _tensor_of_number(call: ast.Call) -> ast.expr | None:
    """Return the expression of the tensor that a call turns into a number, or None for other calls. ``int()`` does not
    count, since it also cuts off digits.
    """
    if isinstance(call.func, ast.Attribute) and call.func.attr == "item" and not call.args:
        return call.func.value
    if isinstance(call.func, ast.Name) and call.func.id in ("float", "bool") and len(call.args) == 1:
        inner = call.args[0]
        return (_tensor_of_number(inner) or inner) if isinstance(inner, ast.Call) else inner
    return None


class _AsTensor(ast.NodeTransformer):
    """A converter of the syntax tree of a condition to an expression of tensors. ``not``, ``and`` and ``or`` become
    ``~``, ``&`` and ``|``, and calls such as ``float()`` are removed.
    """

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        """Return ``~x`` for ``not x``, with ``x`` converted as well. The converted condition is a tensor of bools."""
        self.generic_visit(node)
        return ast.UnaryOp(ast.Invert(), node.operand) if isinstance(node.op, ast.Not) else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """Return ``a & b`` for ``a and b``, and ``a | b`` for ``a or b``, with the operands converted as well. The
        converted condition is a tensor of bools.

        An operand such as ``mask is not None`` keeps the operands behind it from being evaluated, also in the result.
        """
        self.generic_visit(node)
        op: ast.operator = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        joined = node.values[-1]
        for value in reversed(node.values[:-1]):
            if not is_question_of_python(value):
                joined = ast.BinOp(value, op, joined)
                continue
            sides = (joined, ast.Constant(False)) if isinstance(node.op, ast.And) else (ast.Constant(True), joined)
            chosen = ast.IfExp(value, *sides)
            joined = ast.Call(ast.Attribute(ast.Name("torch", ast.Load()), "as_tensor", ast.Load()), [chosen], [])
        return joined

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Return the tensor ``x`` for a call such as ``float(x)`` or ``x.item()`` that turns it into a number."""
        self.generic_visit(node)
        return _tensor_of_number(node) or node


def is_question_of_python(value: ast.AST) -> bool:
    """Return whether an operand of ``and`` or ``or`` is decided by Python: ``x is None``, ``isinstance(...)``,
    ``hasattr(...)`` or an attribute such as ``self.training``.
    """
    if isinstance(value, ast.Compare):
        return all(isinstance(op, ast.Is | ast.IsNot) for op in value.ops)
    called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return isinstance(value, ast.Attribute) or called in ("isinstance", "hasattr")


def condition_of_tensors(test: ast.expr) -> str:
    """Return the source code of the condition ``test`` as an expression of bool tensors with ``&``, ``|`` and ``~``."""
    # A copy, since other edits read the same tree.
    return ast.unparse(_AsTensor().visit(copy.deepcopy(test)))


# Calls of modules of the compiled object, and of functions without a module; and what shows that such a call was made.
_OF_PROGRAM = re.compile(r"self\.|(?!(abs|bool|dict|float|int|isinstance|len|list|max|min|range|sum|tuple)\b)\w+$")
_NOTED = re.compile(r"dropout|(Batch|Instance)Norm|batch_norm|instance_norm|RReLU|_hook\(", re.IGNORECASE)


@of_statement
def where_for_branch(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edits that replace a choice between two values by ``torch.where``. The choice is a conditional
    expression in ``node``, or an ``if`` statement that assigns or returns a value. Yield nothing if a value comes from
    a module or a function of the program, and the program has modules that draw numbers, keep statistics or have hooks.
    """
    pair = _returned_pair(source, node) if isinstance(node, ast.If) else None
    called = [ast.unparse(n.func) for each in (node, *(pair or ())) for n in ast.walk(each) if isinstance(n, ast.Call)]
    if any(_OF_PROGRAM.match(each) for each in called) and any(_NOTED.search(each.text) for each in case.sources()):
        return
    for chosen in ast.walk(node) if not isinstance(node, ast.If | ast.While) else ():
        if isinstance(chosen, ast.IfExp) and chosen.lineno <= case.line <= (chosen.end_lineno or 0):
            text = _choice(chosen.test, source.code(chosen.body), source.code(chosen.orelse))
            if text is not None:
                text = f"({text})" if " if " in text else text
                yield source.with_import(source.replace(chosen, text), "torch")
    if not isinstance(node, ast.If):
        return
    if pair is not None:
        left, right, last = pair
        start, end = source.span(node)[0], source.span(last)[1]
        if (chosen_text := _choice(node.test, source.code(left), source.code(right))) is not None:
            yield source.with_import(Edit(source.file, start, end, f"return {chosen_text}"), "torch")
    elif len(node.body) == 1 and len(node.orelse) <= 1 and (then := _assigned(source, node.body[0])):
        name, value = then
        # Without an else the variable keeps its value.
        other = _assigned(source, node.orelse[0]) if node.orelse else (name, name)
        chosen_text = _choice(node.test, value, other[1]) if other and other[0] == name else None
        if chosen_text is not None:
            yield source.with_import(source.replace(node, f"{name} = {chosen_text}"), "torch")


def _choice(test: ast.expr, left: str, right: str) -> str | None:
    """Return the source code of an expression that has the value of ``left`` where the condition ``test`` holds and of
    ``right`` elsewhere, both by their source code. Operands of ``and`` and ``or`` at its beginning that Python decides,
    such as ``x is None``, are decided by Python, so that the values which they keep away are not computed.

    Return None if one of the values may not be computed where an operand further behind holds or does not hold.
    """
    sides = [ast.parse(f"({side})", mode="eval").body for side in (left, right)]
    if any(isinstance(n, ast.Tuple | ast.IfExp | ast.Lambda | ast.NamedExpr) for n in sides):
        return None
    if isinstance(test, ast.BoolOp) and is_question_of_python(test.values[0]):
        rest = test.values[1] if len(test.values) == 2 else ast.BoolOp(test.op, test.values[1:])
        inner, first = _choice(rest, left, right), ast.unparse(test.values[0])
        if inner is None:
            return None
        if isinstance(test.op, ast.Or):
            return f"{left} if {first} else {inner}"
        return f"{f'({inner})' if ' if ' in inner else inner} if {first} else {right}"
    if expressions_asked(test) & expressions_read(sides):
        return None
    return f"torch.where({condition_of_tensors(test)}, {left}, {right})"


def _assigned(source: Source, node: ast.stmt) -> tuple[str, str] | None:
    """Return ``(name, value)`` of ``node`` if it assigns to one variable, such as ``("x", "x + 1")`` for ``x += 1``.
    Return None for other statements.
    """
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, source.code(node.value)
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return node.target.id, ast.unparse(ast.fix_missing_locations(value))
    return None


def _returned_pair(source: Source, node: ast.If) -> tuple[ast.expr, ast.expr, ast.stmt] | None:
    """Return (value, other value, last statement) of an ``if`` both sides of which return a value. The values are
    expressions, and the last statement is the one that ends the choice.

    A ``return`` directly behind an ``if`` without ``else`` is its other side. Return None if the sides do not return
    one value each.
    """
    if len(node.body) != 1 or not isinstance(node.body[0], ast.Return) or node.body[0].value is None:
        return None
    other: ast.stmt | None = node.orelse[0] if len(node.orelse) == 1 else None
    # A return directly behind the if is its other side.
    if not node.orelse:
        parent = source.parents().get(node)
        body = getattr(parent, "body", [])
        if node in body and body[-2:] == [node, body[-1]]:
            other = body[-1]
    if isinstance(other, ast.Return) and other.value is not None:
        return node.body[0].value, other.value, other if not node.orelse else node
    return None


@of_statement
def cond_for_branch(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edit that replaces ``node``, an ``if`` which assigns tensors or returns one, by ``torch.cond``."""
    if not isinstance(node, ast.If):
        return
    test, indent = condition_of_tensors(node.test), indent_of(source, node)
    # Both sides are traced in each call.
    asked = expressions_asked(node.test)
    if (pair := _returned_pair(source, node)) is not None:
        left, right, last = pair
        if asked & expressions_read([left, right]):
            return
        text = f"return torch.cond({test}, lambda: {source.code(left)}, lambda: {source.code(right)})"
        yield source.with_import(Edit(source.file, source.span(node)[0], source.span(last)[1], text), "torch")
        return
    # A branch becomes a function, which cannot leave the one around it.
    if any(isinstance(n, ast.Return | ast.Break | ast.Continue | ast.Raise) for n in ast.walk(node)):
        return
    if asked & expressions_read([*node.body, *node.orelse]):
        return
    then, other = assigned_names(node.body), assigned_names(node.orelse)
    before, read = names_before(source, node), names_read_after(source, node)
    names = sorted((set(then) | set(other)) & read)
    if not names or any(n not in before and (n not in then or n not in other) for n in names):
        return
    operands = [n for n in names if n in before]
    lines = []
    for suffix, body, assigned in (("true", node.body, then), ("false", node.orelse, other)):
        lines.append(f"def if_{suffix}({', '.join(operands)}):")
        lines += [reindent(whole_lines(source, body), "    ")] if body else []
        # torch.cond refuses a branch that returns its operand itself.
        lines.append("    return " + _tuple_text([n if n in assigned else f"{n}.clone()" for n in names]))
    target = _tuple_text(names)
    lines.append(f"{target} = torch.cond({test}, if_true, if_false, {_tuple_text(operands)})")
    text = reindent("\n".join(lines), indent).lstrip()
    yield source.with_import(source.replace(node, text), "torch")


def _tuple_text(items: list[str]) -> str:
    """Return the source code of a tuple of the expressions ``items``."""
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def assigned_names(body: list[ast.stmt]) -> list[str]:
    """Return the names that the statements ``body`` assign, in order and without repetitions."""
    stored = (n for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return list(dict.fromkeys(n.id for n in stored))


def enclosing_function(source: Source, node: ast.AST) -> ast.FunctionDef | None:
    """Return the innermost function around the syntax node ``node``, or None if there is none."""
    parents = source.parents()
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.FunctionDef):
            return node
    return None


def names_read_after(source: Source, node: ast.stmt) -> set[str]:
    """Return the names that may be read after the statement ``node`` in its function. If the statement is in a loop,
    all names that the loop reads are included, since its next round may read them. So are the names that functions
    read which are defined before the statement in its function, since these may be called later.
    """
    function = enclosing_function(source, node)
    parents: dict[ast.AST, ast.AST] = source.parents()
    around: ast.AST = node
    first = node.end_lineno or node.lineno
    while around in parents and around is not function:
        around = parents[around]
        if isinstance(around, ast.For | ast.While):
            first = around.lineno - 1  # its next round begins in front of the statement
    own = function or source.tree
    reads = [n for n in ast.walk(own) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    inner = (n for n in ast.walk(own) if isinstance(n, ast.FunctionDef | ast.Lambda) and n is not own)
    before = [each for each in inner if each.lineno < node.lineno] if function is not None else []
    called_later = {n for each in before for n in ast.walk(each)}
    return {n.id for n in reads if n.lineno > first or n in called_later}


def outer_names(source: Source, node: ast.stmt) -> set[str]:
    """Return the names that the function around ``node`` declares as ``global`` or ``nonlocal``. Their values outlive
    the call.
    """
    function = enclosing_function(source, node)
    declared = (n for n in ast.walk(function) if isinstance(n, ast.Global | ast.Nonlocal)) if function else ()
    return {name for n in declared for name in n.names}


def expressions_asked(test: ast.expr) -> set[str]:
    """Return the source code of the variables and attributes about which the condition ``test`` asks Python, such as
    ``mask`` in ``mask is not None and mask.any()``. Code that reads them may fail in a call in which the answer is
    another one.
    """
    found = set[str]()
    for n in ast.walk(test):
        if isinstance(n, ast.Compare) and is_question_of_python(n):
            found.add(ast.unparse(n.left))
        elif isinstance(n, ast.Call) and is_question_of_python(n) and n.args:
            named = n.args[-1] if ast.unparse(n.func) == "hasattr" else None
            attribute = named.value if isinstance(named, ast.Constant) else ""
            found.add(ast.unparse(n.args[0]) + (f".{attribute}" if attribute and isinstance(attribute, str) else ""))
    return found


def expressions_read(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the source code of the variables and attributes that the syntax nodes ``nodes`` read."""
    inner = (n for each in nodes for n in ast.walk(each) if isinstance(n, ast.Name | ast.Attribute))
    return {ast.unparse(n) for n in inner if isinstance(n.ctx, ast.Load)}


def names_before(source: Source, node: ast.stmt | ast.expr) -> set[str]:
    """Return the local names that are assigned before the statement or expression ``node`` of a function, including the
    function's parameters. Return an empty set outside a function.
    """
    function = enclosing_function(source, node)
    if function is None:
        return set()
    arguments = function.args
    names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    for n in ast.walk(function):
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.lineno < node.lineno:
            names.add(n.id)
    return names


def variables_of_functions(source: Source, node: ast.stmt) -> list[str]:
    """Return the names in the statement ``node`` that are parameters or variables of the functions around it, in order
    and without repetitions. Names that a function declares as ``global`` are left out.
    """
    known, around = set[str](), enclosing_function(source, node)
    while around is not None:
        declared = {name for n in ast.walk(around) if isinstance(n, ast.Global) for name in n.names}
        stored = {n.id for n in ast.walk(around) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        stored |= {
            n.name for n in ast.walk(around) if isinstance(n, ast.FunctionDef | ast.ClassDef) and n is not around
        }
        known |= (stored | {a.arg for a in ast.walk(around.args) if isinstance(a, ast.arg)}) - declared
        around = enclosing_function(source, around)
    bound = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in known - bound]
    return list(dict.fromkeys(names))


# Torch's while_loop has no gradient.
_OF_GRADIENTS = re.compile(r"backward\(|requires_grad(?!\s*=\s*False)|autograd\.grad|\boptim\b")


@of_statement
def loop_as_operator(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edit that replaces ``node``, a ``while`` whose variables are tensors, by torch's operator
    ``while_loop``. Yield nothing if the program computes gradients.
    """
    if not isinstance(node, ast.While) or node.orelse or any(_OF_GRADIENTS.search(s.text) for s in case.sources()):
        return
    # The body becomes a function, which cannot leave the one around it.
    if any(isinstance(n, ast.Return | ast.Break | ast.Continue | ast.Raise) for n in ast.walk(node)):
        return
    names = [n for n in assigned_names(node.body) if n in names_before(source, node)]
    arguments, carried = ", ".join(names), _tuple_text(names)
    lines = [
        f"def goes_on({arguments}):",
        f"    return {condition_of_tensors(node.test)}",
        f"def step({arguments}):",
        reindent(whole_lines(source, node.body), "    "),
        f"    return {carried}",
        f"{carried} = while_loop(goes_on, step, {carried})",
    ]
    text = reindent("\n".join(lines), indent_of(source, node)).lstrip()
    if names:
        yield source.after_imports("from torch._higher_order_ops import while_loop"), source.replace(node, text)


@of_statement
def assert_on_device(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield the edit that replaces ``node`` by ``torch._assert_async``. The statement is an ``assert``, or an ``if``
    that only raises an exception. Yield nothing if the program may catch that exception, since a failed check raises
    ``RuntimeError`` and leaves a GPU unusable.
    """
    if any(_may_catch(each, node) for each in case.sources()):
        return
    if isinstance(node, ast.Assert):
        text = f"torch._assert_async({condition_of_tensors(node.test)}, {_message_text(node.msg)})"
        yield source.with_import(source.replace(node, text), "torch")
    elif isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise):
        raised = node.body[-1].exc
        message = raised.args[0] if isinstance(raised, ast.Call) and raised.args else None
        negated = condition_of_tensors(ast.UnaryOp(ast.Not(), node.test))
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            negated = condition_of_tensors(node.test.operand)
        # Statements before the raise are lost.
        if all(map(_makes_variables, node.body[:-1])):
            text = f"torch._assert_async({negated}, {_message_text(message)})"
            yield source.with_import(source.replace(node, text), "torch")


def _may_catch(source: Source, node: ast.stmt) -> bool:
    """Return whether the file has a handler, or a call of ``suppress`` or ``raises``, that may catch the exception
    which ``node`` raises, or the ``RuntimeError`` in its place. ``node`` is an ``assert`` or an ``if``.
    """
    raised = getattr(node.body[-1], "exc", None) if isinstance(node, ast.If) else ast.Name("AssertionError")
    name = ast.unparse(raised.func if isinstance(raised, ast.Call) else raised) if raised is not None else ""
    kinds = [getattr(builtins, each, None) for each in (name, "RuntimeError")]
    # A class of the program may be derived from any other.
    known = {c.__name__ for kind in kinds if isinstance(kind, type) for c in kind.__mro__} if kinds[0] else None
    for n in ast.walk(source.tree):
        if isinstance(n, ast.ExceptHandler):
            caught = [n.type] if n.type is not None else []
        elif isinstance(n, ast.Call) and ast.unparse(n.func).rpartition(".")[2] in ("suppress", "raises"):
            caught = n.args
        else:
            continue
        names = {a.id for each in caught for a in ast.walk(each) if isinstance(a, ast.Name)}
        of_python = all(isinstance(getattr(builtins, each, None), type) for each in names)
        if not caught or known is None or not of_python or names & known:
            return True
    return False


def _makes_variables(node: ast.stmt) -> bool:
    """Return whether ``node`` only assigns to variables, and calls nothing but functions of torch and methods of
    tensors that change nothing.
    """
    if not isinstance(node, ast.Assign) or not all(isinstance(target, ast.Name) for target in node.targets):
        return False
    for call in (n for n in ast.walk(node.value) if isinstance(n, ast.Call)):
        called = ast.unparse(call.func)
        method = isinstance(call.func, ast.Attribute) and hasattr(Tensor, call.func.attr)
        if not (called.startswith("torch.") or method) or called.endswith("_"):
            return False
    return True


def _message_text(node: ast.expr | None) -> str:
    """Return the constant strings in the expression ``node``, joined, as the source code of a string literal. If there
    are none, return the literal of ``a check failed``.
    """
    constants = (
        [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)] if node else []
    )
    return repr("".join(constants).strip() or "a check failed")


@of_statement
def declare_expression(case: Case, source: Source, node: ast.stmt) -> Iterator[Edits]:
    """Yield edits that declare the expression in the statement ``node`` as an op of Shiplap, since the compiler cannot
    trace it.

    The result of the op has the sizes of the first input or, as an alternative, no dims.
    """
    value = getattr(node, "value", None)
    if not isinstance(node, ast.Assign | ast.Return | ast.AnnAssign) or value is None:
        return
    before = names_before(source, node)
    used = dict.fromkeys(n.id for n in ast.walk(value) if isinstance(n, ast.Name) and n.id in before)
    # An op takes tensors and numbers, no object of the program.
    if not used or "self" in used or hasattr(builtins, next(iter(used))):
        return
    name = re.sub(r"\W+", "_", case.subject.rpartition(".")[2]).strip("_") or "opaque"
    while f"def {name}_op(" in source.text:
        name += "_"
    # Each file of the program has ops of its own.
    unique = re.sub(r"\W+", "_", f"{name}_of_{source.file.removesuffix('.py')}")
    # An expression of elements keeps the sizes of its input, a reduction has none.
    for size in ("*s", ""):
        arguments = ", ".join(f'{n}: Float[Tensor, "*{"s" if i == 0 else f"s{i}"}"]' for i, n in enumerate(used))
        op = "\n".join(
            (
                f'@sl.op("program::{unique}")',
                f'def {name}_op({arguments}) -> Float[Tensor, "{size}"]:',
                f"    return {source.code(value)}",
            )
        )
        above = source.before_definition(node.lineno, op)
        missing = [
            text
            for text in ("import shiplap as sl", "from jaxtyping import Float", "from torch import Tensor")
            if text not in source.text
        ]
        if above:
            call = source.replace(value, f"{name}_op({', '.join(used)})")
            yield source.after_imports("\n".join(missing)), above, call
