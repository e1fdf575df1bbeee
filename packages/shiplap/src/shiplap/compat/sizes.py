"""Sizes of one trace in terms of another: what a pattern's symbols stand for at a place of a graph."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Sizes", "data_dependent", "holds", "is_size"]


def is_size(held: Any) -> bool:
    """Whether a fake value is a size: an int that may be a symbol."""
    return isinstance(held, (int, torch.SymInt)) and not isinstance(held, bool)


class Sizes:
    """Symbols of a pattern → expressions of a graph."""

    def __init__(self, known: dict[Any, Any] | None = None) -> None:
        self._known: dict[Any, Any] = dict(known or {})

    def bind(self, pattern: Any, actual: Any) -> bool:
        """Let a size of the pattern stand for a size of the graph; False if it stands for another one already."""
        expr, found = _expr(pattern), _expr(actual)
        if expr.is_Symbol and expr not in self._known:
            self._known[expr] = found
        return self.same(pattern, actual)

    def same(self, pattern: Any, actual: Any) -> bool:
        """Whether a size of the pattern is this size of the graph; False if it cannot be known."""
        expr = _expr(pattern)
        if not expr.free_symbols <= self._known.keys():
            return False
        return bool(expr.xreplace(self._known) - _expr(actual) == 0)

    def shown(self, pattern: Any) -> str:
        """A size of the pattern as a number or symbols of the graph, where it is known."""
        return str(_expr(pattern).xreplace(self._known))


def _expr(size: Any) -> Any:
    import sympy

    return sympy.Integer(int(size)) if isinstance(size, int) else size.node.expr


def holds(condition: Any, *, may_guard: bool) -> bool:
    """The truth of a condition on sizes: a guard of the compiled code, or only what is certain without one."""
    if isinstance(condition, torch.SymBool) and not may_guard:
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return statically_known_true(condition)
    return bool(condition)


def data_dependent() -> type[Exception]:
    """What is raised where a condition depends on a size that only the data knows."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode
