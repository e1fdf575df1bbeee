"""Memory layouts of test inputs: the same values, laid out as slices, transposes and expanded tensors are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _offset(t: Tensor) -> Tensor:
    """Contiguous, but neither at the start of its storage nor aligned to more than one element."""
    room = t.new_zeros(t.numel() + 8)
    view = room[3 : 3 + t.numel()].view(t.shape)
    return view.copy_(t)


def _padded(t: Tensor) -> Tensor:
    """A column slice: rows are contiguous, the row stride is larger than a row."""
    room = t.new_zeros((*t.shape[:-1], t.shape[-1] + 3))
    return room[..., 1 : 1 + t.shape[-1]].copy_(t)


def _strided(t: Tensor) -> Tensor:
    """Every second element of the last dim."""
    room = t.new_zeros((*t.shape[:-1], max(1, 2 * t.shape[-1])))
    return room[..., ::2][..., : t.shape[-1]].copy_(t)


def _transposed(t: Tensor) -> Tensor:
    """The last two dims swapped in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def _reversed(t: Tensor) -> Tensor:
    """All dims in reverse order in memory (channels-last and worse)."""
    order = tuple(range(t.dim()))[::-1]
    return t.permute(order).contiguous().permute(order)


def _channels_last(t: Tensor) -> Tensor:
    """The second dim moved to the end in memory: torch.channels_last, or channels_last_3d."""
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def _column_major(t: Tensor) -> Tensor:
    """A row slice of a matrix that is stored by columns: transposed, and the columns do not follow on each other."""
    return _padded(t.transpose(-1, -2)).transpose(-1, -2)


def _heads(t: Tensor) -> Tensor:
    """The second and third dim from the end swapped in memory, as the heads of attention are."""
    return t.transpose(-2, -3).contiguous().transpose(-2, -3)


def _gaps(t: Tensor) -> Tensor:
    """A slice of every dim: no dim follows on the next one without a gap."""
    room = t.new_zeros([size + 2 for size in t.shape])
    return room[tuple(slice(1, 1 + size) for size in t.shape)].copy_(t)


def _channels_last_sliced(t: Tensor) -> Tensor:
    """Channels last, but for a slice of the last dim: neither rows nor images follow on each other."""
    moved = t.movedim(1, -1)
    room = t.new_zeros((*moved.shape[:-2], moved.shape[-2] + 2, moved.shape[-1]))
    return room[..., 1 : 1 + moved.shape[-2], :].copy_(moved).movedim(-1, 1)


def _expanded(t: Tensor) -> Tensor:
    """Stride 0 along the first dim: every row is the first one."""
    return t[:1].clone().expand(t.shape)


def _expanded_last(t: Tensor) -> Tensor:
    """Stride 0 along the last dim: every column is the first one."""
    return t[..., :1].clone().expand(t.shape)


LAYOUTS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "offset": (0, _offset),
    "padded": (1, _padded),
    "strided": (1, _strided),
    "transposed": (2, _transposed),
    "column_major": (2, _column_major),
    "reversed": (3, _reversed),
    "heads": (3, _heads),
    "channels_last": (4, _channels_last),
    "gaps": (3, _gaps),
    "channels_last_sliced": (4, _channels_last_sliced),
    "expanded": (1, _expanded),
    "expanded_last": (2, _expanded_last),
}
"""Name → (least rank, layout)."""


def independent(t: Tensor) -> bool:
    """Whether ``t`` may have any values, whatever the other arguments are.

    Integers may have to be distinct, sorted or rows of another; floats of 8 bits are codes, which another argument
    may repeat or give a scale to.
    """
    return (t.is_floating_point() and t.itemsize > 1) or t.is_complex()


def possible(layout: str, t: Tensor, *, contiguous: bool, mutated: bool) -> bool:
    """Whether an argument with this declaration may arrive in ``layout``.

    Expanding a tensor changes its values, so a tensor is expanded only if its values are independent of other
    arguments.
    """
    least, _ = LAYOUTS[layout]
    if layout.startswith("expanded") and (mutated or not independent(t)):
        return False
    return t.dim() >= least and not (contiguous and layout != "offset")


def apply_layout(t: Tensor, layout: str) -> Tensor:
    """``t`` in another layout. ``expanded`` repeats the first row, ``expanded_last`` the first column."""
    return LAYOUTS[layout][1](t)


def clone_exactly(t: Tensor) -> Tensor:
    """A copy with the same strides, storage offset and surrounding bytes."""
    room = torch.empty(0, dtype=t.dtype, device=t.device)
    copy = room.set_(t.untyped_storage().clone(), t.storage_offset(), t.shape, t.stride())
    return copy.requires_grad_(t.requires_grad)
