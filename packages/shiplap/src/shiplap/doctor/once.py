"""Preconditions of edits that move a call: it runs exactly once in each call, and nothing before it changes a value."""

from __future__ import annotations

import ast
import re

from shiplap.doctor.edits import Source
from shiplap.doctor.edits_of_branches import METHODS, modules_of_torch
from shiplap.doctor.edits_of_functions import DRAWING, writes_to_objects

# Functions of Python that change no object.
_BUILTINS = frozenset({"abs", "bool", "float", "int", "isinstance", "len", "max", "min", "range", "round", "tuple"})
# Modules of torch that draw no numbers and keep no state.
_MODULES = re.compile(
    r"(torch\.)?nn\.(Linear|Conv[123]d|LayerNorm|RMSNorm|GroupNorm|Embedding|ReLU|GELU|SiLU|Tanh|Sigmoid|Identity)\("
)
# Methods of tensors that objects of the program have as well, and which change these, or keep what they get.
_OTHERS = frozenset({"add", "put", "backward", "register_hook", "get", "record_stream", "apply"})
_SETTINGS = re.compile(r"seed|rng|set_|save|load|use_|enable|compile|library|_dynamo|cuda|distributed|autograd")


def runs_once(source: Source, function: ast.FunctionDef, value: ast.expr) -> bool:
    """Return whether each run of ``function`` to its end evaluates ``value``, an expression in it, exactly once, and
    its statement calls nothing before it that may change an object.
    """
    parents, below, above = source.parents(), [value], source.parents().get(value)
    node: ast.AST = value
    while above is not function:
        first = isinstance(above, ast.BoolOp) and above.values[0] is node
        tested = isinstance(above, ast.IfExp | ast.If) and above.test is node
        plain = isinstance(above, ast.expr | ast.keyword) and not isinstance(
            above, ast.BoolOp | ast.IfExp | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
        )
        chained = isinstance(above, ast.Compare) and len(above.ops) > 1
        statement = isinstance(above, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return)
        if above is None or chained or not (first or tested or plain or statement):
            return False
        if isinstance(above, ast.expr):
            below.append(above)
        node, above = above, parents.get(above)
    start = (value.lineno, value.col_offset)
    inner = (n for n in ast.walk(node) if isinstance(n, ast.Call) and n not in below)
    return all(is_pure(source, function, n) for n in inner if (n.lineno, n.col_offset) < start)


def change_nothing(source: Source, function: ast.FunctionDef, before: list[ast.stmt]) -> bool:
    """Return whether the statements ``before`` of ``function`` change no object, draw no number and are not left, as
    far as the source code shows.
    """
    leaves = ast.Return | ast.Raise | ast.Yield | ast.YieldFrom | ast.Await | ast.Assert | ast.Try | ast.With
    leaves |= ast.Global | ast.Nonlocal | ast.While | ast.Delete | ast.Import | ast.ImportFrom
    for each in before:
        if (isinstance(each, ast.Expr) and not isinstance(each.value, ast.Constant)) or writes_to_objects(each):
            return False
        for n in ast.walk(each):
            # An iterator of the program is used up.
            looped = n.iter if isinstance(n, ast.For | ast.comprehension) else None
            if isinstance(n, leaves) or (looped is not None and not re.match(r"range\(", ast.unparse(looped))):
                return False
            if isinstance(n, ast.Call) and not is_pure(source, function, n):
                return False
    return True


def is_pure(source: Source, function: ast.FunctionDef, call: ast.Call) -> bool:
    """Return whether ``call`` in ``function`` calls a function of torch, of math or of Python that changes no object,
    a method of a local tensor, or a module of torch without a state.
    """
    called = ast.unparse(call.func)
    root, _, name = called.partition(".")[0], "", called.rpartition(".")[2]
    if DRAWING.search(called) or _SETTINGS.search(called) or re.search(r"[^_]_$", called):
        return False
    if any(k.arg in ("out", "inplace", None) for k in call.keywords):
        return False
    if root == "math" or root in modules_of_torch(source) or called in _BUILTINS:
        return True
    if re.fullmatch(r"self\.\w+", called):
        values = [n for n in ast.walk(source.tree) if isinstance(n, ast.Assign)]
        made = [ast.unparse(n.value) for n in values for t in n.targets if ast.unparse(t) == called]
        return bool(made) and all(map(_MODULES.match, made))
    local = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    local |= {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)} - {"self"}
    of_value = isinstance(call.func, ast.Attribute) and (root in local or not re.match(r"\w+(\.|$)", called))
    return of_value and name in METHODS - _OTHERS
