"""``sl.cabi(library, symbol)``, a stateless, out-style C function as a kernel, called through the Python binding.

For each call, PyTorch's allocator provides outputs and workspace. The function gets DLTensor views of them and runs
without the GIL. A status other than ``SL_OK`` becomes ``SL305`` with the kernel's own message.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, empty_strided

from shiplap.codegen import CParameter
from shiplap.declare.binding import Binding
from shiplap.declare.code_parts import AnyValue
from shiplap.declare.config import Values
from shiplap.declare.kernel import Implementation, KernelTerms, Refill, Rerun, read_strided
from shiplap.declare.native_interface import NativeForm
from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Args, EnvValue, Outputs, Result
from shiplap.dispatch.launch import allocate_bytes as fresh_scratch
from shiplap.dispatch.launch import workspace_size
from shiplap.errors import ShiplapError, error
from shiplap.kernels.c.call_frame import CallFrame
from shiplap.kernels.c.header import prototype_signature
from shiplap.kernels.c.library import library_digest, load_symbol
from shiplap.kernels.native.packed_kernel import Extents, PackedKernel

SL_OK, SL_INVALID_ARGUMENT = 0, 1
KNOWN = 16  # bytes: the alignment of addresses by which calls are remembered, see dispatch/fast_paths.py
_TYPE: dict[str, type[ctypes._SimpleCData[int] | ctypes._SimpleCData[float] | ctypes._SimpleCData[bytes | None]]] = {
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "int32_t": ctypes.c_int32,
    "const char*": ctypes.c_char_p,
}


class CAbiImplementation(Implementation):
    """A kernel that is a C function of a library, with the arguments of :func:`cabi`. It is not yet bound to an op."""

    native_configs = True

    def __init__(
        self,
        library: str | os.PathLike[str],
        symbol: str,
        strided: Iterable[str] = (),
        align: int = 1,
        without_signature: bool = False,
    ) -> None:
        """Store the arguments of :func:`cabi`, which describes them. The library is not opened."""
        # A single name is not a list of letters.
        names = (strided,) if isinstance(strided, str) else strided
        self.library, self.symbol, self.strided, self.align = Path(library), symbol, frozenset(names), align
        self.without_signature = without_signature

    @property
    def name(self) -> str:
        """The name of the C function. Reports and stored tuning choices name the kernel by it."""
        return self.symbol

    def code_parts(self) -> Iterator[tuple[str, AnyValue]]:
        """Yield pairs of a string and None, from which the key of the kernel in caches is computed. The string of the
        first pair holds the library's file name, the symbol, the strided arguments and the alignment. That of the
        second is the digest of the library's content.
        """
        yield f"cabi {self.library.name} {self.symbol} {sorted(self.strided)} {self.align}", None
        yield library_digest(self.library), None

    def bind(self, spec: OpSpec, terms: KernelTerms) -> CKernel:
        """Return the kernel for the op declared as ``spec``. Raise ``SL122`` if a name in ``strided`` is no tensor
        argument. The library is opened at the first call.
        """
        read_strided(spec, f"sl.cabi(..., {self.symbol!r})", self.strided)
        return CKernel(spec, terms, self)


def cabi(
    library: str | os.PathLike[str],
    symbol: str,
    *,
    strided: Iterable[str] = (),
    align: int = 1,
    without_signature: bool = False,
) -> CAbiImplementation:
    """Return a kernel that calls a C function through Shiplap's C ABI. Pass the result to ``op.kernel(device, ...)``.

    Args:
        library: the path of the shared library. A file of that name in the folder of the environment variable
            ``SHIPLAP_LIBRARY_PATH`` takes precedence.
        symbol: the C function, with the prototype that ``shiplap header`` prints.
        strided: the tensor arguments that the kernel accepts with any strides. All others are made contiguous.
        align: the alignment, in bytes, that the kernel needs of every tensor's address. A tensor at another address,
            such as a view into a larger tensor, is copied. A given output at another address is refused with ``SL212``.
        without_signature: True for a library that does not contain ``SL_SIGNATURES`` of the generated header. Shiplap
            then cannot find out whether the library was built for this declaration. A function with other parameters
            reads memory that does not belong to it.

    Raises:
        LibraryError: ``SL402`` if ``symbol`` is no C name, ``SL404`` for an invalid ``align``. ``SL401`` to ``SL403``
            at the first call if the library is missing, was built for another declaration, or does not state for which
            one.
    """
    check_c_function(f"sl.cabi({library}, {symbol!r})", symbol, align)
    return CAbiImplementation(library, symbol, strided, align, without_signature)


class CFunctionKernel(PackedKernel):
    """The base class of kernels that call a C function. For a call, a :class:`CallFrame` holds the context and a C
    descriptor of each tensor. The function gets their addresses and the scalar arguments.
    """

    def __init__(self, spec: OpSpec, terms: KernelTerms, form: NativeForm) -> None:
        """Bind the C function of ``form`` to the op declared as ``spec``, with an empty config."""
        super().__init__(spec, terms, form)
        self.values = 0, 0  # of the config: address and length
        self._array: ctypes.Array[ctypes.c_int64] | None = None  # holds them

    def configure(self, values: Values) -> None:
        """Store ``values``, the integers of a config by name, in their order as a C array. The C function reads the
        array through its context.
        """
        self._array = (ctypes.c_int64 * len(values))(*[int(v) for v in values.values()])
        self.values = ctypes.addressof(self._array), len(values)

    def typed(self, function: Any) -> Callable[..., int]:
        """Return ``function``, a C function of a library, with the ctypes of its parameters set. Addresses are passed
        as integers, and the GIL is released during a call. The return value is the status as an int.
        """
        types = [_TYPE.get(p.ctype, ctypes.c_void_p) for p in self.parameters]
        # By address: types set on the library's own function object would be shared by all its users.
        address = ctypes.cast(function, ctypes.c_void_p).value
        return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *types)(address or 0)

    def call_function(
        self,
        function: Callable[..., int],
        call: Binding,
        tensors: Sequence[Tensor | None],
        extents: Extents,
        scratch: Tensor | None,
    ) -> None:
        """Call ``function`` with a frame on the current stream. The frame holds a context, the workspace ``scratch``,
        and a C descriptor for each of ``tensors``. ``extents`` receives the data-dependent sizes.

        Raise ``SL211`` or ``SL305`` with the kernel's message if the status is not ``SL_OK``.
        """
        device = call.device
        rest = [_ctypes_argument(p, call.env, extents) for p in self.parameters[len(tensors) :]]
        if device.type == "cuda":
            frame = CallFrame(
                tensors, device, scratch, torch.cuda.current_stream(device).cuda_stream, self.values, self.where
            )
            # The kernel launches on the current device, which need not be that of the tensors.
            with torch.cuda.device(device):
                status = function(frame.context, *frame.tensors, *rest)
        else:
            frame = CallFrame(tensors, device, scratch, 0, self.values, self.where)
            status = function(frame.context, *frame.tensors, *rest)
        if status != SL_OK:
            raise c_status_error(status, self.where, frame)


class CKernel(CFunctionKernel):
    """A kernel that is a C function of a shared library."""

    def __init__(self, spec: OpSpec, terms: KernelTerms, source: CAbiImplementation) -> None:
        """Bind the C function of ``source`` to the declaration. Its library is not opened."""
        names = terms.space.names if terms.space is not None else ()
        stamp = prototype_signature(spec, names)
        form = NativeForm(source.library, source.symbol, source.strided, source.align, stamp, source.without_signature)
        super().__init__(spec, terms, form)
        self._function: Callable[..., int] | None = None
        threads = self.workspace is not None and "threads" in self.workspace.names
        # A stream, a data-dependent size or a number of threads may change from call to call.
        fixed = self.device == "cpu" and not spec.bounds and not threads
        self.can_repeat = fixed and source.align <= KNOWN  # all that it needs beside addresses is known once it has run

    def timed(self, call: Binding, clock: Callable[[Callable[[], int]], float]) -> float:
        """Return ``clock(function)``, where ``function`` runs the C function on the fixed arguments of ``call`` and
        returns its status. ``clock`` returns a time. It is called inside a call of the op, so that the arguments are
        alive.
        """
        function, times = self._loaded(), [0.0]

        def between(*args: object) -> int:
            """Time the C function on its arguments ``args`` with ``clock``, then call it and return its status. This
            function replaces the C function for one call.
            """
            times[0] = clock(lambda: function(*args))
            return function(*args)

        try:
            # The clock runs where the function would be called, with arguments that are alive.
            self._function = between
            self.run_call(call)
        finally:
            self._function = function
        return times[0]

    def _loaded(self) -> Callable[..., int]:
        """Return the kernel's C function with its types. Its library is loaded at the first call. Raise the errors of
        :func:`load_symbol`.
        """
        if self._function is None:
            form = self.native
            self._function = self.typed(load_symbol(form))
        return self._function

    def run_first_call(self, call: Binding) -> tuple[Outputs, Rerun | None]:
        """Run ``call``. Return its outputs and a function that repeats the call for tensors that differ only in their
        addresses. The function is None if something else may change between calls, which is a stream, a data-dependent
        size or a number of threads.
        """
        outs = self.run_call(call)
        return outs, self._rerun(call, outs) if self.can_repeat else None

    def _rerun(self, call: Binding, outs: Outputs) -> Rerun:
        """Return a function of a call's arguments that allocates outputs like ``outs``, lets the C function fill them,
        and returns them. It returns a tensor if there is one output, and otherwise a tuple.
        """
        made = [(tuple(o.shape), o.stride(), o.dtype) for o in outs]
        refill, single, device = self._refill(call, outs), len(made) == 1, call.device

        def rerun(args: Args) -> Result:
            """Return new outputs of the C function for ``args``, the arguments of a call that differs from the first
            one only in addresses. A single output is returned as a tensor, and several are returned as a tuple.
            """
            results = tuple([empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in made])
            refill(args, results)
            return results[0] if single else results

        return rerun

    def fill_first_call(self, call: Binding, outs: Outputs) -> Refill | None:
        """Run ``call`` into ``outs``. Return a function that repeats the call for tensors that differ only in their
        addresses.

        Return None if something else may change between calls, which is a stream, a data-dependent size or a number of
        threads.
        """
        self.run_into(call, outs, None)
        return self._refill(call, outs) if self.can_repeat else None

    def _refill(self, call: Binding, outs: Outputs) -> Refill:
        """Return a function ``refill(args, outs)`` that calls the C function for a call that differs from ``call`` only
        in the addresses of tensors. The addresses are written into a :class:`CallFrame` that no other thread is using.
        """
        pack, function, where = self._pack, self._loaded(), self.where
        count = len(self.spec.tensors)
        rest = [_ctypes_argument(p, call.env, {}) for p in self.parameters[count + len(outs) :]]
        room, device = workspace_size(self.workspace, call), call.device
        values, holds = self.values, self._array  # of the config, at an address that has to stay alive
        free: list[CallFrame] = []

        def refill(args: Args, given_outs: Outputs, _holds: object = holds) -> None:
            """Call the C function on ``args`` and into ``given_outs``, for a call that differs from the first one only
            in addresses. ``_holds`` is not read. As a default value, it keeps the config's array alive. Raise ``SL211``
            or ``SL305`` if the function fails.
            """
            tensors, _ = pack(args)
            tensors += given_outs
            given = fresh_scratch(room, device) if room else None
            try:
                # Threads take frames from one list: a pop is atomic, and a frame is never used by two.
                frame = free.pop()
            except IndexError:
                frame = CallFrame(tensors, device, given, 0, values, where)
            else:
                frame.point_to(tensors, given)
            status = function(frame.context, *frame.tensors, *rest)
            # The frame of a failed call is not used again, since the error reads its message.
            if status != SL_OK:
                raise c_status_error(status, where, frame)
            free.append(frame)

        return refill

    def invoke_function(
        self, call: Binding, tensors: Sequence[Tensor | None], extents: Extents, scratch: Tensor | None
    ) -> None:
        """Call the C function on ``tensors``, the inputs followed by the outputs. The inputs already have the layout
        that the kernel needs. The function writes data-dependent sizes into ``extents``, by name of the dim.
        ``scratch`` is its workspace, or None if it has none.
        """
        self.call_function(self._function or self._loaded(), call, tensors, extents, scratch)


def c_status_error(status: int, where: str, frame: CallFrame) -> ShiplapError:
    """Return the error of a C function that returned ``status``, with the message in ``frame``. It is ``SL211`` for an
    invalid argument, and otherwise ``SL305``.
    """
    id = "SL211" if status == SL_INVALID_ARGUMENT else "SL305"
    silent = "write the reason of the status to ctx->error in the kernel" if id == "SL305" and not frame.message else ""
    return error(id, where=where, got=frame.message or f"status {status}", expected="", fix=silent)


def _ctypes_argument(p: CParameter, env: Mapping[str, EnvValue], extents: Extents) -> object:
    """Return the value that ctypes passes for ``p``, a parameter of the C function after the tensors. It is a scalar,
    an array of a list's elements, the length of a list, or the address of a data-dependent size in ``extents``. ``env``
    holds the values of the op's arguments by name.
    """
    if p.role == "extent":
        return ctypes.byref(extents[p.source])
    value = env[p.source]
    if isinstance(value, (list, tuple)):
        if p.role == "length":
            return len(value)
        element = ctypes.c_double if "double" in p.ctype else ctypes.c_int64
        # C has no arrays of length 0; the length is passed beside it.
        return (element * max(1, len(value)))(*value)
    return value.encode() if isinstance(value, str) else value


def check_c_function(where: str, symbol: str, align: int) -> None:
    """Raise ``SL402`` unless ``symbol`` is a name in C, and ``SL404`` unless ``align`` is a power of two. ``where`` is
    the call in errors that names the function.
    """
    if not (symbol.isidentifier() and symbol.isascii()):
        raise error(
            "SL402",
            where=where,
            got=symbol or "an empty name",
            expected="the name of a C function",
            fix="pass the symbol as it is written in C"
            + ", behind the library: sl.cabi(library, symbol)" * symbol.endswith((".so", ".dylib")),
        )
    if align < 1 or align & (align - 1):
        raise error(
            "SL404",
            where=where,
            what="the alignment is invalid",
            got=f"align={align!r}",
            expected="a power of two",
            fix="pass the alignment in bytes, such as align=16",
        )
