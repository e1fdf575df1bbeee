"""Symbolic sizes of the graph that Inductor lowers: their ranges, the conditions on them, and upper limits to set.

Nothing here adds a guard, except for :func:`limit_size`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import Mod, PythonMod
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy


@dataclass(frozen=True)
class SizeSymbol:
    """A symbol of a graph's sizes.

    Attributes:
        symbol: opaque to callers.
        lower, upper: the range in which the graph may run; ``upper`` is None where it has no end.
        hint: the value in the call for which the graph is compiled.
        backed: whether the size comes from an input, so that a guard can check it. Other sizes depend on data.
    """

    symbol: Any
    lower: int
    upper: int | None
    hint: int
    backed: bool


def _simplified_size(size: Any) -> Any:
    """Return a size as an expression of symbols that are not replaced by others."""
    expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.sympify(size)
    sizes = V.graph.sizevars
    return sizes.simplify(expr.xreplace(sizes.inv_precomputed_replacements))


def evaluate_size(size: Any, values: Mapping[Any, int]) -> int:
    """Return a size as a number. Symbols have these ``values``, and every other symbol has that of the call."""
    expr = _simplified_size(size)
    expr = expr.xreplace({s: sympy.Integer(values[s]) for s in expr.free_symbols if s in values})
    return int(expr) if expr.is_number else int(V.graph.sizevars.optimization_hint(expr, fallback=8192))


def symbols_of(sizes: Iterable[Any]) -> tuple[SizeSymbol, ...]:
    """Return the symbols in sizes, each once, in the order of their first use."""
    met: dict[Any, None] = {}
    for size in sizes:
        met.update(dict.fromkeys(sorted(_simplified_size(size).free_symbols, key=str)))
    return tuple(_describe_symbol(symbol) for symbol in met)


def _describe_symbol(symbol: Any) -> SizeSymbol:
    env = V.graph.sizevars.shape_env
    bounds = env.var_to_range.get(symbol)
    lower = int(bounds.lower) if bounds is not None and bounds.lower.is_Integer else 0
    upper = int(bounds.upper) if bounds is not None and bounds.upper.is_Integer else None
    backed = not free_unbacked_symbols(symbol)
    return SizeSymbol(symbol, max(0, lower), upper, evaluate_size(symbol, {}), backed)


def graph_conditions() -> list[Any]:
    """Return the guards and assertions of the graph on sizes, as conditions on symbols."""
    env = V.graph.sizevars.shape_env
    asserted = [a.expr for listed in env.deferred_runtime_asserts.values() for a in listed]
    return [env.replace(expr) for expr in (*(guard.expr for guard in env.guards), *asserted)]


def conditions_admit(conditions: Iterable[Any], values: Mapping[Any, int]) -> bool:
    """Return whether sizes meet all conditions. A condition on a symbol that has no value is ignored."""
    given = {symbol: sympy.Integer(value) for symbol, value in values.items()}
    return all(expr.xreplace(given) != sympy.false for expr in conditions)


def edges_of(conditions: Iterable[Any], symbol: Any) -> tuple[set[int], set[int]]:
    """Return the numbers with which conditions compare a symbol, and the numbers that have to divide it."""
    compared, divisors = set[int](), set[int]()
    for expr in conditions:
        if symbol in expr.free_symbols:
            compared |= {abs(int(n)) for n in expr.atoms(sympy.Integer) if abs(n) > 1}
            rests = [mod.args[1] for mod in expr.atoms(Mod, PythonMod, sympy.Mod)]
            divisors |= {int(by) for by in rests if by.is_Integer and by > 1}
    return compared, divisors


def bounds_of(conditions: Iterable[Any], symbol: Any) -> Iterator[Any]:
    """Yield the expressions of other symbols that a symbol does not exceed, by the conditions."""
    for expr in conditions:
        if not isinstance(expr, (sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)):
            continue
        excess = expr.lhs - expr.rhs if isinstance(expr, (sympy.Le, sympy.Lt)) else expr.rhs - expr.lhs
        excess = sympy.expand(excess)
        factor = excess.coeff(symbol)
        rest = sympy.expand(excess - factor * symbol)
        if factor.is_Integer and factor > 0 and symbol not in rest.free_symbols:
            yield -rest / factor


def largest_value(bound: Any, ranges: Mapping[Any, tuple[int, int | None]]) -> int | None:
    """Return the largest value of a bound whose symbols lie in ``ranges``, or None if it has none."""
    known: dict[Any, Any] = {}
    for symbol in bound.free_symbols:
        low, high = ranges.get(symbol, (0, None))
        if high is None:
            return None
        known[symbol] = ValueRanges(sympy.Integer(low), sympy.Integer(high))
    upper = bound_sympy(bound, known).upper
    return int(sympy.floor(upper)) if upper.is_number else None


def limit_size(symbol: Any, upper: int) -> bool:
    """Guard the graph against larger sizes, so that one recompiles it, and return whether the guard exists.

    A graph that is packaged has no guards, and a symbol that depends on data has none either.
    """
    env = V.graph.sizevars.shape_env
    if env.frozen or V.graph.aot_mode or free_unbacked_symbols(symbol):
        return False
    if not V.graph.sizevars.evaluate_expr(sympy.Le(symbol, upper)):
        return False
    bounds = env.var_to_range.get(symbol)
    return bounds is not None and bool(bounds.upper <= upper)
