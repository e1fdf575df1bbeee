"""Inductor's C++ templates: one choice per config."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch._inductor import ir
from torch._inductor.codegen.cpp_gemm_template import gen_2d_view_of_epilogue_buf
from torch._inductor.codegen.cpp_template import CppTemplate
from torch._inductor.utils import parallel_num_threads
from torch._inductor.virtualized import V


def cpp_choice(
    name: str,
    source: str,
    arguments: Mapping[str, Any],
    layout: Any,
    values: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Any:
    """Return a choice that renders ``source``.

    ``arguments`` holds input buffers by name. ``values`` and ``config`` are variables of the template. The choice has a
    ``sized``, a function from :func:`shiplap.torch_private.size_ranges.evaluate_size` with values to the last arguments
    of its kernel.
    """
    template = _Template(name, source, dict(arguments), layout, {**values, **config})
    made = CppTemplate.generate(template)
    sizes = tuple(template.alone.args.sizevars)  # as the kernel takes them, after the buffers
    made.sized = lambda evaluate: [ctypes.c_ulonglong(evaluate(size)) for size in sizes]
    return made


class _Template(CppTemplate):
    """A template that is rendered twice: without epilogues to be verified and timed, and with them by the scheduler."""

    def __init__(self, name: str, source: str, arguments: dict[str, Any], layout: Any, values: dict[str, Any]) -> None:
        super().__init__(name, list(arguments.values()), layout, parallel_num_threads())
        self.source, self.arguments, self.values = source, arguments, values
        self.alone: Any = None  # the kernel of the first rendering, which has no neighbours

    def render(  # type: ignore[override]
        self,
        kernel: Any,
        template_buffer_node: Any = None,
        flag_template_buffer_has_other_users: bool | None = None,
        epilogue_nodes: list[Any] | None = None,
        **_: Any,
    ) -> str:
        self.alone = self.alone or kernel
        # The scheduler passes the buffer in its second rendering only.
        raw = self.output_node if template_buffer_node is None else template_buffer_node
        store = _Store(kernel, raw, list(epilogue_nodes or []), bool(flag_template_buffer_has_other_users))

        def def_kernel() -> str:
            text: str = kernel.def_kernel(inputs=self.arguments, outputs=store.outputs, aliases=store.aliases)
            return text

        helpers = {
            "header": self.header().getvalue,
            "def_kernel": def_kernel,
            "store_output": store.output,
            "tile": store.tile,
            "size": lambda n, d: kernel.size(self._buffer(n, raw), d),
            "stride": lambda n, d: kernel.stride(self._buffer(n, raw), d),
            "index": lambda n, *at: kernel.index(self._buffer(n, raw), list(at)),
            "rank": lambda n: len(self._buffer(n, raw).get_size()),
            "adjacent": lambda n, d: _is_one(self._buffer(n, raw).get_stride()[d]),
            "divisible": lambda n, d, by: _always_divisible(self._buffer(n, raw).get_size()[d], by),
            "dtype": lambda n: kernel.dtype(self._buffer(n, raw)),
            "num_threads": self.num_threads,
        }
        text: str = self._template_from_string(self.source).render(**helpers, **self.values)
        return text

    def _buffer(self, name: str, raw: Any) -> Any:
        return raw if name == "out" else self.arguments[name]


class _Store:
    """The way in which the kernel stores a tile of results: as computed, after the fused epilogues, or both.

    A raw output with another reader is stored first, and the epilogues read it back. Given the tile itself, Inductor
    would remove the raw buffer as unused.
    """

    def __init__(self, kernel: Any, raw: Any, epilogues: list[Any], keep_raw: bool) -> None:
        self.kernel, self.raw, self.epilogues = kernel, raw, epilogues
        self.keep_raw = keep_raw and bool(epilogues)
        self.last = epilogues[-1] if epilogues else raw
        self.outputs = {"raw": raw, "out": self.last} if self.keep_raw else {"out": self.last}
        self.aliases = {raw.get_name(): self.last.get_name()} if epilogues and not self.keep_raw else {}

    def tile(self, name: str, *sizes: Any, dtype: str = "float32") -> str:
        """Declare a buffer on the stack, ``name`` in C++, that :meth:`output` can store."""
        text: str = self.kernel.define_stack_allocated_buffer(name, list(sizes), getattr(torch, dtype))
        return text

    def output(self, name: str, *ranges: tuple[str, str]) -> str:
        """Store tile ``name`` into the given ranges of the output, with the fused neighbours applied to it.

        Fewer ranges than the output has dims address it with its leading dims merged.
        """
        kernel = self.kernel
        result = self.raw if len(self.raw.get_size()) == len(ranges) else _merge_leading_dims(self.raw, len(ranges))
        view, reindexers = result, list[Any]()
        if self.epilogues:  # an epilogue may see the result under another shape
            none: list[Any] = [None] * len(self.epilogues)
            view, reindexers = gen_2d_view_of_epilogue_buf(self.last, result, self.epilogues, [], none)
        tile = kernel.slice_nd(kernel.local_buffers[name], [("0", f"{end} - {start}") for start, end in ranges])
        out = kernel.slice_nd(view, list(ranges))
        common = {"offsets": tuple(start for start, _ in ranges), "reindexers": reindexers}
        if self.keep_raw:
            raw = kernel.slice_nd(result, list(ranges))
            first = kernel.store_output(raw, tile)
            second = kernel.store_output(out, raw, self.raw, self.epilogues, **common)
            return f"{{ {first} }}\n{{ {second} }}"
        return f"{{ {kernel.store_output(out, tile, self.raw, self.epilogues, **common)} }}"


def _always_divisible(size: Any, by: int) -> bool:
    """Return whether ``by`` divides the size in every call of the compiled code, so that fixed tiles leave no tail."""
    return bool(V.graph.sizevars.statically_known_multiple_of(size, by))


def _is_one(stride: Any) -> bool:
    return bool(V.graph.sizevars.statically_known_equals(stride, 1))


def _merge_leading_dims(buffer: Any, rank: int) -> Any:
    """Return a contiguous ``buffer`` viewed with ``rank`` dims: its leading dims are merged into the first."""
    sizes = list(buffer.get_size())
    cut = len(sizes) - rank + 1
    sizes = [sympy.Mul(*sizes[:cut]), *sizes[cut:]]
    layout = ir.FixedLayout(buffer.get_device(), buffer.get_dtype(), sizes)
    return ir.ReinterpretView(data=ir.StorageBox(buffer), layout=layout)
