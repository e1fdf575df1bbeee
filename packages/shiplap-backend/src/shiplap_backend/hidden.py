"""Combinations of operands whose value does not depend on them: an argument in them would only seem to be used."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence

__all__ = ["hidden"]


def hidden(symbol: str, operands: Sequence[ast.expr], numbers: Collection[str]) -> str:
    """Why ``operands`` do not matter to the operator's result, or nothing.

    A tensor times zero is left alone: infinite values and NaN make NaN of it, which some operators want.

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
    if symbol in ("-", "/", "%", "^") and ast.dump(left) == ast.dump(right):
        return f"{ast.unparse(left)!r} is compared or combined with itself"
    names = {n.id for o in operands for n in ast.walk(o) if isinstance(n, ast.Name)}
    zeros = {"*": operands, "**": [right], "&": operands}.get(symbol, [])
    if names and names <= {*numbers} and any(isinstance(o, ast.Constant) and o.value == 0 for o in zeros):
        return f"{ast.unparse(left)} {symbol} {ast.unparse(right)} is the same for every value"
    return ""
