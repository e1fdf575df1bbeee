"""Calls of an exported program with sizes as numbers, for compilers that specialise on sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any

import torch

ALIGNED = 16  # the multiple for which compilers of kernels specialise
MOST = 16  # calls


def concrete_calls(args: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield ``args``, with numbers for symbols and tensors without memory: first with the sizes of the example.

    Then each symbol is once a multiple of 16 and once an odd number near that of the example, in all combinations, up
    to 16 calls.
    """
    sizes = list(_symbolic_sizes(args))
    symbols = sorted({s for size in sizes for s in size.node.expr.free_symbols}, key=str)
    known = {size.node.expr: size.node.hint for size in sizes if size.node.expr in symbols}
    hints = [known.get(symbol) or ALIGNED for symbol in symbols]
    # Triton compiles a form of its own for multiples of 16, so both kinds of sizes are needed.
    variants = product(*[(-(-hint // ALIGNED) * ALIGNED, max(3, hint | 1)) for hint in hints])
    for values in islice(dict.fromkeys([tuple(hints), *islice(variants, MOST)]), MOST):
        yield tuple([_with_concrete_sizes(a, dict(zip(symbols, values, strict=True))) for a in args])


def _symbolic_sizes(args: Sequence[Any]) -> Iterator[Any]:
    """Yield the symbols of arguments, and of sizes and strides of tensors."""
    for arg in args:
        if isinstance(arg, torch.SymInt):
            yield arg
        elif isinstance(arg, torch.Tensor):
            yield from _symbolic_sizes([*arg.shape, *arg.stride()])
        elif isinstance(arg, (list, tuple)):
            yield from _symbolic_sizes(arg)


def _with_concrete_sizes(arg: Any, values: dict[Any, int]) -> Any:
    if isinstance(arg, torch.SymInt):
        return int(arg.node.expr.xreplace(values))
    if isinstance(arg, torch.Tensor):
        sizes, strides = ([_with_concrete_sizes(n, values) for n in each] for each in (arg.shape, arg.stride()))
        return torch.empty_strided(sizes, strides, dtype=arg.dtype, device="meta")
    if isinstance(arg, (list, tuple)):
        return type(arg)([_with_concrete_sizes(each, values) for each in arg])
    return arg
