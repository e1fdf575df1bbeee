"""``sl.cabi(library, symbol)``: a stateless, out-style C function as a kernel, called through the Python binding.

For each call, PyTorch's allocator provides outputs and workspace. The function gets DLTensor views of them and runs
without the GIL. A status other than SL_OK becomes SL305 with the kernel's own message.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from shiplap.bind import native
from shiplap.bind.frame import Frame
from shiplap.bind.header import signature
from shiplap.bind.library import load_symbol
from shiplap.cached import cached_property
from shiplap.codegen import CParameter, prototype
from shiplap.codegen.native import Native, unfit
from shiplap.errors import error
from shiplap.op.binding import Binding, shape_of
from shiplap.op.bucket import read_rule
from shiplap.op.config import Values
from shiplap.op.kernel import Implementation, Kernel, Terms
from shiplap.op.launch import allocate_workspace
from shiplap.op.native import NativeForm
from shiplap.op.outputs import check_bound, empty_outputs
from shiplap.op.plan.packing import Packed, compile_packing
from shiplap.op.plan.rules.outputs import AlignedOutput
from shiplap.op.plan.term import Place
from shiplap.op.spec import OpSpec
from shiplap.op.values import Args, EnvValue, Outputs

__all__ = ["CAbi", "CKernel", "cabi"]

SL_OK, SL_INVALID_ARGUMENT = 0, 1


class DLTensor(ctypes.Structure):
    """As in ``shiplap/abi.h``: the layout that ``frame.TENSOR`` packs."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Context(ctypes.Structure):
    """``sl_context``: the layout that ``frame.CONTEXT`` packs."""

    _fields_ = (
        ("abi_version", ctypes.c_uint32),
        ("num_threads", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
        ("error", ctypes.c_char_p),
        ("error_size", ctypes.c_size_t),
        ("config", ctypes.POINTER(ctypes.c_int64)),
        ("config_size", ctypes.c_size_t),
    )


_TYPE: dict[str, type[ctypes._SimpleCData[int] | ctypes._SimpleCData[float] | ctypes._SimpleCData[bytes | None]]] = {
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "int32_t": ctypes.c_int32,
    "const char*": ctypes.c_char_p,
}
Extents: TypeAlias = dict[str, ctypes.c_int64]  # data-dependent dims, as the kernel reports them


class CAbi(Implementation):
    """A C ABI kernel, not yet bound to a declaration."""

    native_configs = True

    def __init__(
        self, library: str | os.PathLike[str], symbol: str, strided: Iterable[str] = (), align: int = 1
    ) -> None:
        self.library, self.symbol, self.strided, self.align = Path(library), symbol, frozenset(strided), align

    @property
    def name(self) -> str:
        return self.symbol

    @property
    def identity(self) -> str:
        return f"cabi:{self.library.name}:{self.symbol}"

    def bind(self, spec: OpSpec, terms: Terms) -> CKernel:
        """The kernel for ``spec``. The library is opened at the first call, never at import."""
        return CKernel(spec, terms, self)


def cabi(library: str | os.PathLike[str], symbol: str, *, strided: Iterable[str] = (), align: int = 1) -> CAbi:
    """A kernel behind shiplap's C ABI. Pass the result to ``op.kernel(device, ...)``.

    Args:
        library: the path of the shared library. A file of that name in ``SHIPLAP_LIBRARY_PATH`` takes precedence.
        symbol: the C function, with the prototype that ``shiplap header`` prints.
        strided: the tensor arguments that the kernel accepts with any strides. The others are made contiguous.
        align: the alignment, in bytes, that the kernel needs of every tensor's address. A tensor at another address,
            such as a view into a larger tensor, is copied. A given output at another address is refused with SL212.

    Raises:
        LibraryError: SL401-SL403 at the first call, when the library is missing or was built for another declaration.
    """
    if not (symbol.isidentifier() and symbol.isascii()):
        raise error(
            "SL402",
            where=f"sl.cabi({library}, ...)",
            got=symbol,
            expected="the name of a C function",
            fix="pass the symbol as it is written in C",
        )
    if align < 1 or align & (align - 1):
        raise error(
            "SL404",
            where=f"sl.cabi(..., {symbol!r})",
            got=f"align={align!r}",
            expected="a power of two",
            fix="pass the alignment in bytes, such as align=16",
        )
    return CAbi(library, symbol, strided, align)


class CKernel(Kernel):
    """Everything that does not depend on the call is worked out here, once for all configs."""

    by_python = False  # native code can take over, and goes along in a package
    native: NativeForm

    def __init__(self, spec: OpSpec, terms: Terms, source: CAbi) -> None:
        super().__init__(spec, terms)
        names = terms.space.names if terms.space is not None else ()
        stamp = signature(spec, names)
        self.native = NativeForm(source.library, source.symbol, source.strided, source.align, stamp)
        self.parameters, self.where = prototype(spec), f"{spec.name}, kernel {source.symbol}"
        self.values = 0, 0  # of the config: address and length
        self._array: ctypes.Array[ctypes.c_int64] | None = None  # holds them
        self._function: Callable[..., int] | None = None

    def configure(self, values: Values) -> None:
        """The function finds the values in its context, in the order of their names."""
        self._array = (ctypes.c_int64 * len(values))(*[int(v) for v in values.values()])
        self.values = ctypes.addressof(self._array), len(values)

    def run(self, call: Binding) -> Outputs:
        spec = self.spec
        if not spec.bounds:
            outs = empty_outputs(spec, call)
            self._run(call, outs, {}, None)
            return outs
        env = {**call.env, **{dim: bound(call.env) for dim, bound in spec.bounds}}
        outs = empty_outputs(spec, replace(call, env=env))
        extents = {dim: ctypes.c_int64(0) for dim in spec.dynamic}
        self._run(call, outs, extents, None)
        return self._narrow(call, outs, extents)

    def into(self, call: Binding, outs: Sequence[Tensor], scratch: Tensor | None) -> None:
        """Fill ``outs``, of fixed sizes, with the caller's workspace if one is given."""
        if self.native.align > 1:
            for output, tensor in zip(self.spec.outputs, outs, strict=True):
                at = Place(self.spec.name, output.name, role="output")
                AlignedOutput(at, self.native.align).hold({at.tensor.python: tensor})
        self._run(call, outs, {}, scratch)

    def unpacked(self, call: Binding) -> str:
        """Native code goes along, where the declaration has an equivalent in C++ and nothing has to ask Python."""
        if self.supports is not None:
            return f"{self.name}, whose supports= is asked by Python on {self.device}"
        form, rule = self.native, read_rule(self.spec)
        described = Native(
            self.spec,
            form.symbol,
            (),
            self.device,
            self.workspace,
            form.strided,
            self.dtypes,
            space=self.space,
            rule=rule,
            align=form.align,
        )
        if why := unfit(described):
            return f"{self.name}, called by Python on {self.device} because of {why}"
        if why := self.refuses(call):
            return f"{self.name} does not take this call, which Python would run on {self.device}: {why}"
        return ""

    def timed(self, call: Binding, clock: Callable[[Callable[[], int]], float]) -> float:
        """``clock(function)`` of the C function alone, asked from inside a call: there its arguments are alive."""
        function, times = self._loaded(), [0.0]

        def between(*args: object) -> int:
            times[0] = clock(lambda: function(*args))
            return function(*args)

        try:
            self._function = between
            self.run(call)
        finally:
            self._function = function
        return times[0]

    def _loaded(self) -> Callable[..., int]:
        """The C function with its types: integers are addresses, and the GIL is released."""
        if self._function is None:
            function = load_symbol(self.native.library, self.native.symbol, self.native.signature)
            types = [_TYPE.get(p.ctype, ctypes.c_void_p) for p in self.parameters]
            address = ctypes.cast(function, ctypes.c_void_p).value
            self._function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *types)(address or 0)
        return self._function

    def _run(self, call: Binding, outs: Sequence[Tensor], extents: Extents, scratch: Tensor | None) -> None:
        inputs, copies = self._pack(call.args)
        if scratch is None and self.workspace is not None:
            scratch = allocate_workspace(self.workspace, call)
        self._invoke(call, [*inputs, *outs], extents, scratch)
        for target, copy in copies:
            target.copy_(copy)
        if self.native.counting:
            native.consider(self.spec, self.native)

    @cached_property
    def _pack(self) -> Callable[[Args], Packed]:
        """Tensors in order, contiguous and aligned where the kernel wants it; copies are made where they are not."""
        return compile_packing(self.spec, self.native.strided, self.native.align)

    def _invoke(self, call: Binding, tensors: list[Tensor | None], extents: Extents, scratch: Tensor | None) -> None:
        device, function = call.device, self._function or self._loaded()
        rest = [_argument(p, call.env, extents) for p in self.parameters[len(tensors) :]]
        if device.type == "cuda":
            frame = Frame(
                tensors, device, scratch, torch.cuda.current_stream(device).cuda_stream, self.values, self.where
            )
            with torch.cuda.device(device):
                status = function(frame.context, *frame.tensors, *rest)
        else:
            frame = Frame(tensors, device, scratch, 0, self.values, self.where)
            status = function(frame.context, *frame.tensors, *rest)
        if status != SL_OK:
            id = "SL211" if status == SL_INVALID_ARGUMENT else "SL305"
            raise error(id, where=self.where, got=frame.message or f"status {status}", expected="")

    def _narrow(self, call: Binding, outs: Outputs, extents: Extents) -> Outputs:
        """Cut outputs from their bound to what the kernel filled. A mostly empty one is copied to free its memory."""
        env = dict(call.env)
        for dim, extent in extents.items():
            env[dim] = extent.value
            check_bound(self.spec, self.where, dim, extent.value, env)
        narrowed = []
        for out, full in zip(self.spec.outputs, outs, strict=True):
            shape = shape_of(out, env)
            part = full[tuple(slice(0, size) for size in shape)]
            keep = part.is_contiguous() and 2 * part.numel() > full.numel()
            narrowed.append(part if keep else part.clone(memory_format=torch.contiguous_format))
        return tuple(narrowed)


def _argument(p: CParameter, env: Mapping[str, EnvValue], extents: Extents) -> object:
    """A parameter after the tensors, as the function's type takes it."""
    if p.role == "extent":
        return ctypes.byref(extents[p.source])
    value = env[p.source]
    if isinstance(value, (list, tuple)):
        if p.role == "length":
            return len(value)
        element = ctypes.c_double if "double" in p.ctype else ctypes.c_int64
        return (element * max(1, len(value)))(*value)
    return value.encode() if isinstance(value, str) else value
