"""Checks for parts of expressions that cannot change the value: an argument there would only seem to be used."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence


def unused_operand_reason(symbol: str, operands: Sequence[ast.expr], numbers: Collection[str]) -> str:
    """Return why ``operands`` do not change the operator's result, or "".

    A tensor times zero is left alone: infinite values and NaN make NaN of it, which some operators need.

    Args:
        symbol: of the operator.
        operands: in order.
        numbers: the names of arguments that are no tensors.

    >>> hidden("-", [ast.Name("alpha"), ast.Name("alpha")], ["alpha"])
    "'alpha' is compared or combined with itself"
    """
    if len(operands) != 2:
        return ""
    left, right = operands
    if symbol in ("-", "/", "//", "%", "^") and _same_expression(left, right):
        return f"{ast.unparse(left)!r} is compared or combined with itself"
    if symbol == "+" and (_is_negation(left, right) or _is_negation(right, left)):
        return f"{ast.unparse(left)!r} and {ast.unparse(right)!r} cancel"
    # Only numbers may be folded: a tensor times zero is NaN where the tensor is infinite or NaN.
    if not _argument_names(left, right) or not _argument_names(left, right) <= {*numbers}:
        return ""
    # The operands whose zero makes the result the same for every value of the other one.
    zeros = {"*": operands, "**": [right], "&": operands, "/": [left], "//": [left], "%": [left]}.get(symbol, [])
    if any(_number_literal(o) == 0 for o in zeros) or (symbol == "**" and _number_literal(left) == 1):
        return f"{ast.unparse(left)} {symbol} {ast.unparse(right)} is the same for every value"
    return ""


def constant_condition_reason(tree: ast.expr) -> str:
    """Return why an expression has the same value or outcome in every call, or "". ``x if True else y`` is only ``x``.

    >>> undecided(ast.parse("x if alpha == 1 or True else y", mode="eval").body.test)
    "'True' asks for no argument"
    >>> undecided(ast.parse("rank(self) < 0", mode="eval").body)
    "'rank(self) < 0' has one outcome, whatever the arguments are"
    """
    if isinstance(tree, ast.IfExp) and _same_expression(tree.body, tree.orelse):
        return f"{ast.unparse(tree)!r} is the same either way"
    if isinstance(tree, ast.Subscript) and isinstance(tree.value, ast.List):
        return f"{ast.unparse(tree)!r} takes one element of a list that is written out"
    if isinstance(tree, ast.Compare) and _size_test_is_constant(tree):
        return f"{ast.unparse(tree)!r} has one outcome, whatever the arguments are"
    conditions = [tree.test] if isinstance(tree, ast.IfExp) else tree.values if isinstance(tree, ast.BoolOp) else []
    return next((f"{ast.unparse(c)!r} asks for no argument" for c in conditions if not _argument_names(c)), "")


def find_contradiction(conditions: Sequence[str]) -> str:
    """Return two parts of ``conditions`` that no call can satisfy together, or "".

    >>> contradiction(["alpha == 1 and rank(self) > 2", "alpha == 2"])
    "'alpha == 1' and 'alpha == 2'"
    """
    demands: dict[str, tuple[str, object]] = {}
    for condition in conditions:
        try:
            tree = ast.parse(condition.strip(), mode="eval").body
        except (SyntaxError, RecursionError, MemoryError):
            continue
        for part, name, value in _equality_demands(tree):
            before = demands.setdefault(name, (part, value))
            if _values_exclude(before[1], value):
                return f"{before[0]!r} and {part!r}"
    return ""


def _values_exclude(one: object, other: object) -> bool:
    """Return whether no argument can have both values. True and False stand for all true or false values."""
    if None in (one, other):
        # None counts as false, so "is None" and "not x" can hold together.
        return (one, other) not in ((None, None), (None, False), (False, None))
    return type(one) is type(other) and one != other


def _equality_demands(tree: ast.expr) -> Iterator[tuple[str, str, object]]:
    """Yield the conditions in ``tree`` that fix an argument to one value: text, argument and value."""
    match tree:
        case ast.BoolOp(op=ast.And()):
            for part in tree.values:
                yield from _equality_demands(part)
        case ast.Name(id=name):
            yield name, name, True
        case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=name)):
            yield ast.unparse(tree), name, False
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq() | ast.Is()], comparators=[ast.Constant(value=value)]):
            yield ast.unparse(tree), name, float(value) if type(value) is int else value


def _size_test_is_constant(tree: ast.Compare) -> bool:
    """Return whether a comparison of a number of dims or elements has the same outcome for every call."""
    match tree:
        case ast.Compare(
            left=ast.Call(func=ast.Name(id="rank" | "size" | "numel" | "length")), ops=[op], comparators=[c]
        ):
            number = _integer_literal(c)
        case _:
            return False
    if number is None:
        return False
    # Such numbers are never below zero, so every comparison with a negative bound is decided.
    return number < 0 or (number == 0 and isinstance(op, ast.Lt | ast.GtE))


def find_negative_size(sizes: str) -> str:
    """Return the size that is negative for all arguments, or "". Invalid expressions give "" as well.

    >>> negative("[size(self, -1), 2 - 3]")
    '2 - 3'
    """
    try:
        return _find_negative_literal(ast.parse(sizes.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        return ""


def _find_negative_literal(tree: ast.expr) -> str:
    parts = tree.elts if isinstance(tree, ast.List) else []
    parts = [tree.body, tree.orelse] if isinstance(tree, ast.IfExp) else parts
    number = _integer_literal(tree)
    if number is not None and number < 0:
        return ast.unparse(tree)
    return next(filter(None, map(_find_negative_literal, parts)), "")


def _integer_literal(tree: ast.expr) -> int | None:
    """Return the integer that ``tree`` writes in digits and signs, or None."""
    match tree:
        case ast.Constant(value=int(stated)):
            return stated
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = _integer_literal(operand)
            return None if number is None else -number
        case ast.BinOp(left=left, op=op, right=right):
            one, other = _integer_literal(left), _integer_literal(right)
            if one is None or other is None:
                return None
            return {ast.Add: one + other, ast.Sub: one - other, ast.Mult: one * other}.get(type(op))
    return None


def _argument_names(*trees: ast.expr) -> set[str]:
    return {n.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)}


def _same_expression(left: ast.expr, right: ast.expr) -> bool:
    return ast.dump(left) == ast.dump(right)


def _is_negation(tree: ast.expr, other: ast.expr) -> bool:
    """Return whether ``tree`` is the negative of ``other``."""
    return isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub) and _same_expression(tree.operand, other)


def _number_literal(tree: ast.expr) -> object:
    """Return the number that ``tree`` writes, or None."""
    try:
        return ast.literal_eval(tree)
    except ValueError:
        return None
