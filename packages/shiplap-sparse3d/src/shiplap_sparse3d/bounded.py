"""Ops of the capacity form: a size that depends on data, padded to one that does not, for graphs that are replayed.

On a GPU ``out_coords`` runs ``first_voxels`` and reads the number of voxels, or it runs ``reached_keys``, reads the
number and runs ``voxels_of_keys``.
"""

from __future__ import annotations

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

import shiplap as sl
from shiplap.plugin_api import error
from shiplap_sparse3d import cpu, ops
from shiplap_sparse3d.coords import NO_KEY, keys_of, output_shape

__all__ = ["NO_KEY", "first_voxels", "out_coords_bounded", "reached_keys", "voxels_of_keys"]


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
    """Return the output voxels of a strided convolution in ``capacity`` rows, and their number.

    The voxels are those of the op ``out_coords``. Padding (-1, -1, -1, -1) follows them, so no size depends on data.
    Raise ``SL211`` as ``out_coords`` does, and if there are more than ``capacity`` voxels.
    """
    reached = ops.out_coords.reference(coords, spatial_shape, kernel, stride, padding, dilation)
    m = reached.shape[0]
    if m > capacity:
        # The exact number would be wrong on a GPU, which stops counting beyond the capacity.
        got = f"more than {capacity} output voxels, which is the capacity"
        raise error("SL211", where="sparse3d::out_coords_bounded", got=got)
    padded = torch.nn.functional.pad(reached, (0, 0, 0, capacity - m), value=-1)
    return padded, torch.full((1,), m, dtype=torch.int32, device=coords.device)


cpu.bind_kernel(out_coords_bounded, cpu.OUT_COORDS_SPACE)


@sl.op(
    "sparse3d::reached_keys",
    outputs=("keys", "count"),
    requires=(*ops.WINDOW, "capacity >= 0"),
    unordered=("keys",),
)
def reached_keys(
    coords: Int32[Tensor, "n 4"],
    spatial_shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    capacity: int,
) -> tuple[Int64[Tensor, "capacity"], Int64[Tensor, "1"]]:
    """Return an int64 key for each output voxel of a strided convolution, in any order, and the number of keys. Unused
    places of the ``capacity`` hold ``NO_KEY``, the largest int64.

    A key is ``((b * X + x) * Y + y) * Z + z`` in the output grid ``[X, Y, Z]``. A count above ``capacity`` is a lower
    bound of the true number, and only some of the keys are then returned. Raise ``SL211`` as ``out_coords`` does.
    """
    reached = ops.out_coords.reference(coords, spatial_shape, kernel, stride, padding, dilation)
    keys = keys_of(reached, output_shape(spatial_shape, kernel, stride, padding, dilation))
    padded = keys.new_full((capacity,), NO_KEY)
    padded[: len(keys)] = keys[:capacity]
    return padded, torch.full((1,), len(keys), dtype=torch.int64, device=coords.device)


@sl.op(
    "sparse3d::first_voxels",
    outputs=("voxels", "count"),
    requires=(*ops.WINDOW, "capacity >= 0", "scenes >= 0"),
)
def first_voxels(
    coords: Int32[Tensor, "n 4"],
    spatial_shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    capacity: int,
    scenes: int,
) -> tuple[Int32[Tensor, "capacity 4"], Int64[Tensor, "1"]]:
    """Return the first ``capacity`` output voxels of a strided convolution in ascending order, and the number of all.
    Padding (-1, -1, -1, -1) follows them.

    ``scenes`` is the number of scenes for which the bitmap of the output grid has room. If a voxel lies in a later
    scene, the count is -1 and no voxels are returned. If ``scenes`` is 0 there is no bitmap, which suits few voxels. A
    count above ``capacity`` is then a lower bound, and the voxels are some of all. Raise ``SL211`` as ``out_coords``
    does.
    """
    reached = ops.out_coords.reference(coords, spatial_shape, kernel, stride, padding, dilation)
    # The kernel's bitmap has no room for such a scene, so the caller has to take another way.
    beyond = scenes > 0 and bool((coords[:, 0] >= scenes).any())
    first = reached[: 0 if beyond else capacity]
    padded = torch.nn.functional.pad(first, (0, 0, 0, capacity - len(first)), value=-1)
    return padded, torch.full((1,), -1 if beyond else len(reached), dtype=torch.int64, device=coords.device)


@sl.op("sparse3d::voxels_of_keys", requires=("len(grid) == 3", "min(grid) >= 1"))
def voxels_of_keys(keys: Int64[Tensor, "m"], grid: list[int]) -> Int32[Tensor, "m 4"]:
    """Return the voxels (scene, x, y, z) of ``keys`` in ascending order. A key is the number of a cell among all scenes
    of the output ``grid``. Keys of ``NO_KEY``, the largest int64, become padding (-1), which comes last.

    The number of the cell (scene, x, y, z) is ``((scene * X + x) * Y + y) * Z + z`` in the grid ``[X, Y, Z]``.
    """
    keys = keys.sort()[0]
    line, z = keys // grid[2], keys % grid[2]
    plane, y = line // grid[1], line % grid[1]
    voxels = torch.stack([plane // grid[0], plane % grid[0], y, z], 1)
    return torch.where((keys == NO_KEY)[:, None], -1, voxels).int()
