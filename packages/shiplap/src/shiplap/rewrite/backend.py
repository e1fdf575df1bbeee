"""The backend ``torch.compile(model, backend="shiplap")``, which is Inductor with rewrites.

It is meant for programs that can only pass the name of a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.scope import Rewrites

if TYPE_CHECKING:
    from torch.fx import GraphModule


def shiplap(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Return a compiled function that computes the graph ``gm``. Rewrites are applied to the graph, and Inductor
    compiles it. ``torch.compile(model, backend="shiplap")`` finds this backend through an entry point.

    ``options["rewrites"]`` is a ``Rewrites``, a ``Rewrite`` or a sequence of ``Rewrite`` objects. By default, all
    rewrites in ``shiplap.rewrite.shipped.everything`` are used. All other options and ``mode`` are passed to Inductor.
    """
    from shiplap.torch_private.inductor_passes import compile_with

    given = dict(options or {})
    # Inductor rejects an option that it does not know, so "rewrites" is taken out of the options first.
    chosen = given.pop("rewrites", None)
    # A single rewrite may be given without a list.
    if isinstance(chosen, Rewrite):
        chosen = [chosen]
    scope = (
        _load_shipped_rewrites() if chosen is None else chosen if isinstance(chosen, Rewrites) else Rewrites(*chosen)
    )
    return compile_with(gm, example_inputs, mode, scope.options(**given))


@cache
def _load_shipped_rewrites() -> Rewrites:
    """Return a ``Rewrites`` of all rewrites that ship with Shiplap. Every call returns the same object."""
    # Imported late: a program that brings its own rewrites never loads those that ship.
    from shiplap.rewrite.shipped import everything

    return Rewrites(*everything)
