"""Search of a candidate's source, without running it, for decisions by a remainder that few values have.

A candidate that is wrong where one number of its arguments has one of ten thousand remainders is right in all calls of
most judgements. A remainder of a size, as of a number of blocks, is no such number.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shiplap.sandbox.kept_counts import place_name, targets_of
from shiplap.sandbox.native_counts import JUDGED_CALLS
from shiplap.sandbox.source_scan import number_of

READING = {"item", "tolist", "tobytes"}
"""Methods that return numbers of a tensor, or bytes of which a number may be computed."""
REDUCING = {"sum", "mean", "max", "min", "amax", "amin", "prod", "norm", "std", "var"}
"""Methods whose result, as an argument of ``int`` or ``float``, is a number of a tensor."""
WORD = (1 << 31) - 1  # from which on a remainder is a part of a number, as of a seed of 64 bits, and decides nothing
DIVIDING = {"fmod", "remainder", "divmod", "mod", "bitwise_and"}
"""Functions that return a remainder by their second argument."""


def rare_remainders(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, reason) where code computes the remainder of a number of a tensor by a constant of a thousand or
    more, or its lowest bits, up to ``WORD``. ``tree`` is the syntax tree of a module.
    """
    nodes = list(ast.walk(tree))
    assigned = (n for n in nodes if isinstance(n, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and n.value is not None)
    numbers = _numbers_of_tensors(nodes, set())
    read = {place_name(target) for n in assigned if id(n.value) in numbers for target in targets_of(n)} - {""}
    numbers = _numbers_of_tensors(nodes, read)
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.BitAnd)):
            value, by = node.left, node.right
        elif isinstance(node, ast.Call) and _called(node) in DIVIDING and len(node.args) > 1:
            value, by = node.args[:2]
        else:
            continue
        for number, other in ((by, value), (value, by)):  # a mask of bits may come first
            amount = number_of(number)
            if isinstance(amount, (int, float)) and JUDGED_CALLS <= abs(amount) < WORD and id(other) in numbers:
                yield node.lineno, f"a remainder of one number by {amount:g}, which few values have"


def _called(node: ast.Call) -> str:
    """Return the name of the function or method that a call calls, or an empty string."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


def _is_shape(node: ast.AST) -> bool:
    """Return whether an expression is the shape of a tensor or a slice of it, as in ``np.prod(x.shape[1:])``."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        node = node.value
    return getattr(node, "attr", "") == "shape" or (isinstance(node, ast.Call) and _called(node) == "size")


def _is_reduction(node: ast.AST) -> bool:
    """Return whether an expression is a call of a method of ``REDUCING``, for another value than a shape."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return _called(node) in REDUCING and not any(map(_is_shape, node.args[:1]))


def _numbers_of_tensors(nodes: list[ast.AST], read: set[str]) -> set[int]:
    """Return the ids of those of ``nodes`` that are computed from a number of a tensor, or from one of the variables
    ``read``, which hold such numbers. ``nodes`` are all of a tree, parents before their children. Each is looked at
    once, since a source may nest thousands of remainders.
    """
    reduced, found = set[int](), set[int]()
    for node in reversed(nodes):
        inner = {id(child) for child in ast.iter_child_nodes(node)}
        name = _called(node) if isinstance(node, ast.Call) else ""
        holds = not inner.isdisjoint(reduced)
        if holds or _is_reduction(node):
            reduced.add(id(node))
        converted = holds and name in ("int", "float")
        if converted or name in READING or place_name(node) in read or not inner.isdisjoint(found):
            found.add(id(node))
    return found
