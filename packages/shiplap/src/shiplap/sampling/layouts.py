"""Memory layouts of test inputs: the same values as a slice, a transpose, or an expanded tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def _offset_start(t: Tensor) -> Tensor:
    """Return a contiguous copy of ``t`` that begins three elements behind the start of its storage, so its address is
    aligned to one element only.
    """
    room = t.new_zeros(t.numel() + 8)
    view = room[3 : 3 + t.numel()].view(t.shape)
    return view.copy_(t)


def _padded_rows(t: Tensor) -> Tensor:
    """Return a copy of ``t`` whose rows are contiguous and have gaps between them. It is a slice of the columns of a
    wider tensor.
    """
    room = t.new_zeros((*t.shape[:-1], t.shape[-1] + 3))
    return room[..., 1 : 1 + t.shape[-1]].copy_(t)


def _strided_columns(t: Tensor) -> Tensor:
    """Return a copy of ``t`` whose elements along the last dim are two apart in memory."""
    room = t.new_zeros((*t.shape[:-1], max(1, 2 * t.shape[-1])))
    return room[..., ::2][..., : t.shape[-1]].copy_(t)


def _transposed_matrix(t: Tensor) -> Tensor:
    """Return a copy of ``t`` with equal values and shape whose last two dims are swapped in memory."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


def _reversed_dims(t: Tensor) -> Tensor:
    """Return a copy of ``t`` with equal values and shape whose dims are in reverse order in memory."""
    order = tuple(range(t.dim()))[::-1]
    return t.permute(order).contiguous().permute(order)


def _channels_last(t: Tensor) -> Tensor:
    """Return a copy of ``t`` whose second dim is last in memory, as in ``torch.channels_last`` and
    ``torch.channels_last_3d``.
    """
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def _column_major(t: Tensor) -> Tensor:
    """Return a copy of ``t`` whose last two dims are stored by columns, with gaps between the columns."""
    return _padded_rows(t.transpose(-1, -2)).transpose(-1, -2)


def _swapped_heads(t: Tensor) -> Tensor:
    """Return a copy of ``t`` whose second and third dim from the end are swapped in memory. The heads of attention
    often lie like that.
    """
    return t.transpose(-2, -3).contiguous().transpose(-2, -3)


def _sliced_dims(t: Tensor) -> Tensor:
    """Return a copy of ``t`` that is a slice of a tensor which is larger by 2 in every dim. The last dim has stride 1,
    and all other dims have gaps between their elements.
    """
    room = t.new_zeros([size + 2 for size in t.shape])
    return room[tuple(slice(1, 1 + size) for size in t.shape)].copy_(t)


def _channels_last_sliced(t: Tensor) -> Tensor:
    """Return a copy of ``t`` with the second dim last in memory, as in channels-last order. It is a slice of a larger
    tensor, with gaps between rows and between images.
    """
    moved = t.movedim(1, -1)
    room = t.new_zeros((*moved.shape[:-2], moved.shape[-2] + 2, moved.shape[-1]))
    return room[..., 1 : 1 + moved.shape[-2], :].copy_(moved).movedim(-1, 1)


def _expanded_first(t: Tensor) -> Tensor:
    """Return the first row of ``t``, expanded to the shape of ``t`` with stride 0 in the first dim."""
    return t[:1].clone().expand(t.shape)


def _expanded_last(t: Tensor) -> Tensor:
    """Return the first column of ``t``, expanded to the shape of ``t`` with stride 0 in the last dim."""
    return t[..., :1].clone().expand(t.shape)


LAYOUTS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "offset": (0, _offset_start),
    "padded": (1, _padded_rows),
    "strided": (1, _strided_columns),
    "transposed": (2, _transposed_matrix),
    "column_major": (2, _column_major),
    "reversed": (3, _reversed_dims),
    "heads": (3, _swapped_heads),
    "channels_last": (4, _channels_last),
    "gaps": (3, _sliced_dims),
    "channels_last_sliced": (4, _channels_last_sliced),
    "expanded": (1, _expanded_first),
    "expanded_last": (2, _expanded_last),
}
"""Name → (least rank, layout)."""


def has_independent_values(t: Tensor) -> bool:
    """Return whether the elements of ``t`` may have any values, whatever the other arguments are. This holds for
    floating-point and complex tensors other than float8.

    Integers may have to be distinct, sorted, or indices of another argument's rows. Floats of 8 bits are codes, which
    another argument may repeat or scale.
    """
    return (t.is_floating_point() and t.itemsize > 1) or t.is_complex()


def layout_is_possible(layout: str, t: Tensor, *, contiguous: bool, mutated: bool) -> bool:
    """Return whether the argument ``t`` has enough dims for ``layout``, a name of ``LAYOUTS`` such as ``offset``, and
    may be passed in it.

    ``contiguous`` says whether the declaration demands contiguous memory for the argument, and ``mutated`` whether the
    op writes to it. Expanded layouts repeat values. They are refused for mutated arguments, and for integers and
    float8, whose values may depend on other arguments.
    """
    least, _ = LAYOUTS[layout]
    if layout.startswith("expanded") and (mutated or not has_independent_values(t)):
        return False
    return t.dim() >= least and not (contiguous and layout != "offset")


def apply_layout(t: Tensor, layout: str) -> Tensor:
    """Return a tensor with the values of ``t`` in the memory layout called ``layout`` in ``LAYOUTS``. The layout
    ``expanded`` repeats the first row instead, and ``expanded_last`` the first column.
    """
    return LAYOUTS[layout][1](t)


def clone_exactly(t: Tensor) -> Tensor:
    """Return a copy of ``t`` with the same strides and storage offset. The whole storage of ``t`` is copied, including
    elements that do not belong to ``t``.
    """
    room = torch.empty(0, dtype=t.dtype, device=t.device)
    # A plain ``clone`` would drop the surrounding bytes, which a kernel may read by mistake.
    copy = room.set_(t.untyped_storage().clone(), t.storage_offset(), t.shape, t.stride())
    return copy.requires_grad_(t.requires_grad)
