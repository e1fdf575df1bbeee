"""Calls of ops in the Python that Inductor writes: by a name of that module, which is looked up once.

``torch.ops.ns.op.raw(...)`` looks up five attributes at each call, three of them in objects that make what they do not
have, and enters ``OpOverload.__call__``. A wrapper that is not torch's Python wrapper gets the text that torch writes.
Of a C++ kernel as short as a call of the dispatcher, these take a third of the time of the call (two busy cores of an
AMD EPYC, torch 2.13, 2026-11-28), which is why this stays, on each torch on which a run has verified it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch._inductor import ir, lowering
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_map

_names: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()  # of each wrapper, by torch's text


class _NamedFallback(ir.FallbackKernel):
    """A call, by a name, of an op that Inductor does not look into."""

    def get_kernel_name(self) -> str:
        written = super().get_kernel_name()
        graph: Any = V.graph
        if graph.cpp_wrapper or graph.aot_mode or graph.fx_wrapper or written != self.python_kernel_name:
            return written
        return _name_in_wrapper(graph.wrapper_code, written)


def _name_in_wrapper(wrapper: Any, written: str) -> str:
    while hasattr(wrapper, "parent_wrapper"):  # a part of a graph, whose functions are in the module of the whole
        wrapper = wrapper.parent_wrapper
    if not hasattr(wrapper, "imports"):
        return written
    names = _names.setdefault(wrapper, {})
    if written not in names:
        if not names:
            wrapper.imports.writeline("from shiplap.torch_private.dispatcher_calls import in_code")
        names[written] = f"{re.sub(r'[^0-9A-Za-z_]', '_', written.removeprefix('torch.ops.'))}_{len(names)}"
        wrapper.imports.writeline(f"{names[written]} = in_code({written})")
    return names[written]


def call_lowering(overload: Any, *, known: bool = True) -> Callable[..., Any]:
    """Return the lowering of an op as a call. With ``known``, torch may count the op among those that it always
    calls.
    """
    plain = lowering.fallback_handler(overload, add_to_fallback_set=known)

    @wraps(plain)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        return tree_map(_lowered, _NamedFallback.create(overload, *args, **kwargs))

    return lowered


def _lowered(value: Any) -> Any:
    """A node as lowerings return it. Torch calls this ``TensorBox.create`` up to 2.11."""
    if not isinstance(value, ir.IRNode):
        return value
    return value.wrap_for_lowering() if hasattr(value, "wrap_for_lowering") else ir.TensorBox.create(value)
