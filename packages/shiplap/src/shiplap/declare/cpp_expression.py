"""Dim expressions as C++. They are in the same small language that ``shiplap.declare.dim_expression`` evaluates."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable

from shiplap.declare.dim_expression import Expr

# Functions in place of operators: they check for overflow, and round as Python does.
_ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "shiplap::add({}, {})",
    ast.Sub: "shiplap::sub({}, {})",
    ast.Mult: "shiplap::mul({}, {})",
    ast.FloorDiv: "shiplap::floordiv({}, {})",
    ast.Mod: "shiplap::floormod({}, {})",
}
_COMPARISON: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}


def quote_cpp(text: str) -> str:
    """Return ``text`` as a C++ string literal with its quotes. Raise ``ValueError`` if it is not printable ASCII."""
    if not (text.isascii() and text.isprintable()):
        raise ValueError(f"{text!r} is not printable ASCII")
    return json.dumps(text)


def to_cpp(expr: Expr, variable: Callable[[str], str]) -> str:
    """Return the dim expression ``expr`` as the source of a C++ expression for ``shiplap/native.h``. ``variable``
    returns the C++ name of a dim or argument.

    Numbers are of type ``int64_t``. An expression whose intermediate results need more bits has no value. ``//`` and
    ``%`` round down, as in Python.
    """

    def text(node: ast.expr) -> str:
        """Return the C++ text of one node of the expression. Raise ``ValueError`` for a node that has no C++ text."""
        match node:
            case ast.Constant(value=str() as value):
                # C++ would compare two literals by their addresses.
                return f"std::string({quote_cpp(value)})"
            case ast.Constant(value=int() as value):
                return f"int64_t{{{int(value)}}}"
            case ast.Name(id=name):
                return variable(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                # sub() refuses results beyond 64 bits, where the minus of C++ would overflow.
                return f"shiplap::sub(int64_t{{0}}, {text(operand)})"
            case ast.BinOp(left=left, op=operator, right=right):
                return _ARITHMETIC[type(operator)].format(text(left), text(right))
            case ast.Call(func=ast.Name(id=name), args=args):
                return f"shiplap::{name}({', '.join(map(text, args))})"
            case ast.Subscript(value=value, slice=index):
                return f"shiplap::item({text(value)}, {text(index)})"
            case ast.Compare(left=left, ops=operators, comparators=rights):
                # C++ has no chained comparisons, so that each pair is compared.
                pairs = zip([left, *rights], operators, rights, strict=False)
                return f"({' && '.join(f'{text(a)} {_COMPARISON[type(o)]} {text(b)}' for a, o, b in pairs)})"
            case ast.BoolOp(values=values):
                return f"({' && '.join(map(text, values))})"
        raise ValueError(f"no C++ for {ast.unparse(node)}")

    return text(ast.parse(expr.source, mode="eval").body)
