"""Calls the sparse3d kernels through their C symbols, without torch or shiplap between.

The tests and ``benchmarks/sparse3d_cpu.py`` use it. Every function allocates its outputs and a workspace of exactly the
documented size (the formulas of the declarations, repeated here on purpose: a kernel that needs a byte more fails).
The library comes from the directory ``SHIPLAP_LIBRARY_PATH`` or from the installed package.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import shiplap_sparse3d

LIBRARY = "libshiplap_sparse3d.so"
ISAS = {"baseline": 0, "avx2": 1, "avx512": 2, "avx512bf16": 3}
UNSUPPORTED = 2


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Context(ctypes.Structure):
    _fields_ = [
        ("abi_version", ctypes.c_uint32),
        ("num_threads", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
        ("error", ctypes.c_char_p),
        ("error_size", ctypes.c_size_t),
    ]


class KernelError(Exception):
    """A status other than SL_OK, with the kernel's message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def library_path() -> Path:
    """Where the kernel library is; it need not exist."""
    directory = os.environ.get("SHIPLAP_LIBRARY_PATH")
    if directory:
        return Path(directory) / LIBRARY
    return Path(shiplap_sparse3d.__file__).parent / LIBRARY


class Bfloat16(np.ndarray):
    """``uint16`` words that are meant as bfloat16, for which numpy has no type: ``bfloat16(x)`` makes them."""


def bfloat16(values: np.ndarray) -> Bfloat16:
    """Rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(Bfloat16)


def wide(values: np.ndarray) -> np.ndarray:
    """In float64, whatever they are stored as."""
    if isinstance(values, Bfloat16):
        values = (np.ascontiguousarray(values.view(np.ndarray)).astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64)


def _describe(array: np.ndarray, keep: list) -> _Tensor:
    ndim = array.ndim
    shape = (ctypes.c_int64 * ndim)(*array.shape)
    strides = (ctypes.c_int64 * ndim)(*(s // array.itemsize for s in array.strides))
    keep += [array, shape, strides]
    code = 4 if isinstance(array, Bfloat16) else {"i": 0, "u": 1, "f": 2}[array.dtype.kind]
    dtype = _DataType(code, array.itemsize * 8, 1)
    return _Tensor(array.ctypes.data, _Device(1, 0), ndim, dtype, shape, strides, 0)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def pow2ceil(value: int) -> int:
    return 1 << max(0, (value - 1).bit_length())


def workspace_array(size: int, poison: int | None = None) -> np.ndarray:
    """``size`` bytes, 64-byte aligned; filled with ``poison``, or left as the allocator gives them."""
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + size]
    if poison is not None:
        array[:] = poison
    return array


@dataclass
class Sparse3d:
    """The ops of the library; ``isa`` picks an instruction set for the two matrix kernels."""

    threads: int = 1
    isa: str | None = None
    poison: int | None = None
    workspace_shortage: int = 0
    workspace: np.ndarray | None = None  # kept between calls, as a caching allocator would

    def __post_init__(self) -> None:
        self.library = ctypes.CDLL(str(library_path()))

    # ---- calling

    def _scratch(self, size: int) -> np.ndarray:
        if self.workspace is None or self.workspace.size < size or self.poison is not None:
            self.workspace = workspace_array(size, self.poison)
        return self.workspace

    def call(self, name: str, workspace: int, *arguments: object) -> None:
        """Calls ``sparse3d_<name>``; arrays become tensors, sequences of int pointer and length."""
        keep: list = []
        values: list = []
        for argument in arguments:
            if argument is None:
                values.append(None)
            elif isinstance(argument, np.ndarray):
                values.append(ctypes.byref(_describe(argument, keep)))
            elif isinstance(argument, (tuple, list)):
                values.append((ctypes.c_int64 * len(argument))(*argument))
                values.append(ctypes.c_int64(len(argument)))
            elif isinstance(argument, int):
                values.append(ctypes.c_int64(argument))
            else:
                values.append(argument)
        error = ctypes.create_string_buffer(512)
        scratch = self._scratch(workspace)
        context = _Context(
            1,
            self.threads,
            None,
            scratch.ctypes.data,
            workspace - self.workspace_shortage,
            ctypes.cast(error, ctypes.c_char_p),
            len(error),
        )
        status = getattr(self.library, f"sparse3d_{name}")(ctypes.byref(context), *values)
        if status != 0:
            raise KernelError(status, error.value.decode())

    def has_isa(self) -> bool:
        """Whether this machine can run ``isa``."""
        empty = np.zeros((0, 1), np.float32)
        try:
            self.conv(empty, np.zeros((1, 1, 1), np.float32), np.zeros((0, 1), np.int32))
        except KernelError as error:
            if error.status == UNSUPPORTED:
                return False
            raise
        return True

    def _call_matrix(
        self, name: str, workspace: int, inputs: tuple, optional: tuple, out: np.ndarray, groups: int, *flags: bool
    ) -> None:
        """``optional``: the arguments that an entry point for one instruction set has not."""
        if self.isa is None:
            self.call(name, workspace, *inputs, *optional, out, groups, *map(ctypes.c_int32, flags))
        else:
            self.call(f"{name}_isa", workspace, *inputs, out, groups, ctypes.c_int32(ISAS[self.isa]))

    # ---- the ops

    def unique_coords(self, coords: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n = len(coords)
        unique, m = np.empty((n, 4), np.int32), ctypes.c_int64()
        inverse, counts = np.empty(n, np.int32), np.empty(n, np.int32)
        self.call("unique_coords", 24 * n + 49408, coords, unique, inverse, counts, ctypes.byref(m))
        return unique[: m.value], inverse, counts[: m.value]

    def segment_mean(self, feats: np.ndarray, index: np.ndarray, counts: np.ndarray) -> np.ndarray:
        out = np.empty((len(counts), feats.shape[1]), feats.dtype)
        self.call("segment_mean", 0, feats, index, counts, out)
        return out

    def subm_table(
        self,
        coords: np.ndarray,
        shape: Sequence[int],
        kernel: Sequence[int],
        dilation: Sequence[int] = (1, 1, 1),
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        n = len(coords)
        if out is None:
            out = np.empty((n, math.prod(kernel)), np.int32)
        self.call("subm_table", 24 * n + 49472, coords, out, tuple(shape), tuple(kernel), tuple(dilation))
        return out

    def out_coords(
        self,
        coords: np.ndarray,
        shape: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int] = (1, 1, 1),
        padding: Sequence[int] = (0, 0, 0),
        dilation: Sequence[int] = (1, 1, 1),
    ) -> np.ndarray:
        n, m = len(coords), ctypes.c_int64()
        axes = zip(kernel, stride, dilation, strict=True)
        bound = n * math.prod(cdiv(k, s // math.gcd(s, d)) for k, s, d in axes)
        workspace = 24 * n + 16 * pow2ceil(max(2 * bound, 16)) + 16 * bound + 8 * sum(kernel) + 49664
        out = np.empty((bound, 4), np.int32)
        scalars = [tuple(value) for value in (shape, kernel, stride, padding, dilation)]
        self.call("out_coords", workspace, coords, out, *scalars, ctypes.byref(m))
        return out[: m.value]

    def conv_table(
        self,
        coords: np.ndarray,
        out_coords: np.ndarray,
        shape: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int] = (1, 1, 1),
        padding: Sequence[int] = (0, 0, 0),
        dilation: Sequence[int] = (1, 1, 1),
    ) -> np.ndarray:
        n, m = len(coords), len(out_coords)
        out = np.empty((m, math.prod(kernel)), np.int32)
        scalars = [tuple(value) for value in (shape, kernel, stride, padding, dilation)]
        self.call("conv_table", 24 * (n + m) + 49792, coords, out_coords, out, *scalars)
        return out

    def transpose_table(self, table: np.ndarray, rows: int) -> np.ndarray:
        out = np.empty((rows, table.shape[1]), np.int32)
        self.call("transpose_table", 0, table, out, rows)
        return out

    def conv(
        self,
        feats: np.ndarray,
        weight: np.ndarray,
        table: np.ndarray,
        bias: np.ndarray | None = None,
        out: np.ndarray | None = None,
        groups: int = 1,
        order: np.ndarray | None = None,
        reflect: bool = False,
    ) -> np.ndarray:
        (m, k), (co, _, cg), ci = table.shape, weight.shape, feats.shape[1]
        if out is None:
            out = _empty((m, co), feats)
        vectors, size = cdiv(co // groups, 16), max(feats.itemsize, 4)
        tile = 65536
        if feats.itemsize == 2:
            tile = 4 * max(65536, 256 * groups * vectors) + 4 * max(8192, 192 * cdiv(ci, 16))
        workspace = (k * cg * groups * 16 * vectors + 16 * cdiv(co, 16)) * size + 64 * cdiv(m * k, 16)
        workspace += self.threads * (2112 * k + 64 * cdiv(k, 16) + tile)
        optional = order, None, None, None, None
        self._call_matrix("conv", workspace, (feats, weight, table, bias), optional, out, groups, reflect, False, False)
        return out

    def conv_weight_grad(
        self,
        grad: np.ndarray,
        feats: np.ndarray,
        table: np.ndarray,
        out: np.ndarray | None = None,
        groups: int = 1,
        order: np.ndarray | None = None,
        reflect: bool = False,
    ) -> np.ndarray:
        (m, k), co, ci = table.shape, grad.shape[1], feats.shape[1]
        if out is None:
            out = _empty((co, k, ci // groups), feats)
        size = max(feats.itemsize, 4)
        rows = 2048 * (cdiv(ci, 16) + cdiv(co, 16) + min(1, groups - 1)) * size
        workspace = k * max(co * 16 * cdiv(ci // groups, 16), 32 * cdiv(co, 16)) * size
        workspace += self.threads * (rows + 4160 * k + 64 * cdiv(k, 16)) + 64 * cdiv(k, 8) + 64 * cdiv(m * k, 16)
        self._call_matrix(
            "conv_weight_grad", workspace, (grad, feats, table), (order, None, None), out, groups, reflect, False
        )
        return out


def _empty(shape: tuple[int, ...], like: np.ndarray) -> np.ndarray:
    return np.empty(shape, like.dtype).view(type(like))
