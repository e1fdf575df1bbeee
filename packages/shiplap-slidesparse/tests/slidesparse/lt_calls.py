"""Calls the kernels of csrc/lt as C functions, with tensors in host memory that claim to be on a GPU: the vendors'
libraries are doubles (vendor_double.cpp), which compute there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shiplap import dtypes
from shiplap.audit.c_child_process import CContext, DLTensorStruct
from shiplap_slidesparse import formats
from shiplap_slidesparse.lt import native

CUDA = 2
SYMBOLS = ("mm_int8", "mm_fp8", "sparse_mm_int8", "sparse_mm_fp8", "sparse_mm_bf16", "sparse_mm_fp16")


def view(tensor: Tensor, device: int = 0, kind: int = CUDA) -> tuple[DLTensorStruct, Any]:
    rank = tensor.dim()
    sizes = (ctypes.c_int64 * (2 * rank))(*tensor.shape, *tensor.stride())
    start = ctypes.addressof(sizes)
    code, bits, lanes = dtypes.of(tensor.dtype, "a call of the library").dlpack
    shape, strides = (start + 8 * rank * i for i in (0, 1))
    return DLTensorStruct(tensor.data_ptr(), kind, device, rank, code, bits, lanes, shape, strides, 0), sizes


@dataclass
class Call:
    """One way to call: stream, config, size of workspace and error buffer, device."""

    stream: int = 0
    config: Sequence[int] = ()
    workspace: int = 4096
    error_size: int = 512
    device: int = 0
    kind: int = CUDA
    message: str = field(default="", init=False)

    def __call__(self, symbol: str, tensors: Sequence[Tensor | None], scalars: Sequence[int] = ()) -> int:
        """The status; ``message`` has the text."""
        kept = [view(t, self.device, self.kind) if t is not None else None for t in tensors]
        scratch = ctypes.create_string_buffer(max(1, self.workspace))
        text = ctypes.create_string_buffer(self.error_size + 8)
        config = (ctypes.c_int64 * max(1, len(self.config)))(*self.config)
        context = CContext(
            1,
            1,
            self.stream,
            ctypes.addressof(scratch),
            self.workspace,
            ctypes.addressof(text) if self.error_size else None,
            self.error_size,
            ctypes.addressof(config) if self.config else None,
            len(self.config),
        )
        function = getattr(native._library_functions(), f"slidesparse_lt_{symbol}")
        status = function(
            ctypes.byref(context), *(k and ctypes.byref(k[0]) for k in kept), *(ctypes.c_int64(s) for s in scalars)
        )
        self.message = text.value.decode()
        assert text.raw[self.error_size :] == bytes(8), "written behind the error buffer"
        return int(status)


def two_of_four(n: int, k: int, dtype: torch.dtype) -> Tensor:
    weight = torch.randint(-100, 101, (n, k // 4, 4)) if dtype == torch.int8 else torch.randn(n, k // 4, 4)
    drop = torch.rand(weight.shape).argsort(-1)[..., :2]
    return weight.scatter(-1, drop, 0).view(n, k).to(dtype)


def packed(weight: Tensor) -> Tensor:
    """As the double's products read it, which is the portable layout; of the library nothing is asked."""
    return formats.compress_two_of_four(weight)


def problem_of(m: int, weight: Tensor, device: int = 0, **changes: int) -> native.ProductProblem:
    return native.ProductProblem(device, m, *weight.shape, weight.dtype, native.RESULT[weight.dtype], **changes)
