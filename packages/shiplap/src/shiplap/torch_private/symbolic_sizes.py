"""The sizes of a pattern in terms of a graph: the expression of the graph for each symbol of the pattern."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def is_size(held: Any) -> bool:
    """Return whether a fake value is a size: an int that may be a symbol."""
    return isinstance(held, (int, torch.SymInt)) and not isinstance(held, bool)


def is_number(held: Any) -> bool:
    """Return whether a fake value is a size, or a float that was computed from sizes: ``x.shape[-1] ** -0.5``."""
    return is_size(held) or isinstance(held, torch.SymFloat)


def size_in_call(size: int | torch.SymInt) -> int | None:
    """Return the value of a size in the call for which a graph is made. None for a size that depends on data."""
    if isinstance(size, int):
        return size
    known = size.node.hint
    return known if isinstance(known, int) else None


def new_size() -> torch.SymInt:
    """Return a new data-dependent size, for a fake implementation.

    ``ctx.new_dynamic_size`` refuses it to ``torch.compile`` without ``fullgraph=True`` or
    ``capture_dynamic_output_shape_ops``, which breaks the graph. A size with a proven bound needs no such caution: the
    graph breaks at the later line that needs an unknown value. torch's own ops for device meshes do the same.
    """
    ctx = torch.library.get_ctx()
    env = getattr(ctx, "_shape_env", None)
    if env is None or not hasattr(env, "create_unbacked_symint"):
        return ctx.new_dynamic_size()
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    size: torch.SymInt = env.create_unbacked_symint()
    _constrain_range_for_size(size, min=0)
    return size


def in_trace() -> bool:
    """Return whether fakes run for Dynamo or AOTAutograd, which make a graph of the calls."""
    return torch._guards.TracingContext.try_get() is not None


def in_graph(number: int) -> int | torch.SymInt:
    """Return ``number`` as a size that a graph can hold, for a fake implementation whose only result is an integer.

    Dynamo stops at an op that returns an integer, and accepts a symbol. The dispatcher turns a symbol of a known value
    into an integer again, so the value of this one is left open.
    """
    known = in_trace() and getattr(torch.library.get_ctx(), "_shape_env", None) is not None
    return new_size() if known and number >= 0 else number


def assert_in_graph(condition: torch.Tensor, message: str) -> None:
    """Raise RuntimeError with ``message`` when a compiled graph runs with a false ``condition``. On a GPU, later."""
    torch._assert_async(condition, message)


def check_condition(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """Call ``torch._check``, which is documented but not typed: a symbolic condition becomes a guard or an
    assertion.
    """
    torch_check: Any = torch._check
    torch_check(condition, message)


def not_one(size: int | torch.SymInt) -> bool:
    """Return whether a size is not 1. A data-dependent size is assumed not to be 1, as in torch's own broadcasting."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return bool(guard_or_true(size != 1))


def unknown_size_error() -> type[Exception]:
    """Return the exception that a trace raises where it needs a number that depends on data. Graphs break there."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode


class SizeBindings:
    """A map from symbols of a pattern to expressions of a graph."""

    def __init__(self, known: dict[Any, Any] | None = None) -> None:
        self._known: dict[Any, Any] = dict(known or {})

    def bind(self, pattern: Any, actual: Any) -> bool:
        """Map a size of the pattern to a size of the graph, and return False if it is mapped to another one already."""
        expr, value = _size_to_sympy(pattern), _size_to_sympy(actual)
        if expr.is_Symbol and expr not in self._known:
            self._known[expr] = value
        return self.same(pattern, actual)

    def same(self, pattern: Any, actual: Any) -> bool:
        """Return whether a size of the pattern is this size of the graph. False if that is unknown."""
        expr = _size_to_sympy(pattern)
        if not expr.free_symbols <= self._known.keys():
            return False
        mine, theirs = expr.xreplace(self._known), _size_to_sympy(actual)
        if mine.is_Float or theirs.is_Float:  # computed from sizes, in an order of its own
            return bool(mine.is_number and theirs.is_number and math.isclose(mine, theirs, rel_tol=1e-12))
        return bool(mine - theirs == 0)

    def format_size(self, pattern: Any) -> str:
        """Return a size of the pattern as a number or symbols of the graph, if it is mapped."""
        return str(_size_to_sympy(pattern).xreplace(self._known))


def _size_to_sympy(size: Any) -> Any:
    import sympy

    if isinstance(size, float):
        return sympy.Float(size)
    return sympy.Integer(int(size)) if isinstance(size, int) else size.node.expr


def condition_holds(condition: Any, *, may_guard: bool) -> bool:
    """Return whether a condition on sizes holds. With ``may_guard`` it may become a guard."""
    if isinstance(condition, torch.SymBool) and not may_guard:
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(condition)
    return bool(condition)


def sizes_equal(a: Any, b: Any, *, may_guard: bool) -> bool:
    """Return whether two sizes, or two tuples of sizes, are equal.

    With ``may_guard``, the equality of two symbols that are equal in the current call becomes a guard. Different sizes
    add none.
    """
    if isinstance(a, tuple) or isinstance(b, tuple):
        pairs = zip(a, b, strict=False) if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) else None
        return pairs is not None and all(sizes_equal(x, y, may_guard=may_guard) for x, y in pairs)
    if condition_holds(a == b, may_guard=False):
        return True
    here = [n.node.hint if isinstance(n, torch.SymInt) else n for n in (a, b)]
    return may_guard and None not in here and here[0] == here[1] and condition_holds(a == b, may_guard=True)


def data_dependent() -> type[Exception]:
    """Return the exception that torch raises where a condition depends on a data-dependent size."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode
