"""The memory of one C ABI call. One buffer holds the context, the DLTensors, their shapes and strides, and the error
message.

One ``struct`` for each combination of ranks packs it, with addresses as integers. A ctypes structure for each tensor
would cost more time than most kernels that are small enough for the call to matter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from shiplap import dtypes
from shiplap.cached_property import cached_property

ABI_VERSION = 1
ERROR_BYTES = 1024
CONTEXT, TENSOR = "IiPPNPNPN", "PiiiBBHPPQ"  # sl_context and DLTensor of shiplap/abi.h, without padding between them

_DEVICE = {"cpu": 1, "cuda": 2}
_THREADS, _WORKSPACE = 1, 2  # where they are in an sl_context, counted in their own widths
_EXTENSION = 12  # kDLExtDev: any other device type, such as a PrivateUse1 backend


@dataclass(frozen=True)
class _FrameLayout:
    """The layout of a :class:`CallFrame` for tensors of given ranks. ``pack`` is the format of the whole frame but for
    the error message, which follows at the end. ``tensors`` holds the offset of each tensor's descriptor in bytes.
    ``size`` is the length of the frame in bytes, with the message.
    """

    pack: Struct
    tensors: tuple[int, ...]
    size: int


@cache
def _frame_layout(ranks: tuple[int, ...]) -> _FrameLayout:
    """Return the layout of the memory that describes a call of a C function with tensors of these ``ranks``.

    The memory holds a context, then a descriptor, the sizes and the strides of each tensor, then space for an error
    message. The rank -1 stands for an argument that is None, for which nothing is stored.
    """
    text, places = CONTEXT, []
    for rank in ranks:
        places.append(Struct(text).size)
        text += f"{TENSOR}{2 * rank}q" if rank >= 0 else ""
    pack = Struct(text)
    return _FrameLayout(pack, tuple(places), pack.size + ERROR_BYTES)


class CallFrame:
    """The memory that describes one call to a C function, with a context and a descriptor of each tensor. ``context``
    is the address of the context. ``tensors`` holds the addresses of the descriptors, with None for a tensor that is
    None. The addresses are valid as long as the object lives.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor | None],
        device: torch.device,
        scratch: Tensor | None,
        stream: int,
        config: tuple[int, int] = (0, 0),
        where: str = "",
    ) -> None:
        """Pack the context and a DLTensor for each of ``tensors`` into one buffer. ``scratch`` is the workspace,
        ``stream`` the address of the CUDA stream, and ``config`` the address and the length of the config's values.
        ``where`` names the place in errors.
        """
        layout = _frame_layout(tuple([-1 if t is None else t.dim() for t in tensors]))
        # Zeroed, so that an unwritten error message is empty.
        self._buffer = ctypes.create_string_buffer(layout.size)
        base = self.context = ctypes.addressof(self._buffer)
        message = self._message = base + layout.pack.size
        workspace = (0, 0) if scratch is None else (scratch.data_ptr(), scratch.numel())
        fields: list[Any] = [
            ABI_VERSION,
            # Read at each call, since a program may change it.
            max(1, torch.get_num_threads()),
            stream,
            *workspace,
            message,
            ERROR_BYTES,
            *config,
        ]
        kind, index = _DEVICE.get(device.type, _EXTENSION), device.index or 0
        self.tensors: list[int | None] = []
        for tensor, place in zip(tensors, layout.tensors, strict=True):
            if tensor is None:
                self.tensors.append(None)
                continue
            shape, sizes = tensor.shape, base + place + _TENSOR_BYTES
            rank = len(shape)
            # torch leaves the strides of dims of size 0 or 1 arbitrary, also in a contiguous tensor
            strides = _canonical_strides(shape) if tensor.is_contiguous() else tensor.stride()
            fields += (
                tensor.data_ptr(),
                kind,
                index,
                rank,
                *_dlpack_element(tensor.dtype, where),
                sizes,
                sizes + 8 * rank,
                0,
                *shape,
                *strides,
            )
            self.tensors.append(base + place)
        layout.pack.pack_into(self._buffer, 0, *fields)
        # In units of 64 bits, as ``point_to`` writes addresses.
        self._places = [place // 8 for place in layout.tensors]

    @cached_property
    def _numbers(self) -> tuple[Any, Any]:
        """The buffer as two ctypes arrays that share its memory. The first has 64-bit integers, the second
        32-bit ones.
        """
        size = len(self._buffer)
        return (ctypes.c_int64 * (size // 8)).from_buffer(self._buffer), (ctypes.c_uint32 * (size // 4)).from_buffer(
            self._buffer
        )

    def point_to(self, tensors: Sequence[Tensor | None], scratch: Tensor | None) -> None:
        """Replace the addresses of tensors and of the workspace ``scratch`` in the frame by those of another call on
        the CPU. The tensors of that call must have equal sizes, strides and dtypes. ``scratch`` is None for a kernel
        without workspace.
        """
        wide, narrow = self._numbers
        # The number of threads may have changed since the frame was made.
        narrow[_THREADS] = max(1, torch.get_num_threads())
        if scratch is not None:
            wide[_WORKSPACE], wide[_WORKSPACE + 1] = scratch.data_ptr(), scratch.numel()
        for tensor, place in zip(tensors, self._places, strict=True):
            if tensor is not None:
                wide[place] = tensor.data_ptr()

    @property
    def message(self) -> str:
        """The error message that the kernel wrote, up to its NUL character or the end of the buffer."""
        raw = ctypes.string_at(self._message, ERROR_BYTES)
        # A kernel may cut a character of several bytes at the end of the buffer.
        return raw.partition(b"\0")[0].decode(errors="replace")


_TENSOR_BYTES = Struct(TENSOR).size


@cache
def _dlpack_element(dtype: torch.dtype, where: str) -> tuple[int, int, int]:
    """Return the DLPack type code, the number of bits and the number of lanes of ``dtype``. Raise ``SL214``, with the
    place ``where`` in its message, if DLPack has no code for the dtype.
    """
    return dtypes.of(dtype, where).dlpack


def _canonical_strides(shape: Sequence[int]) -> Sequence[int]:
    """Return the strides, in elements, of a contiguous tensor of ``shape``. In this computation, a size of 0 counts as
    1.
    """
    # Short for flat tensors, since this runs for each tensor of each call.
    if len(shape) == 1:
        return (1,)
    strides, step = [0] * len(shape), 1
    for axis in range(len(shape) - 1, -1, -1):
        strides[axis] = step
        step *= max(1, shape[axis])
    return strides
