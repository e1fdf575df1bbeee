"""``SparseTensor``: features on the active voxels of a geometry; and how points and dense volumes become one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d import ops
from shiplap_sparse3d.arithmetic import Arithmetic
from shiplap_sparse3d.axes import Axes, per_axis
from shiplap_sparse3d.coords import (
    as_many_rows,
    assert_inside,
    check_coords,
    check_rows,
    check_scenes,
    keys_of,
    require,
    require_tensor,
)
from shiplap_sparse3d.geometry import Geometry, Strided
from shiplap_sparse3d.memory import available_bytes
from shiplap_sparse3d.reentrant import made_inside
from shiplap_sparse3d.rows import cells_in_use, rows_where

__all__ = ["Geometry", "SparseTensor", "Strided", "voxelize"]


class SparseTensor(Arithmetic):
    """Features on active voxels.

    Args:
        feats: the features, ``[n, c]``.
        coords: ``int32 [n, 1 + d]``, rows of a batch index and ``d`` coordinates (1 to 4 axes). They must be distinct
            and inside the grid, which is checked when a table is built.
        spatial_shape: cells per axis, ``d`` of them. If it is None, there are as many as the coordinates need, or there
            is no grid if one is negative. For this the host waits for a GPU. In a graph it must be given.
        batch_size: the number of scenes. Every batch index is below it. The default is 1 if ``spatial_shape`` is given,
            and otherwise the number of scenes in the coordinates.
        padded: whether rows may be padding (batch index -1), as :meth:`pad` makes them.
        geometry: the voxels of another tensor, used in place of the four arguments above.

    Raises:
        ArgumentError: ``SL202`` if ``feats`` has another number of rows than the voxels.
    """

    spelled = "x.replace", "x.feats", "sparse3d.Sequential"

    def __init__(
        self,
        feats: Tensor,
        coords: Tensor | None = None,
        spatial_shape: int | Sequence[int] | None = None,
        batch_size: int | None = None,
        *,
        padded: bool = False,
        geometry: Geometry | None = None,
    ) -> None:
        """Create the tensor on new voxels (``coords`` with their grid and number of scenes), or on those of
        ``geometry``. Raise ``SL201``, ``SL202``, ``SL204``, ``SL208`` or ``SL209`` for arguments that do not fit each
        other.
        """
        require_tensor("SparseTensor, argument 'feats'", feats)
        given: Any = feats
        if isinstance(given, SparseTensor):
            where, fix = "SparseTensor, argument 'feats'", "pass its features, x.feats"
            raise error("SL209", where=where, got="a SparseTensor", expected="a torch.Tensor", fix=fix)
        if geometry is None:
            if coords is None:
                raise error("SL209", where="SparseTensor", got="no coords", expected="coords or geometry")
            require_tensor("SparseTensor, argument 'coords'", coords)
            coords, feats = as_many_rows(coords, feats)
            if spatial_shape is None:
                spatial_shape, batch_size = _grid_of(coords, batch_size)
            _check_columns(coords, spatial_shape)
            geometry = Geometry(coords, spatial_shape, 1 if batch_size is None else batch_size, padded=padded)
        if feats.dim() != 2:
            raise error("SL201", where="SparseTensor, argument 'feats'", got=f"{feats.dim()} dims", expected="[n, c]")
        check_rows("SparseTensor", feats, geometry.coords.shape[0])
        self.feats, self.geometry = feats, geometry
        self.checkpointed = made_inside()  # a reentrant checkpoint would lose the gradient of what leaves it

    @classmethod
    def from_dense(cls, dense: Tensor) -> SparseTensor:
        """Return the sparse tensor of the cells of ``dense [b, c, *spatial]`` in which any channel is not zero, in
        ascending order. Their number depends on the data, so the host waits for a GPU.
        """
        require_tensor("SparseTensor.from_dense", dense)
        coords, feats = cells_in_use(dense.movedim(1, -1))
        return cls(feats, coords, dense.shape[2:], dense.shape[0])

    @property
    def coords(self) -> Tensor:
        """The scene of each voxel and its cell on ``d`` axes, ``int32 [n, 1 + d]``. Rows of padding are -1."""
        lead = 3 - self.geometry.ndim
        coords = self.geometry.coords
        return torch.cat([coords[:, :1], coords[:, 1 + lead :]], 1) if lead > 0 else coords

    @property
    def spatial_shape(self) -> tuple[int, ...]:
        """The number of cells along each spatial axis."""
        return self.geometry.spatial_shape[-self.geometry.ndim :]

    @property
    def batch_size(self) -> int:
        """The number of scenes, the samples of the batch."""
        return self.geometry.batch_size

    def replace(self, feats: Tensor) -> SparseTensor:
        """Return a sparse tensor with the features ``feats [n, c]`` on these voxels, with the same neighbour tables."""
        return SparseTensor(feats, geometry=self.geometry)

    def to(self, *args: Any, **options: Any) -> SparseTensor:
        """Return this tensor with features of another dtype, on another device (then without tables), or both. The
        arguments are those of ``Tensor.to``, and a sparse tensor among them stands for its features.
        """
        args = tuple(value.feats if isinstance(value, SparseTensor) else value for value in args)
        feats = self.feats.to(*args, **options)
        moved = self.geometry if feats.device == self.geometry.coords.device else self.geometry.to(feats.device)
        return SparseTensor(feats, geometry=moved)

    @property
    def tensor_stride(self) -> tuple[int | Fraction, ...]:
        """The number of cells of the input grid, on which the first layer ran, that a cell of this grid spans on each
        axis. It is the product of the strides of the layers in between. After transposed convolutions it may be a
        fraction.
        """
        spans, geometry = [Fraction(1)] * len(self.geometry.spatial_shape), self.geometry
        while (origin := geometry.parent) is not None:
            up = origin.window.output_padding is not None
            spans = [s / step if up else s * step for s, step in zip(spans, origin.window.stride, strict=True)]
            geometry = origin.geometry
        return tuple(int(s) if s.denominator == 1 else s for s in spans[-self.geometry.ndim :])

    @property
    def decomposed_features(self) -> list[Tensor]:
        """The features of each scene, a list of ``[n_i, c]``."""
        scene = self.geometry.coords[:, 0]
        return [self.feats.index_select(0, rows_where(scene == b)) for b in range(self.batch_size)]

    def dense(self) -> Tensor:
        """Return the features as a strided tensor ``[batch_size, c, *spatial_shape]``, with zeros where no voxel is.

        Raises:
            ArgumentError: ``SL208`` for more cells than an int64 counts or memory holds. On the CPU, ``SL211`` for
                voxels outside the grid or the batch, and, except in a graph, for duplicates.
        """
        coords, grid = self.geometry.coords, self.geometry.spatial_shape
        cells = self.batch_size
        for size in grid:
            cells = cells * size
        if not torch.compiler.is_compiling() and cells >= 1 << 63:
            raise error("SL208", where="SparseTensor.dense", got=f"{cells} cells", expected="fewer than 2**63")
        if torch.compiler.is_compiling():
            assert_inside(coords, self.batch_size, grid)
        elif coords.device.type == "cpu":
            check_scenes("dense", coords, self.batch_size)
            check_coords("dense", coords, grid)
        cell = torch.where(coords[:, 0] < 0, cells, keys_of(coords, grid))  # padding has a cell, dropped here
        out = self._zeros(cells + 1).index_put((cell,), self.feats)[:cells]
        return out.view(self.batch_size, *self.spatial_shape, self.feats.shape[1]).movedim(-1, 1)

    def _zeros(self, cells: int) -> Tensor:
        """Return zeros ``[cells, c]``. Raise ``SL208`` if the device lacks the memory for them and one copy."""
        channels = self.feats.shape[1]
        if torch.compiler.is_compiling():
            return self.feats.new_zeros(cells, channels)
        needed = 2 * cells * channels * self.feats.itemsize  # writing the features copies the zeros
        free = available_bytes(self.device) if needed >= _LARGE else None
        wrong: Exception | None = None
        if free is None or needed <= free:
            try:
                return self.feats.new_zeros(cells, channels)
            except RuntimeError as failed:  # torch.OutOfMemoryError is one
                wrong = failed
        got = f"{cells} cells of {channels} channels, {needed} bytes"
        expected = f"a grid that fits in the memory of {self.device}"
        expected += "" if free is None else f", of which {free} bytes are free"
        raise error("SL208", where="SparseTensor.dense", got=got, expected=expected) from wrong

    # --- capacity form ------------------------------------------------------------------------------------------------

    def pad(self, capacity: int) -> SparseTensor:
        """Return the voxels in ``capacity`` rows. The last rows are padding (-1), which stays padding in every layer.

        All sizes are then fixed, whatever the data, so one graph to export or to capture serves all scenes. Features of
        padding rows mean nothing. ``dense``, pooling, batch norm, indexing and every table leave them out.

        Raises:
            ArgumentError: ``SL208`` if there are more rows than ``capacity``.
        """
        n = self.feats.shape[0]
        (capacity,) = per_axis(capacity, "SparseTensor.pad, argument 'capacity'", 1, 0)
        if n > capacity:
            raise error(
                "SL208",
                where="SparseTensor.pad",
                got=f"{n} rows, capacity {capacity}",
                expected="a capacity that holds all rows",
            )
        coords = torch.nn.functional.pad(self.coords, (0, 0, 0, capacity - n), value=-1)
        feats = torch.nn.functional.pad(self.feats, (0, 0, 0, capacity - n))
        return self._with_voxels(feats, coords, self.batch_size, padded=True)

    @property
    def is_voxel(self) -> Tensor:
        """The mask ``bool [n, 1]`` that is True for voxels and False for rows of padding."""
        return self.geometry.is_voxel

    # --- arithmetic and selection -------------------------------------------------------------------------------------

    def check_same(self, other: Arithmetic, where: str) -> None:
        """Raise ``SL202`` unless ``other`` has the same tensor of coordinates and an equal grid. Otherwise rows with
        the same number would belong to different voxels. ``where`` names the operation in the error.
        """
        if not (isinstance(other, SparseTensor) and self.geometry.same(other.geometry)):
            raise error(
                "SL202",
                where=f"SparseTensor {where} SparseTensor",
                got=f"{self} and {other}, each on voxels of its own",
                expected="tensors on the same voxels",
                fix="combine tensors of one geometry, as a skip connection and its inverse convolution are, "
                "or call sparse3d.union",
            )

    def check_statistics(self) -> None:
        """Raise ``SL208`` if rows may be padding, which a batch norm of torch would include in its statistics."""
        if self.geometry.padded:
            raise error(
                "SL208",
                where="torch.nn.functional.batch_norm",
                got="rows of padding",
                expected="statistics of voxels",
                fix="use sparse3d.BatchNorm",
            )

    def __getitem__(self, chosen: int | slice | Tensor | SparseTensor) -> SparseTensor:
        """Return scenes or voxels. ``x[b]`` and ``x[start:stop]`` are those scenes, counted from 0 again. ``x[mask]``
        has the voxels of a bool mask. Raise ``SL209``, ``SL204``, ``SL202`` or ``SL208`` for anything else.

        A mask is ``bool [n]`` or ``[n, 1]``, a tensor or a ``SparseTensor`` on these voxels, such as ``x > 0`` of one
        channel. The number of rows depends on the data, so the host waits for a GPU. A padded tensor keeps all of its
        rows, and rows that are not chosen become padding.
        """
        if isinstance(chosen, SparseTensor):
            self.check_same(chosen, "[...] of a")
            chosen = chosen.feats
        if not isinstance(chosen, (int, slice, Tensor)) or isinstance(chosen, bool):
            fix = "pass a bool mask of the voxels, an int or a slice of scenes"
            raise error("SL209", where="SparseTensor[...]", got=repr(chosen), expected="a mask or scenes", fix=fix)
        return self._select_by_mask(chosen) if isinstance(chosen, Tensor) else self._select_scenes(chosen)

    def _select_by_mask(self, mask: Tensor) -> SparseTensor:
        """Return the voxels where ``mask`` is true. Raise ``SL204`` unless it is ``bool``, and ``SL202`` unless it is
        ``[n]`` or ``[n, 1]``.
        """
        n, where = self.feats.shape[0], "SparseTensor[mask]"
        if mask.dtype != torch.bool:
            fix = "pass a bool mask of the voxels, an int or a slice of scenes"
            raise error("SL204", where=where, got=mask.dtype, expected="torch.bool", fix=fix)
        if mask.dim() not in (1, 2) or mask.shape[0] != n or (mask.dim() == 2 and mask.shape[1] != 1):
            raise error("SL202", where=where, got=f"a mask {tuple(mask.shape)}", expected=f"[{n}] or [{n}, 1]")
        return self._keep_rows(mask.flatten(), self.coords, self.batch_size)

    def _keep_rows(self, inside: Tensor, coords: Tensor, batch_size: int) -> SparseTensor:
        """Return the rows where ``inside`` is true, at ``coords [n, 1 + d]``. If padded, make the others padding."""
        feats, padded = self.feats, self.geometry.padded
        if padded:
            coords = torch.where(inside[:, None], coords, -1)
        else:
            rows = rows_where(inside)
            coords, feats = coords.index_select(0, rows), feats.index_select(0, rows)
        return self._with_voxels(feats, coords, batch_size, padded=padded)

    def _with_voxels(self, feats: Tensor, coords: Tensor, batch_size: int, *, padded: bool) -> SparseTensor:
        """Return a sparse tensor with ``feats`` on new voxels ``coords``, in the grid of this tensor if it has one."""
        coords, feats = as_many_rows(coords, feats)
        shape = self.spatial_shape if self.geometry.bounded else None
        return SparseTensor(feats, geometry=Geometry(coords, shape, batch_size, padded=padded))

    def _select_scenes(self, scenes: int | slice) -> SparseTensor:
        """Return the voxels of the chosen ``scenes``, which are numbered from 0 again. Raise ``SL208`` for a scene that
        does not exist and for a slice with another step than 1.
        """
        if isinstance(scenes, int) and not -self.batch_size <= scenes < self.batch_size:
            raise error("SL208", where="SparseTensor[...]", got=f"scene {scenes}", expected=f"below {self.batch_size}")
        chosen = range(self.batch_size)[scenes]
        chosen = range(chosen, chosen + 1) if isinstance(chosen, int) else chosen
        if chosen.step != 1:
            raise error("SL208", where="SparseTensor[...]", got=scenes, expected="an int, or a slice with step 1")
        coords = self.coords
        inside = (coords[:, 0] >= chosen.start) & (coords[:, 0] < chosen.stop)
        moved = torch.cat([coords[:, :1] - chosen.start, coords[:, 1:]], 1)
        return self._keep_rows(inside, moved, len(chosen))

    def __iter__(self) -> Iterator[SparseTensor]:
        """Return an iterator over the scenes, each a sparse tensor."""
        return (self[scene] for scene in range(self.batch_size))

    # --- what is asked of the features, as of a tensor ----------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of rows, voxels and padding together."""
        return self.feats.shape[0]

    @property
    def shape(self) -> torch.Size:
        """The shape of the features, ``[n, c]``."""
        return self.feats.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions of the features, 2. The voxels have ``geometry.ndim`` axes."""
        return 2

    def dim(self) -> int:
        """Return 2, the number of dimensions of the features."""
        return 2

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Return the shape of the features ``[n, c]`` if ``dim`` is None, and otherwise its element ``dim``."""
        return self.feats.shape if dim is None else self.feats.size(dim)

    @property
    def device(self) -> torch.device:
        """The device of the features."""
        return self.feats.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the features."""
        return self.feats.dtype

    @property
    def requires_grad(self) -> bool:
        """Whether gradients of the features are recorded."""
        return self.feats.requires_grad

    @property
    def is_cuda(self) -> bool:
        """Whether the features are on a GPU."""
        return self.feats.is_cuda

    @property
    def is_leaf(self) -> bool:
        """Whether the features are a leaf of autograd."""
        return self.feats.is_leaf

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the features, ``[n, c]``, or None."""
        return self.feats.grad

    @property
    def grad_fn(self) -> Any:
        """The autograd node that made the features, or None."""
        return self.feats.grad_fn

    def retain_grad(self) -> None:
        """Keep the gradient of the feature tensor after a backward pass, even if that tensor is not a leaf."""
        self.feats.retain_grad()

    def is_floating_point(self) -> bool:
        """Return whether the features are floating-point numbers."""
        return self.feats.is_floating_point()

    def numel(self) -> int:
        """Return the number of values of the features, ``n * c``."""
        return self.feats.numel()

    def contiguous(self) -> SparseTensor:
        """Return a sparse tensor with contiguous features on the same voxels."""
        return self.replace(self.feats.contiguous())

    def pin_memory(self) -> SparseTensor:
        """Return a copy with features and coordinates in pinned memory, without tables. Data loaders call this."""
        feats, coords = self.feats.pin_memory(), self.coords.pin_memory()
        return self._with_voxels(feats, coords, self.batch_size, padded=self.geometry.padded)

    def requires_grad_(self, requires_grad: bool = True) -> SparseTensor:
        """Set whether gradients of the features are recorded to ``requires_grad``. Return this tensor itself."""
        self.feats.requires_grad_(requires_grad)
        return self

    def detach(self) -> SparseTensor:
        """Return a sparse tensor with the detached features on the same voxels."""
        return self.replace(self.feats.detach())

    def clone(self) -> SparseTensor:
        """Return a sparse tensor with a copy of the features on the same voxels."""
        return self.replace(self.feats.clone())

    def half(self) -> SparseTensor:
        """Return the tensor with features of float16 on the same voxels."""
        return self.to(torch.float16)

    def bfloat16(self) -> SparseTensor:
        """Return the tensor with features of bfloat16 on the same voxels."""
        return self.to(torch.bfloat16)

    def float(self) -> SparseTensor:
        """Return the tensor with features of float32 on the same voxels."""
        return self.to(torch.float32)

    def double(self) -> SparseTensor:
        """Return the tensor with features of float64 on the same voxels."""
        return self.to(torch.float64)

    def type_as(self, other: Tensor | SparseTensor) -> SparseTensor:
        """Return the tensor with features of the dtype of ``other`` on the same voxels."""
        return self.to(other.dtype)

    def cpu(self) -> SparseTensor:
        """Return the tensor on the CPU. If it was elsewhere, it has no tables."""
        return self.to("cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False) -> SparseTensor:
        """Return the tensor on the GPU ``device``, by default the current one, without tables if it was elsewhere."""
        return self.to(
            "cuda" if device is None else torch.device("cuda", device) if type(device) is int else device,
            non_blocking=non_blocking,
        )

    def __repr__(self) -> str:
        """Return the number of voxels and channels, the grid and the number of scenes as text."""
        n, c = self.feats.shape
        kind = ", padded" if self.geometry.padded else ""
        return f"SparseTensor(n={n}, c={c}, spatial_shape={self.spatial_shape}, batch_size={self.batch_size}{kind})"


_LARGE = 1 << 28


def _grid_of(coords: Tensor, batch_size: int | None) -> tuple[tuple[int, ...] | None, int]:
    """Return ``(grid, scenes)``. ``grid`` is the smallest that contains ``coords``, or None if a cell is negative.
    ``scenes`` is ``batch_size`` or, if that is None, as large as ``coords`` need. Raise ``SL208`` in a graph, and
    ``SL201`` unless ``coords`` are integers ``[n, 1 + axes]``.
    """
    where = "SparseTensor, argument 'spatial_shape'"
    if torch.compiler.is_compiling():
        raise error("SL208", where=where, got="none, in a graph", expected="cells per axis: a graph does not read them")
    if coords.dim() != 2 or coords.shape[1] < 2 or coords.is_floating_point():
        raise error(
            "SL201",
            where="SparseTensor, argument 'coords'",
            got=f"{coords.dtype} {tuple(coords.shape)}",
            expected="int32 [n, 1 + axes]",
        )
    scenes, *cells = (coords.amax(0) + 1).tolist() if coords.shape[0] else [1] * coords.shape[1]
    scenes = max(1, scenes) if batch_size is None else batch_size
    negative = bool(((coords[:, 1:] < 0) & (coords[:, :1] != -1)).any())  # padding is no voxel
    return (None if negative else tuple(max(1, size) for size in cells)), scenes


def _check_columns(coords: Tensor, spatial_shape: Any) -> None:
    """Raise ``SL208`` unless ``coords`` has a column for the scene and one for each axis of ``spatial_shape``. If that
    is one number for all axes, nothing is checked.
    """
    axes = len(spatial_shape) if hasattr(spatial_shape, "__len__") else None
    if axes is not None and coords.dim() == 2 and coords.shape[1] != axes + 1:
        raise error(
            "SL208",
            where="SparseTensor",
            got=f"coords of {coords.shape[1]} columns, spatial_shape of {axes} axes",
            expected="a column of batch indices, and one for each axis",
            fix="put the batch index in front of the cells, as sparse3d.collate does",
        )


def voxelize(
    points: Tensor,
    feats: Tensor,
    size: float | Sequence[float],
    *,
    batch: Tensor | None = None,
    origin: Sequence[float] | None = None,
    spatial_shape: Axes | None = None,
    batch_size: int | None = None,
) -> tuple[SparseTensor, Tensor]:
    """Return the voxels that contain ``points``, with the means of the points' features, and the voxel of each point.

    Args:
        points: ``[p, 3]``, positions in the unit of ``size``. Integers and 16-bit numbers are first widened.
        feats: the features of the points, ``[p, c]``.
        size: the edge of a voxel, one number or one per axis.
        batch: integers ``[p]``, the scene of each point. By default there is one scene.
        origin: the corner of the grid. The default is the minimum of the points.
        spatial_shape, batch_size: cells per axis, and the number of scenes. The default is as large as the points need,
            for which the host waits for the device. In a graph they must be given.

    Returns:
        ``(voxels, inverse)`` with ``inverse int32 [p]``. Voxels are in ascending (batch, x, y, z) order.

    Raises:
        ArgumentError: ``SL211`` for points that are below ``origin``, beyond ``spatial_shape`` or not finite, and for
            scenes outside ``[0, batch_size)``. ``SL201`` to ``SL208`` for arguments that do not fit each other.
    """
    require_tensor("sparse3d.voxelize, argument 'points'", points)
    if points.dim() != 2 or points.shape[1] != 3:
        raise error(
            "SL201", where="sparse3d.voxelize, argument 'points'", got=f"shape {tuple(points.shape)}", expected="[p, 3]"
        )
    wide = torch.promote_types(points.dtype, torch.float32) if points.is_floating_point() else torch.float64
    place, shape = points.to(wide), None if spatial_shape is None else per_axis(spatial_shape, "spatial_shape")
    edge, corner = (
        _vector_of_axes("size", size, place),
        _vector_of_axes("origin", 0.0 if origin is None else origin, place),
    )
    if origin is None and points.shape[0]:
        corner = place.amin(0)
    where = "sparse3d.voxelize, argument 'size'"
    require((edge > 0).all(), f"SL208: {where}", lambda: error("SL208", where=where, got=size, expected="more than 0"))
    cells = torch.floor((place - corner) / edge)
    _check_cells(points, cells, shape)
    scene = _scene_of_points(batch, batch_size, points)
    coords, inverse, counts = ops.distinct_voxels(torch.cat([scene[:, None], cells.int()], 1))
    if shape is None:
        shape = per_axis((coords[:, 1:].amax(0) + 1).tolist() if coords.shape[0] else 1, "spatial_shape")
    if batch_size is None:
        batch_size = 1 if batch is None or not coords.shape[0] else int(coords[:, 0].max()) + 1
    return SparseTensor(ops.segment_mean(feats, inverse, counts), coords, shape, batch_size), inverse


def _vector_of_axes(name: str, value: float | Sequence[float] | Tensor, like: Tensor) -> Tensor:
    """Return ``value``, one number or three, as ``[3]`` in the dtype of ``like``. Raise ``SL208`` for other counts."""
    vector = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    if vector.shape not in ((), (1,), (3,)):
        raise error(
            "SL208", where=f"sparse3d.voxelize, argument {name!r}", got=value, expected="one number, or one per axis"
        )
    return vector.expand(3)


def _scene_of_points(batch: Tensor | None, batch_size: int | None, points: Tensor) -> Tensor:
    """Return the scene of each point, ``int32 [p]``. Without ``batch`` all are 0. Raise ``SL204`` or ``SL202`` unless
    ``batch`` is integers ``[p]``, and ``SL211`` for a scene outside ``[0, batch_size)``.
    """
    if batch is None:
        return torch.zeros(points.shape[0], dtype=torch.int32, device=points.device)
    where, limit = "sparse3d.voxelize, argument 'batch'", 2**31 if batch_size is None else batch_size
    if batch.is_floating_point():
        raise error("SL204", where=where, got=batch.dtype, expected="integers")
    if batch.shape != points.shape[:1]:
        raise error("SL202", where=where, got=f"shape {tuple(batch.shape)}", expected=f"[{points.shape[0]}], as points")
    outside = (batch < 0) | (batch >= limit)

    def refuse() -> Exception:
        """Return the error ``SL211`` for the first point where ``outside``, of the enclosing function, is true."""
        row = int(outside.nonzero()[0, 0])
        return error("SL211", where=where, got=f"point {row} in scene {int(batch[row])}", expected=f"0 to {limit - 1}")

    require(~outside.any(), f"SL211: {where}: a point is in no scene from 0 to {limit - 1}", refuse)
    return batch.int()


def _check_cells(points: Tensor, cells: Tensor, shape: Sequence[int] | None) -> None:
    """Raise ``SL211`` if one of ``cells [p, 3]``, those of ``points``, is outside the grid ``shape``. If ``shape`` is
    None, cells must be from 0 to 2^31 - 1.
    """
    limit = cells.new_tensor(shape) if shape is not None else cells.new_full((3,), 2.0**31)
    outside = ~((cells >= 0) & (cells < limit)).all(1)  # a NaN compares false, so it is outside

    def refuse() -> Exception:
        """Return the error ``SL211`` for the first point where ``outside``, of the enclosing function, is true."""
        row = int(outside.nonzero()[0, 0])
        return error(
            "SL211",
            where="sparse3d.voxelize",
            got=f"point {row} = {points[row].tolist()}, cell {cells[row].tolist()}",
            expected=f"cells from 0 to {[int(v) - 1 for v in limit.tolist()]}",
            fix="set origin and spatial_shape so that every point is inside, or drop the points that are not",
        )

    require(~outside.any(), f"SL211: sparse3d.voxelize: a point is outside of the grid {shape}", refuse)
