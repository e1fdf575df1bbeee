"""``torch.compile(model, backend="shiplap")``: Inductor with rewrites, for programs that pass nothing but a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.scope import Rewrites

if TYPE_CHECKING:
    from torch.fx import GraphModule

__all__ = ["shiplap", "shipped"]


def shiplap(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend that torch finds by name: an entry point, so nothing is registered before somebody asks for it.

    ``options["rewrites"]`` are the rewrites to use, by default those that ship; other options and ``mode`` are
    Inductor's.
    """
    from shiplap.compat.passes import compile_with

    given = dict(options or {})
    chosen = given.pop("rewrites", None)
    scope = _shipped() if chosen is None else chosen if isinstance(chosen, Rewrites) else Rewrites(*chosen)
    return compile_with(gm, example_inputs, mode, scope.options(**given))


def shipped() -> list[Rewrite]:
    """The rewrites of :mod:`shiplap.rewrite.shipped`."""
    from shiplap.rewrite import shipped as module

    return list(dict.fromkeys(v for v in vars(module).values() if isinstance(v, Rewrite)))


@cache
def _shipped() -> Rewrites:
    return Rewrites(*shipped())
