"""Conversions from points to voxels and back, as in ``spconv.pytorch.utils``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shiplap.plugin_api import error

__all__ = ["PointToVoxel", "gather_features_by_pc_voxel_id"]


class PointToVoxel:
    """A converter of points within a range to voxels. Each voxel holds the first points that fall into it.

    Args:
        vsize_xyz: edge of a voxel per axis, in the unit of the points.
        coors_range_xyz: lower corner, then upper corner.
        num_point_features: columns of a point. The first ones are x, y, z.
        max_num_voxels: voxels kept, by the order in which points reach them.
        max_num_points_per_voxel: points kept in each.
        device: where the points are.

    Attributes:
        grid_size: cells per axis in the order z, y, x, which is the order of the indices.
    """

    def __init__(
        self,
        vsize_xyz: Sequence[float],
        coors_range_xyz: Sequence[float],
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Compute the grid from the edges of a voxel and the range of coordinates. They are given in the order x, y, z
        and kept reversed.

        Raise ``SL208`` unless there are two bounds per axis.
        """
        self.ndim = len(vsize_xyz)
        if len(coors_range_xyz) != 2 * self.ndim:
            raise error(
                "SL208",
                where="PointToVoxel",
                got=f"{len(coors_range_xyz)} bounds, {self.ndim} edges",
                expected="a lower and an upper bound per axis",
            )
        self.num_point_features, self.device = num_point_features, torch.device(device)
        self.max_num_voxels, self.max_num_points_per_voxel = max_num_voxels, max_num_points_per_voxel
        lower, upper = coors_range_xyz[: self.ndim], coors_range_xyz[self.ndim :]
        # spconv's indices are in the order z, y, x.
        self.vsize = list(reversed(vsize_xyz))
        self.coors_range = [*reversed(lower), *reversed(upper)]
        self.grid_size = [
            # Rounded, since the quotient of floats may fall just below a whole number.
            int((high - low) / edge + 0.5)
            for low, high, edge in zip(reversed(lower), reversed(upper), self.vsize, strict=True)
        ]

    def __call__(
        self, pc: Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first three results of :meth:`generate_voxel_with_id`, without the voxel of each point. The
        arguments are those of that method.
        """
        return self.generate_voxel_with_id(pc, clear_voxels, empty_mean)[:3]

    @torch.no_grad()
    def generate_voxel_with_id(
        self, pc: Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the voxels of the points ``pc [n, num_point_features]``, their cells, the number of points in each
        voxel, and the voxel of each point. Raise ``SL208`` if the points have another shape or lie on another kind of
        device.

        Args:
            pc: points. Those outside the range are left out.
            clear_voxels: accepted without effect, since results are fresh tensors.
            empty_mean: whether unused rows of a voxel hold the mean of its points instead of zeros.

        Returns:
            ``voxels [m, max_num_points_per_voxel, num_point_features]`` float32, ``indices int32 [m, ndim]`` (z, y, x),
            ``num_per_voxel int32 [m]``, and ``pc_voxel_id int64 [n]``. The last is -1 for a point without a voxel.
            Voxels come in the order of their first points.
        """
        if pc.ndim != 2 or pc.shape[1] != self.num_point_features or pc.device.type != self.device.type:
            raise error(
                "SL208",
                where="PointToVoxel",
                got=f"points {tuple(pc.shape)} on {pc.device}",
                expected=f"[n, {self.num_point_features}] on {self.device}",
            )
        cells, number = self._cells_of_points(pc)
        voxel, indices = self._number_voxels(cells, number)
        rank = _rank_in_group(voxel, indices.shape[0])
        kept = (voxel >= 0) & (rank < self.max_num_points_per_voxel)
        voxels = pc.new_zeros(indices.shape[0], self.max_num_points_per_voxel, pc.shape[1], dtype=torch.float32)
        # Voxel and rank are a distinct place for each point, so no write depends on another.
        voxels[voxel[kept], rank[kept]] = pc[kept].float()
        counts = torch.bincount(voxel[kept], minlength=indices.shape[0])
        if empty_mean:
            mean = voxels.sum(1) / counts[:, None]
            free = torch.arange(voxels.shape[1], device=pc.device) >= counts[:, None]
            voxels = torch.where(free[..., None], mean[:, None], voxels)
        return voxels, indices, counts.int(), voxel

    def _cells_of_points(self, pc: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cell ``int64 [n, ndim]`` (z, y, x) of each point, and the number of that cell in the grid, ``int64
        [n]``. The number is -1 for a point outside the range.
        """
        position = pc[:, : self.ndim].flip(1)
        low, edge = pc.new_tensor(self.coors_range[: self.ndim]), pc.new_tensor(self.vsize)
        cells = torch.floor((position - low) / edge)
        inside = ((cells >= 0) & (cells < pc.new_tensor(self.grid_size))).all(1)  # a NaN is outside
        cells = torch.where(inside[:, None], cells, 0).long()
        number = torch.zeros_like(cells[:, 0])
        for axis, size in enumerate(self.grid_size):
            number = number * size + cells[:, axis]
        return cells, torch.where(inside, number, -1)

    def _number_voxels(self, cells: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        """Return the voxel of each point, ``int64 [n]``, or -1 if it has none, and the cell of each voxel, ``int32 [m,
        ndim]``. ``cells`` and ``number`` are the results of :meth:`_cells_of_points`. Voxels are numbered in the order
        of their first points, up to ``max_num_voxels``.
        """
        distinct, group = torch.unique(number, return_inverse=True)
        first = torch.full_like(distinct, number.shape[0])
        first.scatter_reduce_(0, group, torch.arange(number.shape[0], device=number.device), "amin")
        first = torch.where(distinct >= 0, first, number.shape[0])  # points without a cell come last
        order = first.argsort()
        voxels = min(int((distinct >= 0).sum()), self.max_num_voxels)
        place = torch.full_like(distinct, -1)
        place[order[:voxels]] = torch.arange(voxels, device=number.device)
        return place[group], cells[first[order[:voxels]]].int()


def _rank_in_group(group: Tensor, groups: int) -> Tensor:
    """Return, for each element, how many elements before it have the same number in ``group [n]``, as ``int64 [n]``.
    The numbers in ``group`` are from -1 to ``groups - 1``.
    """
    order = group.argsort(stable=True)
    # Elements without a group, -1, are counted in front.
    sizes = torch.bincount(group + 1, minlength=groups + 1)
    start = (sizes.cumsum(0) - sizes)[group[order] + 1]
    rank = torch.empty_like(group)
    rank[order] = torch.arange(group.shape[0], device=group.device) - start
    return rank


def gather_features_by_pc_voxel_id(
    seg_res_features: Tensor, pc_voxel_id: Tensor, invalid_value: int | float = 0
) -> Tensor:
    """Return the features of each point, ``[n, ...]``, which are those of its voxel. ``pc_voxel_id [n]`` holds the row
    of each point's voxel in ``seg_res_features [m, ...]``, or -1. A point with -1 gets ``invalid_value``.
    """
    ids = pc_voxel_id.to(seg_res_features.device).long()
    # Without a voxel there is no row to read.
    if seg_res_features.shape[0] == 0:
        return seg_res_features.new_full((ids.shape[0], *seg_res_features.shape[1:]), invalid_value)
    valid = (ids >= 0).reshape(-1, *[1] * (seg_res_features.ndim - 1))
    return torch.where(valid, seg_res_features[ids.clamp_min(0)], invalid_value)
