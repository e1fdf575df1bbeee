"""``spconv.utils``: points to voxels on arrays, overlaps of boxes, and the generators of spconv 1.x."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np

from shiplap.plugin_api import error
from shiplap_sparse3d.spconv.tensorview import Tensor, to_torch
from shiplap_sparse3d.spconv.utils import PointToVoxel
from shiplap_sparse3d.spconv_package.boxes import (
    non_max_suppression,
    non_max_suppression_cpu,
    rbbox_intersection,
    rbbox_iou,
    rbbox_iou_loss,
    rotate_non_max_suppression_cpu,
)
from shiplap_sparse3d.spconv_package.cppconstants import CPU_ONLY_BUILD

__all__ = [
    "CPU_ONLY_BUILD",
    "Point2VoxelCPU1d",
    "Point2VoxelCPU2d",
    "Point2VoxelCPU3d",
    "Point2VoxelCPU4d",
    "Point2VoxelGPU1d",
    "Point2VoxelGPU2d",
    "Point2VoxelGPU3d",
    "Point2VoxelGPU4d",
    "VoxelGenerator",
    "VoxelGeneratorV2",
    "non_max_suppression",
    "non_max_suppression_cpu",
    "nullcontext",
    "rbbox_intersection",
    "rbbox_iou",
    "rbbox_iou_loss",
    "rotate_non_max_suppression_cpu",
]

Array = np.ndarray[Any, Any]


class _Point2Voxel:
    """A converter of points to voxels, as :class:`PointToVoxel` is. It takes points as a tensorview, an array or a
    tensor.

    Args:
        vsize_xyz, coors_range_xyz, num_point_features, max_num_voxels, max_num_points_per_voxel: as in that class.

    Attributes: ``grid_size``, in the order z, y, x.
    """

    NDIM: ClassVar[int]
    DEVICE: ClassVar[str] = "cpu"

    def __init__(
        self,
        vsize_xyz: Sequence[float],
        coors_range_xyz: Sequence[float],
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
    ) -> None:
        """Create the voxelisation for the number of axes of the class. Raise ``SL208`` if ``vsize_xyz`` has another
        number of edges.
        """
        if len(vsize_xyz) != self.NDIM:
            where = type(self).__name__
            raise error("SL208", where=where, got=f"{len(vsize_xyz)} edges", expected=f"{self.NDIM}")
        arguments = num_point_features, max_num_voxels, max_num_points_per_voxel
        self._voxels = PointToVoxel(vsize_xyz, coors_range_xyz, *arguments, self.DEVICE)
        self.grid_size = self._voxels.grid_size

    def point_to_voxel(self, points: Any, clear_voxels: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return the voxels of ``points [n, features]`` as tensorviews. They are ``voxels [m, points, features]``,
        ``indices [m, ndim]`` (z, y, x) and ``num_per_voxel [m]``. ``clear_voxels`` is not read.
        """
        return self._run(points, False)

    def point_to_voxel_empty_mean(self, points: Any, clear_voxels: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return the voxels of ``points`` as :meth:`point_to_voxel` does. The unused rows of a voxel that has fewer
        points than it can hold contain the mean of its points instead of zeros. ``clear_voxels`` is not read.
        """
        return self._run(points, True)

    def point_to_voxel_hash(
        self, points: Any, clear_voxels: bool = True, empty_mean: bool = False, stream: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the voxels of ``points`` as :meth:`point_to_voxel` does, or as :meth:`point_to_voxel_empty_mean` if
        ``empty_mean`` is true. spconv's classes for GPUs have the method under this name. ``clear_voxels`` and
        ``stream`` are not read.
        """
        return self._run(points, empty_mean)

    def _run(self, points: Any, empty_mean: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return the voxels, the indices and the numbers of points of the voxels as tensorviews. If ``empty_mean`` is
        true, the unused rows of a voxel hold the mean of its points, and otherwise zeros.
        """
        voxels, indices, counts = self._voxels(to_torch(points), empty_mean=empty_mean)
        return Tensor(voxels), Tensor(indices), Tensor(counts)


class Point2VoxelCPU1d(_Point2Voxel):
    """A converter of points with one spatial axis to voxels, on the CPU. It has the arguments of
    :class:`PointToVoxel`.
    """

    NDIM = 1


class Point2VoxelCPU2d(_Point2Voxel):
    """A converter of points with two spatial axes to voxels, on the CPU. It has the arguments of
    :class:`PointToVoxel`.
    """

    NDIM = 2


class Point2VoxelCPU3d(_Point2Voxel):
    """A converter of points with three spatial axes to voxels, on the CPU. It has the arguments of
    :class:`PointToVoxel`.
    """

    NDIM = 3


class Point2VoxelCPU4d(_Point2Voxel):
    """A converter of points with four spatial axes to voxels, on the CPU. It has the arguments of
    :class:`PointToVoxel`.
    """

    NDIM = 4


class Point2VoxelGPU1d(Point2VoxelCPU1d):
    """A converter of points with one spatial axis to voxels, on the current GPU. The arguments are those of
    :class:`PointToVoxel`.
    """

    DEVICE = "cuda"


class Point2VoxelGPU2d(Point2VoxelCPU2d):
    """A converter of points with two spatial axes to voxels, on the current GPU. The arguments are those of
    :class:`PointToVoxel`.
    """

    DEVICE = "cuda"


class Point2VoxelGPU3d(Point2VoxelCPU3d):
    """A converter of points with three spatial axes to voxels, on the current GPU. The arguments are those of
    :class:`PointToVoxel`.
    """

    DEVICE = "cuda"


class Point2VoxelGPU4d(Point2VoxelCPU4d):
    """A converter of points with four spatial axes to voxels, on the current GPU. The arguments are those of
    :class:`PointToVoxel`.
    """

    DEVICE = "cuda"


class VoxelGenerator:
    """The voxel generator of spconv 1.x, which takes points as an array and returns arrays.

    Args:
        voxel_size: edge of a voxel per axis.
        point_cloud_range: lower corner, then upper corner.
        max_num_points: points kept in a voxel.
        max_voxels: voxels kept.
        full_mean: whether unused rows of a voxel hold the mean of its points instead of zeros.
    """

    def __init__(
        self,
        voxel_size: Sequence[float],
        point_cloud_range: Sequence[float],
        max_num_points: int,
        max_voxels: int = 20000,
        full_mean: bool = False,
    ) -> None:
        """Compute the grid from the edges of a voxel and the range, whose lower bounds (x, y, z) come first. If
        ``full_mean`` is true, unused rows of a voxel hold the mean of its points, and otherwise zeros.
        """
        self.voxel_size = np.array(voxel_size, np.float32)
        self.point_cloud_range = np.array(point_cloud_range, np.float32)
        extent = (self.point_cloud_range[3:] - self.point_cloud_range[:3]) / self.voxel_size
        # Rounded, since the quotient of floats may fall just below a whole number.
        self.grid_size = np.round(extent).astype(np.int64)  # in the order x, y, z
        self.max_num_points_per_voxel, self._max_voxels, self._full_mean = max_num_points, max_voxels, full_mean

    def _generate(self, points: Array, max_voxels: int | None) -> tuple[Array, Array, Array]:
        """Return ``voxels [m, max_num_points, features]``, ``coordinates [m, 3]`` (z, y, x) and the number of points of
        each voxel, ``[m]``, as arrays. At most ``max_voxels`` voxels are returned. If it is None, the limit from the
        constructor applies.
        """
        most = self._max_voxels if max_voxels is None else max_voxels
        ranges = [float(v) for v in self.point_cloud_range]
        edges, kept = [float(v) for v in self.voxel_size], self.max_num_points_per_voxel
        voxels = PointToVoxel(edges, ranges, points.shape[1], most, kept)
        outputs = voxels(to_torch(points), empty_mean=self._full_mean)
        features, coordinates, counts = (t.numpy() for t in outputs)
        # spconv 1.x returns voxels in the dtype of the points.
        return features.astype(points.dtype), coordinates, counts

    def generate(self, points: Array, max_voxels: int | None = None) -> Any:
        """Return ``voxels [m, max_num_points, features]``, ``coordinates [m, 3]`` (z, y, x) and ``num_points_per_voxel
        [m]`` of ``points [n, features]``, as a tuple of arrays. At most ``max_voxels`` voxels are returned. If it is
        None, the limit from the constructor applies.
        """
        return self._generate(points, max_voxels)


class VoxelGeneratorV2(VoxelGenerator):
    """A :class:`VoxelGenerator` that returns a dictionary. It has no block filtering."""

    def __init__(
        self,
        voxel_size: Sequence[float],
        point_cloud_range: Sequence[float],
        max_num_points: int,
        max_voxels: int = 20000,
        full_mean: bool = False,
        block_filtering: bool = False,
        block_factor: int = 8,
        block_size: int = 3,
        height_threshold: float = 0.1,
    ) -> None:
        """Create the generator. If ``full_mean`` is true, unused rows of a voxel hold the mean of its points, and
        otherwise zeros. Raise ``SL208`` if ``block_filtering`` is true, since this package does not have it. The
        arguments after it are not read.
        """
        if block_filtering:
            raise error("SL208", where="VoxelGeneratorV2", got="block_filtering=True", expected="False")
        super().__init__(voxel_size, point_cloud_range, max_num_points, max_voxels, full_mean)

    def generate(self, points: Array, max_voxels: int | None = None) -> dict[str, Array]:
        """Return a dictionary of arrays with the voxels of ``points [n, features]``.

        Its keys are ``voxels [m, max_num_points, features]``, ``coordinates [m, 3]`` (z, y, x), ``num_points_per_voxel
        [m]``, ``voxel_point_mask [m, max_num_points, 1]`` and ``voxel_num``. The mask is 1 in the rows that hold a
        point, and 0 in the unused ones. ``voxel_num`` is ``m``. At most ``max_voxels`` voxels are returned. If it is
        None, the limit from the constructor applies.
        """
        voxels, coordinates, counts = self._generate(points, max_voxels)
        # 1 where a voxel has a point, 0 in its free places.
        mask = np.arange(self.max_num_points_per_voxel) < counts[:, None]
        return {
            "voxels": voxels,
            "coordinates": coordinates,
            "num_points_per_voxel": counts,
            "voxel_point_mask": mask[..., None].astype(points.dtype),
            "voxel_num": np.array(len(voxels)),
        }
