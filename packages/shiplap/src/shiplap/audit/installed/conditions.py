"""The condition that a message of a C++ check quotes, such as ``Expected a.numel() == b.numel() to be true``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator

from shiplap.audit.installed.places import Place, Property
from shiplap.audit.installed.recipes import CallRecipe, TensorRecipe
from shiplap.audit.installed.refusals import dtype_of_word

_QUOTED = re.compile(r"Expected (?P<a>.+?) to be true, but got false|Check failed: (?P<b>.+?) \([^()]* vs\. ")
# Parts of C++ that are not Python, and what replaces them.
_IN_PYTHON = (
    (r"static_cast<[^<>]*>|\b(c10|at|torch|std)::|\bScalarType::", ""),
    (r"->", "."),
    (r"&&", " and "),
    (r"\|\|", " or "),
    (r"!(?!=)", " not "),
)
_PROPERTIES = {
    "numel": Property.NUMEL,
    "dim": Property.RANK,
    "ndimension": Property.RANK,
    "size": Property.SIZE,
    "sizes": Property.SIZE,
    "scalar_type": Property.DTYPE,
    "dtype": Property.DTYPE,
}
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
_MOST = 1 << 16  # of a size or a number that a condition demands
# The number next to the other side of a comparison that makes it true, relative to that side.
_NEXT = {ast.Eq: 0, ast.GtE: 0, ast.LtE: 0, ast.Gt: 1, ast.Lt: -1, ast.NotEq: 1}
_MIRRORED: dict[type, type] = {ast.Gt: ast.Lt, ast.Lt: ast.Gt, ast.GtE: ast.LtE, ast.LtE: ast.GtE}


def calls_that_meet(refusal: str, call: CallRecipe) -> Iterator[CallRecipe]:
    """Yield copies of ``call`` in which a property of one argument meets the condition that the message ``refusal``
    quotes. There are none if it quotes no condition, or one on other values than those of arguments.
    """
    found = _QUOTED.search(refusal)
    text = (found["a"] or found["b"]) if found else ""
    for pattern, python in _IN_PYTHON:
        text = re.sub(pattern, python, text)
    try:
        tree = ast.parse(text.strip(), mode="eval") if len(text) < 300 else ast.parse("")
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            kind, right = type(node.ops[0]), node.comparators[0]
            yield from _with_side(node.left, kind, right, call)
            yield from _with_side(right, _MIRRORED.get(kind, kind), node.left, call)


def _with_side(side: ast.expr, kind: type, other: ast.expr, call: CallRecipe) -> Iterator[CallRecipe]:
    """Yield ``call`` with a value of the property ``side`` for which its comparison of this ``kind`` with ``other`` is
    true.
    """
    wanted = _value_of(other, call)
    if isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mod) and kind is ast.Eq and wanted == 0:
        wanted = _value_of(side.right, call)
        side = side.left
    place = _place_of(side, call)
    if place is None or wanted is None or kind not in _NEXT:
        return
    value = wanted + _NEXT[kind] if isinstance(wanted, int) else wanted
    possible = (
        isinstance(value, str) if place.kind is Property.DTYPE else isinstance(value, int) and 0 <= value <= _MOST
    )
    if possible and value != place.value(call):
        yield place.with_value(call, value)


def _value_of(node: ast.expr, call: CallRecipe) -> int | str | None:
    """Return the number or the dtype that ``node`` denotes for the arguments of ``call``, or None if it is unknown."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value_of(node.operand, call)
        return -value if isinstance(value, int) else None
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _value_of(node.left, call), _value_of(node.right, call)
        if isinstance(left, int) and isinstance(right, int):
            return _ARITHMETIC[type(node.op)](left, right)
        return None
    place = _place_of(node, call)
    if place is not None:
        return place.value(call)
    return (dtype_of_word(node.id) or None) if isinstance(node, ast.Name) else None


def _place_of(node: ast.expr, call: CallRecipe) -> Place | None:
    """Return the property of an argument of ``call`` that ``node`` denotes, such as ``x.size(0)``, or None."""
    if isinstance(node, ast.Name):
        name = _argument_of(node.id, call)
        return Place(name, Property.NUMBER) if type(call.arguments.get(name)) is int else None
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    owner, kind = node.func.value, _PROPERTIES.get(node.func.attr)
    owner = owner.value if isinstance(owner, ast.Subscript) else owner
    name = _argument_of(owner.id, call) if isinstance(owner, ast.Name) else ""
    value = call.arguments.get(name)
    if kind is None or value is None:
        return None
    if isinstance(value, tuple) and owner is node.func.value:
        return Place(name, Property.COUNT) if kind is Property.SIZE else None
    one = value[0] if isinstance(value, tuple) and value else value
    if not isinstance(one, TensorRecipe):
        return None
    if kind is not Property.SIZE:
        return Place(name, kind)
    axis = _value_of(node.args[0], call) if node.args else None
    return Place(name, kind, axis % len(one.shape)) if isinstance(axis, int) and one.shape else None


def _argument_of(variable: str, call: CallRecipe) -> str:
    """Return the name of the argument of ``call`` that a C++ ``variable`` is: its own, or that of which it is made,
    such as ``input`` for ``input_c``. Return an empty string if there is none.
    """
    made = [n for n in call.arguments if variable == n or variable.startswith(n + "_")]
    return max(made, key=len, default="")
