"""Dim expressions, the small language of ``dims=``, ``bounds=``, ``requires=`` and ``workspace=``.

It has integers, names of dims and int (list) arguments, ``+ - * // %``, comparisons, ``and``, subscripts, and the
functions below. Expressions are evaluated on plain and on symbolic sizes. They are stored as a syntax tree, so that
they can be printed as C++ too.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import TypeAlias

import torch

from shiplap.cached_property import cached_property
from shiplap.declare.values import Env, Size
from shiplap.errors import error
from shiplap.torch_private.symbolic_sizes import not_one

_Sizes: TypeAlias = list[Size] | tuple[Size, ...]


def _prod_of_sizes(*values: Size | _Sizes) -> Size:
    """Return the product of sizes, given as arguments or as one list. Expressions in declarations call it ``prod``."""
    return math.prod(_size_items(values))


def _min_of_sizes(*values: Size | _Sizes) -> Size:
    """Return the least of sizes, real or symbolic, given as arguments or as one list. Expressions in declarations call
    it ``min``.
    """
    items = _size_items(values)
    return min(items) if _are_plain_ints(items) else reduce(torch.sym_min, items)


def _max_of_sizes(*values: Size | _Sizes) -> Size:
    """Return the greatest of sizes, real or symbolic, given as arguments or as one list. Expressions in declarations
    call it ``max``.
    """
    items = _size_items(values)
    return max(items) if _are_plain_ints(items) else reduce(torch.sym_max, items)


def _are_plain_ints(items: Sequence[Size]) -> bool:
    """Return whether all items are of the type int, as in every real call. For these, the built-in functions are faster
    than torch's functions for symbolic sizes.
    """
    return set(map(type, items)) <= {int}


def _size_items(values: Sequence[Size | _Sizes]) -> Sequence[Size]:
    """Return the sizes in the arguments of ``prod``, ``min`` or ``max`` in an expression, written as ``f(a, b)`` or
    ``f(list)``. Raise ``TypeError`` if a list is among several arguments.
    """
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        return values[0]
    sizes = [v for v in values if not isinstance(v, (list, tuple))]
    if len(sizes) < len(values):
        raise TypeError("a list among sizes")
    return sizes


def _broadcast_sizes(*values: Size | _Sizes) -> Size:
    """Return the size to which sizes broadcast, which is the first that is not 1, or 1. Expressions in declarations
    call it ``broadcast``.
    """
    return next((v for v in _size_items(values) if (v != 1 if type(v) is int else not_one(v))), 1)


def _ceil_divide(a: Size, b: Size) -> Size:
    """Return ``a / b`` rounded up, for positive sizes. Expressions in declarations call it ``cdiv``."""
    return (a + b - 1) // b


def _next_power_of_2(a: Size) -> int:
    """Return the least power of two that is at least ``a``. A symbolic size is compared with powers of two, and each
    comparison adds a guard to the trace.
    """
    if isinstance(a, int):
        return 1 << max(0, a - 1).bit_length()
    power = 1
    while power < a:  # a symbolic size is guarded to one power-of-two bucket, not to its value
        power *= 2
    return power


def _power_of_2(a: int) -> int:
    """Return two to the power ``a``. Raise ``ValueError`` unless the result is a positive number of 64 bits."""
    if not 0 <= a <= 62:
        raise ValueError(f"2^{a} is no positive number of 64 bits")
    return 1 << a


def _choose_size(condition: Size | bool, yes: Size, no: Size) -> Size:
    """Return ``yes`` if ``condition`` is true or a size other than 0, and otherwise ``no``. Expressions in declarations
    call this function, since they have no ``if``.
    """
    return yes if condition else no


NO_VALUES_FIX = (
    "an expression sees sizes and int arguments, and no values of tensors. Check values in a function around the op, "
    "or in the kernel"
)
FUNCTIONS: dict[str, Callable[..., Size]] = {
    "len": len,
    "prod": _prod_of_sizes,
    "min": _min_of_sizes,
    "max": _max_of_sizes,
    "cdiv": _ceil_divide,
    "gcd": math.gcd,
    "pow2": _power_of_2,
    "pow2ceil": _next_power_of_2,
    "where": _choose_size,
    "broadcast": _broadcast_sizes,
}

# Nodes beyond these are refused, so that an expression has the same value in Python and in C++.
_GRAMMAR = (
    ast.Expression,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
    ast.Mod,
    ast.UnaryOp,
    ast.USub,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.Call,
    ast.Subscript,
    ast.Compare,
    ast.Eq,
    ast.NotEq,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.BoolOp,
    ast.And,
)
# What to write in place of syntax that the language of dims does not have.
_REPLACEMENTS: dict[type[ast.AST], str] = {
    ast.Div: "write // for /, without blanks, or (n+1)//2 to round n/2 up: a size is a whole number",
    ast.Or: "write where(a, 1, b) in place of 'a or b'",
    ast.Not: "write the opposite comparison in place of 'not'",
    ast.Pow: "write n*n in place of n**2",
    ast.IfExp: "write where(condition, a, b) in place of 'a if condition else b'",
}


@dataclass(frozen=True)
class Expr:
    """A checked expression of a declaration, such as ``cdiv(n, 2)``. ``source`` is its text, and two expressions with
    the same text are equal. ``names`` are the names of dims and arguments in it.
    """

    source: str

    @classmethod
    def parse(cls, source: str, where: str) -> Expr:
        """Return the expression of the text ``source``, such as ``cdiv(n, 2)``, after checking it against the grammar.
        Raise ``SL105`` for any other text. The error has ``where`` as the place and names what the grammar lacks.
        """
        expr = cls(source.strip())
        try:
            tree = ast.parse(expr.source, mode="eval")
        except SyntaxError as e:
            got, expected = f"{source!r}: {e.msg}", "an expression, such as 2*n+1"
            raise error("SL105", where=where, got=got, expected=expected) from None
        for node in ast.walk(tree):
            # The text is compiled later, so that nothing but sizes and these functions may be in it.
            outside = not isinstance(node, _GRAMMAR)
            literal = isinstance(node, ast.Constant) and not isinstance(node.value, (int, str))
            call = isinstance(node, ast.Call) and not (
                isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
            )
            if outside or literal or call:
                part = repr(ast.unparse(node)) if isinstance(node, ast.expr) else type(node).__name__
                reads = isinstance(node.func if isinstance(node, ast.Call) else node, ast.Attribute)
                fix = next(
                    (fix for kind, fix in _REPLACEMENTS.items() if isinstance(node, kind)), NO_VALUES_FIX * reads
                )
                raise error("SL105", where=where, got=source, expected=f"an expression without {part}", fix=fix)
        return expr

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of dims and arguments in the expression, without those of functions."""
        tree = ast.parse(self.source, mode="eval")
        return frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name)) - FUNCTIONS.keys()

    def __call__(self, env: Env) -> Size:
        """Return the value of the expression for the values ``env`` of its names. It is an int, a SymInt for symbolic
        sizes, or a bool for a comparison.
        """
        return _compile_expression(self.source)(env)

    def __str__(self) -> str:
        """Return the text of the expression."""
        return self.source


class _FromEnv(ast.NodeTransformer):
    """A transformer that replaces the names in an expression by lookups in ``env``. An argument called ``min``
    therefore hides no function.
    """

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Return the call with its arguments converted to lookups in ``env``. The name of the function stays."""
        return ast.Call(node.func, [self.visit(a) for a in node.args], [])

    def visit_Name(self, node: ast.Name) -> ast.Subscript:
        """Return the syntax tree of ``env["n"]`` for the node of a name ``n``."""
        return ast.Subscript(ast.Name("env", ast.Load()), ast.Constant(node.id), ast.Load())


@cache
def _compile_expression(source: str) -> Callable[[Env], Size]:
    """Return a function that evaluates the expression ``source``. Its argument ``env`` holds the values by name. Each
    text is compiled once.
    """
    arguments = ast.arguments(posonlyargs=[], args=[ast.arg("env")], kwonlyargs=[], kw_defaults=[], defaults=[])
    body = _FromEnv().visit(ast.parse(source, mode="eval")).body
    tree = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, body)))
    # Without built-ins, an expression can call nothing but the functions of the language.
    function: Callable[[Env], Size] = eval(
        compile(tree, f"<dim expression {source}>", "eval"), {**FUNCTIONS, "__builtins__": {}}
    )
    return function
