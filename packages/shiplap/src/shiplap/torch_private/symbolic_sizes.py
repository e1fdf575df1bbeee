"""The sizes of a pattern in terms of a graph: which expression each symbol of the pattern stands for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def is_size(held: Any) -> bool:
    """Whether a fake value is a size: an int that may be a symbol."""
    return isinstance(held, (int, torch.SymInt)) and not isinstance(held, bool)


def is_number(held: Any) -> bool:
    """Whether a fake value is a size, or a float that was computed from sizes: ``x.shape[-1] ** -0.5``."""
    return is_size(held) or isinstance(held, torch.SymFloat)


def hint(size: int | torch.SymInt) -> int | None:
    """The value of a size in the call for which a graph is made. None for one that depends on data."""
    if isinstance(size, int):
        return size
    known = size.node.hint
    return known if isinstance(known, int) else None


def new_size() -> torch.SymInt:
    """A new data-dependent size, for a fake implementation.

    ``ctx.new_dynamic_size`` refuses it to ``torch.compile`` without ``fullgraph=True`` or
    ``capture_dynamic_output_shape_ops``, which breaks the graph. A size with a proven bound needs no such caution:
    where a later line asks what nobody knows, the graph breaks there. torch's own ops for device meshes do the same.
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
    """Whether fakes run for Dynamo or AOTAutograd, which make a graph of what they see."""
    return torch._guards.TracingContext.try_get() is not None


def in_graph(number: int) -> int | torch.SymInt:
    """``number`` as a size that a graph can hold, for a fake implementation whose only result is an integer.

    Dynamo stops at an op that returns an integer, and takes a symbol. The dispatcher turns a symbol of a known value
    into an integer again, so the value of this one is left open.
    """
    known = in_trace() and getattr(torch.library.get_ctx(), "_shape_env", None) is not None
    return new_size() if known and number >= 0 else number


def assert_in_graph(condition: torch.Tensor, message: str) -> None:
    """Raise RuntimeError with ``message`` when a compiled graph runs with a false ``condition``. On a GPU, later."""
    torch._assert_async(condition, message)


def check(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """``torch._check``, which is documented but not typed: a symbolic condition becomes a guard or an assertion."""
    torch_check: Any = torch._check
    torch_check(condition, message)


def not_one(size: int | torch.SymInt) -> bool:
    """Whether a size is not 1. Of one that only the data knows it is believed, as torch's own broadcasting does."""
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return bool(guard_or_true(size != 1))


def unknown() -> type[Exception]:
    """What is raised where a trace asks for a number that depends on data; graphs break there."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode


class Sizes:
    """Symbols of a pattern → expressions of a graph."""

    def __init__(self, known: dict[Any, Any] | None = None) -> None:
        self._known: dict[Any, Any] = dict(known or {})

    def bind(self, pattern: Any, actual: Any) -> bool:
        """Let a size of the pattern stand for a size of the graph; False if it stands for another one already."""
        expr, value = _expr(pattern), _expr(actual)
        if expr.is_Symbol and expr not in self._known:
            self._known[expr] = value
        return self.same(pattern, actual)

    def same(self, pattern: Any, actual: Any) -> bool:
        """Whether a size of the pattern is this size of the graph; False if it cannot be known."""
        expr = _expr(pattern)
        if not expr.free_symbols <= self._known.keys():
            return False
        mine, theirs = expr.xreplace(self._known), _expr(actual)
        if mine.is_Float or theirs.is_Float:  # computed from sizes, in an order of its own
            return bool(mine.is_number and theirs.is_number and math.isclose(mine, theirs, rel_tol=1e-12))
        return bool(mine - theirs == 0)

    def shown(self, pattern: Any) -> str:
        """A size of the pattern as a number or symbols of the graph, where it is known."""
        return str(_expr(pattern).xreplace(self._known))


def _expr(size: Any) -> Any:
    import sympy

    if isinstance(size, float):
        return sympy.Float(size)
    return sympy.Integer(int(size)) if isinstance(size, int) else size.node.expr


def holds(condition: Any, *, may_guard: bool) -> bool:
    """Whether a condition on sizes holds. It becomes a guard, unless only conditions without a guard are asked for."""
    if isinstance(condition, torch.SymBool) and not may_guard:
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(condition)
    return bool(condition)


def equal(a: Any, b: Any, *, may_guard: bool) -> bool:
    """Whether two sizes are equal, one by one where they are tuples.

    Of two symbols that are equal in the call that is compiled for, this becomes a guard, if that is allowed. Different
    ones become none.
    """
    if isinstance(a, tuple) or isinstance(b, tuple):
        pairs = zip(a, b, strict=False) if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) else None
        return pairs is not None and all(equal(x, y, may_guard=may_guard) for x, y in pairs)
    if holds(a == b, may_guard=False):
        return True
    here = [n.node.hint if isinstance(n, torch.SymInt) else n for n in (a, b)]
    return may_guard and None not in here and here[0] == here[1] and holds(a == b, may_guard=True)


def data_dependent() -> type[Exception]:
    """What is raised where a condition depends on a size that only the data knows."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode
