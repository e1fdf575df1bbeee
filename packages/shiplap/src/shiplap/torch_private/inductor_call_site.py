"""Calls of ops in the Python that Inductor writes: by a name of that module, which is looked up once.

``torch.ops.ns.op.raw(...)`` looks up five attributes at each call, three of them in objects that create missing ones,
and enters ``OpOverload.__call__``. A wrapper other than torch's Python wrapper gets the text that torch writes. Tested
on torch 2.11 and 2.13. Of 2.14.1 only the source was read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

from torch._inductor import ir, lowering
from torch._inductor.virtualized import V

_names: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()  # of each wrapper, by torch's text


class _Named(ir.FallbackKernel):
    """A call, by a name, of an op that Inductor does not look into."""

    def get_kernel_name(self) -> str:
        written = super().get_kernel_name()
        graph: Any = V.graph
        if graph.cpp_wrapper or graph.aot_mode or graph.fx_wrapper or written != self.python_kernel_name:
            return written
        return _named(graph.wrapper_code, written)


def _named(wrapper: Any, written: str) -> str:
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


def calling(overload: Any, *, known: bool = True) -> Callable[..., Any]:
    """Return the lowering of an op as a call. With ``known``, torch may count the op among those that it always
    calls.
    """
    plain = lowering.fallback_handler(overload, add_to_fallback_set=known)

    @wraps(plain)
    def lowered(*args: Any, **kwargs: Any) -> Any:
        graph: Any = V.graph
        before = len(graph.operations)
        result = plain(*args, **kwargs)
        for node in graph.operations[before:]:
            if type(node) is ir.FallbackKernel and node.op_overload is overload:
                # The node exists already. Its class is changed, as Inductor offers no hook for the name in its code.
                node.__class__ = _Named
        return result

    return lowered
