"""Inductor's Triton templates: one choice per config. Run on torch 2.11 (H200), 2.13 and 2.15 (interpreter)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate

__all__ = ["choice"]


class _Quoted(str):
    """The value of a compile-time constant, which Inductor writes into the kernel with ``format``."""

    def __format__(self, spec: str) -> str:
        return repr(str(self))


def choice(
    name: str, source: str, grid: Callable[..., tuple[Any, Any, Any]], sizes: Sequence[Any], inputs: Sequence[Any],
    layout: Any, config: Mapping[str, Any],
) -> Any:  # fmt: skip
    """A choice that renders ``source`` for these inputs and this config.

    ``grid(*sizes, config, cdiv=)`` is evaluated on numbers and on expressions. Template names are global to the
    process and asserted unique, so ``name`` must stand for this source.

    Raises:
        NotImplementedError: in torch's words, when the template cannot serve these inputs.
    """
    template = TritonTemplate.all_templates.get(name)
    if template is None:
        template = TritonTemplate(name, grid=SymbolicGridFn(grid), source=source)
    options: dict[str, Any] = {"num_stages": 2, "num_warps": 4}
    options |= {k: _Quoted(v) if isinstance(v, str) else v for k, v in config.items()}
    found: list[Any] = []
    problem = template.maybe_append_choice(
        found, input_nodes=tuple(inputs), layout=layout, call_sizes=list(sizes), **options
    )
    if problem is not None:
        raise problem
    if not found:
        raise NotImplementedError("a size of zero")
    return found[0]
