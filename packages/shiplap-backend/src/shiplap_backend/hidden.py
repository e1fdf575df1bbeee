"""Checks for parts of expressions that cannot change the value: an argument there would only seem to be used."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from math import inf, nextafter


def unused_operand_reason(symbol: str, operands: Sequence[ast.expr], numbers: Collection[str]) -> str:
    """Return the reason why one of ``operands`` cannot change the operator's result.

    The result is an empty string if each of them can. A tensor times zero is allowed, since the product is NaN where
    the tensor is infinite or NaN. Some operators need that.

    Args:
        symbol: The operator, such as ``+``.
        operands: The operands in order.
        numbers: The names of arguments that are no tensors.

    >>> unused_operand_reason("-", [ast.Name("alpha"), ast.Name("alpha")], ["alpha"])
    "'alpha' is compared or combined with itself"
    """
    if len(operands) != 2:
        return ""
    left, right = operands
    if symbol in ("-", "/", "//", "%", "^", "<", "<=", ">", ">=") and _same_expression(left, right):
        return f"{ast.unparse(left)!r} is compared or combined with itself"
    if symbol == "+" and (_is_negation(left, right) or _is_negation(right, left)):
        return f"{ast.unparse(left)!r} and {ast.unparse(right)!r} cancel"
    if symbol in ("/", "//", "%") and _number_literal(right) == 0:
        return f"{ast.unparse(left)} {symbol} {ast.unparse(right)} divides by zero"
    # Only numbers may be folded: a tensor times zero is NaN where the tensor is infinite or NaN.
    if not _argument_names(left, right) or not _argument_names(left, right) <= {*numbers}:
        return ""
    # The operands whose zero makes the result the same for every value of the other one.
    zeros = {"*": operands, "**": [right], "&": operands, "/": [left], "//": [left], "%": [left]}.get(symbol, [])
    if any(_number_literal(o) == 0 for o in zeros) or (symbol == "**" and _number_literal(left) == 1):
        return f"{ast.unparse(left)} {symbol} {ast.unparse(right)} is the same for every value"
    return ""


# The words that torch accepts for an argument: its schemas say that it is a text.
_WORDS = {
    "approximate": "none tanh",
    "rounding_mode": "trunc floor",
    "reduce": "sum prod mean amax amin add multiply max min",
    "side": "left right",
}


def constant_condition_reason(tree: ast.expr) -> str:
    """Return the reason why ``tree``, or a condition in it, has the same outcome in every call. Return an empty string
    if neither has.

    >>> constant_condition_reason(ast.parse("x if alpha == 1 or True else y", mode="eval").body.test)
    "'True' asks for no argument"
    >>> constant_condition_reason(ast.parse("rank(self) < 0", mode="eval").body)
    "'rank(self) < 0' has one outcome, whatever the arguments are"
    """
    if isinstance(tree, ast.IfExp) and _same_expression(tree.body, tree.orelse):
        return f"{ast.unparse(tree)!r} is the same either way"
    if isinstance(tree, ast.Subscript) and isinstance(tree.value, ast.List):
        return f"{ast.unparse(tree)!r} takes one element of a list that is written out"
    if isinstance(tree, ast.Compare) and _size_test_is_constant(tree):
        return f"{ast.unparse(tree)!r} has one outcome, whatever the arguments are"
    match tree:
        # Such an argument has one of a few words, so that a test for any other word never holds.
        case ast.Compare(left=ast.Name(id=name), comparators=[ast.Constant(value=str(word))]) if name in _WORDS:
            if word not in _WORDS[name].split():
                return f"{ast.unparse(tree)!r}: {name!r} is one of {', '.join(_WORDS[name].split())}"
    conditions = [tree.test] if isinstance(tree, ast.IfExp) else tree.values if isinstance(tree, ast.BoolOp) else []
    return next((f"{ast.unparse(c)!r} asks for no argument" for c in conditions if not _argument_names(c)), "")


def find_contradiction(conditions: Sequence[str]) -> str:
    """Return the two simple conditions in ``conditions`` that no call can satisfy together, as in the example. Return
    an empty string if some call satisfies all of ``conditions``.

    >>> find_contradiction(["alpha == 1 and rank(self) > 2", "alpha == 2"])
    "'alpha == 1' and 'alpha == 2'"
    """
    trees: list[ast.expr] = []
    for condition in conditions:
        try:
            trees.append(ast.parse(condition.strip(), mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError):
            continue
    certain = [part for tree in trees if len(ways := _ways(tree)) == 1 for part in ways[0]]
    found, alternatives = _clash(certain), _alternatives(trees)
    if found or len(alternatives) > _MOST_ALTERNATIVES:  # some of so many are not listed, and may hold
        return found
    for alternative in alternatives:
        found = _clash(alternative)
        if not found:
            return ""
    return found


_MOST_ALTERNATIVES = 64
_RELATIONS = {ast.Eq: "=", ast.NotEq: "<>", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: "=>"}  # orders that hold
_COUNTS = {"rank": 64.0, "size": float("inf"), "numel": float("inf"), "length": float("inf")}  # and the most they are


def _alternatives(trees: Sequence[ast.expr]) -> list[list[ast.expr]]:
    """Return the combinations of simple conditions under which all of ``trees`` are true.

    A combination is a list of conditions, such as comparisons, that must all hold. Any one of the combinations is
    enough. At most ``_MOST_ALTERNATIVES + 1`` combinations are returned.
    """
    if not trees:
        return [[]]
    ways: list[list[ast.expr]] = []
    others = _alternatives(trees[1:])
    for way in _ways(trees[0]):
        ways += [[*way, *rest] for rest in others]
    # One more than the most tells the caller that some are missing.
    return ways[: _MOST_ALTERNATIVES + 1]


def _ways(tree: ast.expr) -> list[list[ast.expr]]:
    """Return the combinations of simple conditions under which the expression ``tree`` is true.

    A combination is a list of conditions, such as comparisons, that must all hold. Any one of the combinations is
    enough.
    """
    match tree:
        case ast.BoolOp(op=ast.And(), values=parts):
            return _alternatives(parts)
        case ast.BoolOp(values=parts):
            return [way for part in parts for way in _ways(part)]
        case ast.IfExp(test=test, body=body, orelse=other):
            return [*_alternatives([test, body]), *_alternatives([ast.UnaryOp(ast.Not(), test), other])]
        case ast.UnaryOp(op=ast.Not(), operand=ast.UnaryOp(op=ast.Not(), operand=inner)):
            return _ways(inner)
        case ast.UnaryOp(op=ast.Not(), operand=ast.BoolOp(op=op, values=parts)):
            # By De Morgan: ``not (a or b)`` is ``not a and not b``.
            negated: list[ast.expr] = [ast.UnaryOp(ast.Not(), part) for part in parts]
            return _ways(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), negated))
        case ast.Compare(left=left, ops=ops, comparators=others) if len(ops) > 1:
            pairs = zip([left, *others[:-1]], ops, others, strict=True)
            return [[ast.Compare(one, [op], [other]) for one, op, other in pairs]]
    return [[tree]]


def _clash(parts: Sequence[ast.expr]) -> str:
    """Return a message with the first two of the conditions ``parts`` that exclude each other, or with the one that
    never holds.

    Return an empty string if they may all hold.
    """
    demands: dict[str, tuple[str, object]] = {}
    orders: dict[tuple[str, str], tuple[str, set[str]]] = {}
    ranges: dict[str, tuple[str, float, float]] = {}
    for part in parts:
        for text, name, value in _equality_demands(part):
            before = demands.setdefault(name, (text, value))
            if _values_exclude(before[1], value):
                return f"{before[0]!r} and {text!r}"
        for found in (_order_clash(part, orders), _range_clash(part, ranges)):
            if found:
                return found
    return ""


def _relation(tree: ast.expr) -> tuple[ast.expr, str, ast.expr] | None:
    """Return (left side, orders, right side) of the comparison ``tree``, or None if ``tree`` is not a single
    comparison.

    The orders are the characters among ``<``, ``=`` and ``>`` for which the comparison is true. For ``a <= b`` they are
    ``<=``, and for ``not a <= b`` they are ``>``.
    """
    negated = isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not)
    inner = tree.operand if isinstance(tree, ast.UnaryOp) else tree
    if not isinstance(inner, ast.Compare) or len(inner.ops) != 1 or type(inner.ops[0]) not in _RELATIONS:
        return None
    orders = _RELATIONS[type(inner.ops[0])]
    # A negated comparison holds in the other orders.
    return inner.left, "".join(o for o in "<=>" if (o in orders) != negated), inner.comparators[0]


def _order_clash(tree: ast.expr, known: dict[tuple[str, str], tuple[str, set[str]]]) -> str:
    """Return the reason why the comparison ``tree`` of two expressions contradicts earlier comparisons. Return an empty
    string if it does not.

    ``known`` has the orders (``<``, ``=``, ``>``) that are still possible for each pair of expressions. Orders that
    ``tree`` excludes are removed from it.
    """
    relation = _relation(tree)
    if relation is None or any(isinstance(side, ast.Constant) for side in (relation[0], relation[2])):
        return ""
    one, other = ast.unparse(relation[0]), ast.unparse(relation[2])
    allowed = {*relation[1]}
    # One key for both spellings: ``a < b`` is ``b > a``.
    if other < one:
        one, other = other, one
        allowed = {{"<": ">", ">": "<"}.get(o, o) for o in allowed}
    text, before = known.get((one, other), ("", {"="} if one == other else {"<", "=", ">"}))
    if not allowed & before:
        return f"{text!r} and {ast.unparse(tree)!r}" if text else f"{ast.unparse(tree)!r}, which never holds"
    known[one, other] = (ast.unparse(tree), allowed & before)
    return ""


def _range_clash(tree: ast.expr, known: dict[str, tuple[str, float, float]]) -> str:
    """Return the reason why the comparison ``tree`` with a number contradicts earlier comparisons. Return an empty
    string if it does not.

    ``known`` has the range that is still possible for each expression. Values that ``tree`` excludes are removed from
    it.
    """
    relation = _relation(tree)
    if relation is None or (isinstance(tree, ast.Compare) and _size_test_is_constant(tree)):
        return ""
    left, orders, right = relation
    numbers = written_number(right)
    if not numbers:
        left, right, numbers = right, left, written_number(left)
        orders = orders.translate(str.maketrans("<>", "><"))
    if len(numbers) != 1 or written_number(left):
        return ""
    number, name = float(numbers[0]), ast.unparse(left)
    counted = left.func.id if isinstance(left, ast.Call) and isinstance(left.func, ast.Name) else ""
    most = _COUNTS.get(counted)
    text, low, high = known.get(name, ("", float("-inf") if most is None else 0.0, most or float("inf")))
    # The next numbers of the kind: whole ones for counts, the next floats for others.
    whole = most is not None and number.is_integer()
    above, below = (number + 1, number - 1) if whole else (nextafter(number, inf), nextafter(number, -inf))
    if {*orders} == {"<", ">"}:  # inside of the range ``x != 2`` would leave two, which this record cannot hold
        low, high = above if number == low else low, below if number == high else high
    else:
        low = max(low, number if "=" in orders else above) if "<" not in orders else low
        high = min(high, number if "=" in orders else below) if ">" not in orders else high
    if low > high or (most is not None and low == high and not low.is_integer()):
        return f"{text!r} and {ast.unparse(tree)!r}" if text else f"{ast.unparse(tree)!r}, which never holds"
    known[name] = (ast.unparse(tree), low, high)
    return ""


def find_calls(condition: str) -> Iterator[tuple[str, str, bool]]:
    """Yield ``(function, argument, outcome)`` for each test of one argument that ``condition`` requires.

    >>> list(find_calls("is_bool(self) and not is_float(other)"))
    [('is_bool', 'self', True), ('is_float', 'other', False)]
    """
    try:
        ways = _ways(ast.parse(condition.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        return
    # If the condition can be true in several ways, it requires none of its parts.
    for tree in ways[0] if len(ways) == 1 else ():
        negated = isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not)
        match tree.operand if isinstance(tree, ast.UnaryOp) else tree:
            case ast.Call(func=ast.Name(id=function), args=[ast.Name(id=argument)]):
                yield function, argument, not negated


def _values_exclude(one: object, other: object) -> bool:
    """Return whether one argument cannot have both the value ``one`` and the value ``other``.

    The values True and False stand for all values that count as true or false in Python.
    """
    if None in (one, other):
        # None counts as false, so "is None" and "not x" can hold together.
        return (one, other) not in ((None, None), (None, False), (False, None))
    return type(one) is type(other) and one != other


def _equality_demands(tree: ast.expr) -> Iterator[tuple[str, str, object]]:
    """Yield ``(source, name, value)`` if the condition ``tree`` fixes an argument or a call to one value. ``source`` is
    the source code of the condition, and ``name`` that of the argument or call. Examples of conditions are ``name``,
    ``not name``, ``name == 2`` and ``is_bool(name)``.
    """
    match tree:
        case ast.Name() | ast.Call():
            yield ast.unparse(tree), ast.unparse(tree), True
        case ast.UnaryOp(op=ast.Not(), operand=ast.Name() | ast.Call() as operand):
            yield ast.unparse(tree), ast.unparse(operand), False
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq() | ast.Is()], comparators=[ast.Constant(value=value)]):
            yield ast.unparse(tree), name, float(value) if type(value) is int else value


def _size_test_is_constant(tree: ast.Compare) -> bool:
    """Return whether ``tree``, a comparison of a count with a literal, has the same outcome in every call.

    A count is a number of dims or of elements, which is never negative.
    """
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
    """Return the source code of the first size in the list expression ``sizes`` that is negative for all arguments.
    Return an empty string if there is none or if the expression is invalid.

    >>> find_negative_size("[size(self, -1), 2 - 3]")
    '2 - 3'
    """
    try:
        return _find_negative_literal(ast.parse(sizes.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        return ""


def _find_negative_literal(tree: ast.expr) -> str:
    """Return the source code of the first negative integer in ``tree``, a size or a list of sizes.

    Both branches of ``a if test else b`` are searched. Only integer literals, and sums and products of them, are found.
    Return an empty string if there is none.
    """
    parts = tree.elts if isinstance(tree, ast.List) else []
    parts = [tree.body, tree.orelse] if isinstance(tree, ast.IfExp) else parts
    number = _integer_literal(tree)
    if number is not None and number < 0:
        return ast.unparse(tree)
    return next(filter(None, map(_find_negative_literal, parts)), "")


def _integer_literal(tree: ast.expr) -> int | None:
    """Return the value of ``tree``, an expression of integer literals, signs, sums, differences and products.

    Return None for another expression.
    """
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


def written_number(tree: ast.expr) -> list[float]:
    """Return a list with the number that ``tree`` stands for, if ``tree`` is a number literal with or without a sign.

    Return an empty list for any other expression.
    """
    match tree:
        # Before ``int()``, which matches True and False.
        case ast.Constant(value=bool()):
            return []
        case ast.Constant(value=int() | float() as number):
            return [number]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return [-number for number in written_number(operand)]
    return []


def _argument_names(*trees: ast.expr) -> set[str]:
    """Return all names that occur in ``trees``, including the names of functions."""
    return {n.id for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)}


def _same_expression(left: ast.expr, right: ast.expr) -> bool:
    """Return whether the expressions ``left`` and ``right`` are equal apart from spaces."""
    return ast.dump(left) == ast.dump(right)


def _is_negation(tree: ast.expr, other: ast.expr) -> bool:
    """Return whether ``tree`` is ``other`` with a minus sign in front."""
    return isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub) and _same_expression(tree.operand, other)


def _number_literal(tree: ast.expr) -> object:
    """Return the value of the literal ``tree``, or None for another expression."""
    try:
        return ast.literal_eval(tree)
    except ValueError:
        return None
