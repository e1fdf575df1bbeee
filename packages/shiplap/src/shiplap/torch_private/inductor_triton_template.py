"""Inductor's Triton templates: one choice per config. Without a GPU, Triton's interpreter runs them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, TritonTemplateKernel


class _Quoted(str):
    """The value of a compile-time constant, which Inductor writes into the kernel with ``format``."""

    def __format__(self, spec: str) -> str:
        return repr(str(self))


AXES = 3  # of a grid
SPREAD = re.compile(r"tl\.load\((\w+) \+ \(tl\.broadcast_to\((\w+), \[[\w, ]+\]\)\), mask\b")


class _Kernel(TritonTemplateKernel):
    """A template kernel that loads values of one row or one column once, not once for each element of the tile.

    Inductor broadcasts every index of an epilogue to the tile. Spread over all lanes, scale and shift of a batch norm
    take 70 registers and up to a third of the kernel's time (H200, 2026-11-21). An index ``i`` is not broadcast where
    the template defines its bound, in ``i_mask``.
    """

    bounded: frozenset[str] = frozenset()
    latest: Any = None  # the one that was rendered last

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        type(self).latest = self

    def size(self, name: str | None, index: int) -> Any:
        return super().size(self._named(name), index)

    def stride(self, name: str | None, index: int | None = None) -> Any:
        parent: Any = super()
        return parent.stride(self._named(name), index)

    def _named(self, name: str | None) -> str | None:
        """Return torch's name of a tensor. Torch names the output None, and templates name it ``out``, unless an input
        has it.
        """
        return None if name == "out" and name not in self.named_input_nodes else name

    def _register_hook(self, hook_name: str, hook_fn: Callable[[], str], *args: Any, **kwargs: Any) -> Any:
        if hook_name.startswith("<STORE_OUTPUT"):
            return super()._register_hook(hook_name, lambda: narrow_loads(hook_fn(), self.bounded), *args, **kwargs)
        return super()._register_hook(hook_name, hook_fn, *args, **kwargs)


def narrow_loads(code: str, bounded: frozenset[str]) -> str:
    """Return ``code`` with the loads of single rows or columns not broadcast, for indices that are ``bounded``."""

    def one(match: re.Match[str]) -> str:
        pointer, index = match.groups()
        return f"tl.load({pointer} + ({index}), {index}_mask" if index in bounded else match[0]

    return SPREAD.sub(one, code)


def triton_choice(
    name: str,
    source: str,
    grid: Callable[..., tuple[Any, Any, Any]],
    sizes: Sequence[Any],
    inputs: Sequence[Any],
    layout: Any,
    config: Mapping[str, Any],
) -> Any:
    """Return a choice that renders ``source`` for these inputs and this config.

    The choice has a ``sized``, a function from :func:`shiplap.torch_private.size_ranges.evaluate_size` with values to
    the last arguments of its kernel.

    ``grid(*sizes, config, cdiv=)`` is evaluated on numbers and on expressions. Template names are global to the process
    and asserted unique, so ``name`` must stand for this source.

    Raises:
        NotImplementedError: in torch's words, when the template cannot serve these inputs.
    """
    template = TritonTemplate.all_templates.get(name)
    if template is None:
        template = TritonTemplate(name, grid=SymbolicGridFn(grid), source=source)
        bounded = frozenset(re.findall(r"^ *(\w+)_mask = ", source, re.MULTILINE))
        template.kernel_type = type("Kernel", (_Kernel,), {"bounded": bounded})
    options: dict[str, Any] = {"num_stages": 2, "num_warps": 4}
    options |= {k: _Quoted(v) if isinstance(v, str) else v for k, v in config.items()}
    choices: list[Any] = []
    problem = template.maybe_append_choice(
        choices, input_nodes=tuple(inputs), layout=layout, call_sizes=list(sizes), **options
    )
    if problem is not None:
        raise problem
    if not choices:
        raise NotImplementedError("a size of zero")
    made, numbers = choices[0], tuple(template.kernel_type.latest.args.sizevars)  # as the kernel takes them

    def sized(evaluate: Callable[[Any], int]) -> list[Any]:
        workspace = made.bmreq.extra_args[len(numbers) : -AXES]
        programs = template.grid(*map(evaluate, sizes), options)
        return [*map(evaluate, numbers), *workspace, *programs]

    made.sized = sized
    return made
