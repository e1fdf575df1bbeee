"""Ops of the capacity form: a size that depends on data, padded to one that does not, for graphs that are replayed."""

from __future__ import annotations

import torch
from jaxtyping import Int32
from torch import Tensor

import shiplap as sl
from shiplap.extend import error
from shiplap_sparse3d import cpu, ops

__all__ = ["out_coords_bounded"]


@sl.op(
    "sparse3d::out_coords_bounded",
    outputs=("reached", "count"),
    requires=(*ops.WINDOW, "capacity >= 0"),
)
def out_coords_bounded(
    coords: Int32[Tensor, "n 4"],
    spatial_shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    capacity: int,
) -> tuple[Int32[Tensor, "capacity 4"], Int32[Tensor, "1"]]:
    """``out_coords`` in ``capacity`` rows: padding rows (-1, -1, -1, -1) behind them, and how many there are.

    Raises SL211 as ``out_coords`` does, and when there are more than ``capacity``.
    """
    reached = ops.out_coords.reference(coords, spatial_shape, kernel, stride, padding, dilation)
    m = reached.shape[0]
    if m > capacity:
        got = f"more than {capacity} output voxels, which is the capacity"
        raise error("SL211", where="sparse3d::out_coords_bounded", got=got)
    padded = torch.nn.functional.pad(reached, (0, 0, 0, capacity - m), value=-1)
    return padded, torch.full((1,), m, dtype=torch.int32, device=coords.device)


cpu.bind(out_coords_bounded, cpu.OUT_COORDS_SPACE)
