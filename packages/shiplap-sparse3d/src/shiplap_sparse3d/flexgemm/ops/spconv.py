"""``flex_gemm.ops.spconv``: the convolutions of FlexGEMM 1.x, and those of 2.0 that stand in its module of this name.

A neighbour cache is a :class:`~shiplap_sparse3d.Plan` with the window that it was made for, so one that was built
without gradients, or for another algorithm, serves training as well. ``freeze`` leaves tensors and integers, for
compiled code. ``sparse_conv3d`` is that of 1.x, unless it gets arguments that only 2.0 has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d import ops
from shiplap_sparse3d.axes import Triple, expand_axes
from shiplap_sparse3d.coords import check_rows, is_known_size, require_scenes
from shiplap_sparse3d.flexgemm.algorithms import (
    ALGORITHMS,
    DEFAULT,
    Algorithm,
    PlanCache,
    check_algorithm,
    explicit_gemm,
    flat_table,
)
from shiplap_sparse3d.flexgemm.kernels import cuda
from shiplap_sparse3d.flexgemm.kernels.triton import spconv as triton_spconv
from shiplap_sparse3d.flexgemm.ops import convolution
from shiplap_sparse3d.flexgemm.ops.convolution import (
    sparse_conv,
    sparse_conv2d,
    sparse_conv4d,
    sparse_conv_transpose,
    sparse_conv_transpose2d,
    sparse_conv_transpose3d,
    sparse_conv_transpose4d,
    submanifold_conv,
    submanifold_conv2d,
    submanifold_conv3d,
    submanifold_conv4d,
)
from shiplap_sparse3d.flexgemm.ops.neighbor_cache import NeighborCache
from shiplap_sparse3d.offsets import box_offsets, connect_by_offsets, offset_cells
from shiplap_sparse3d.plan import Plan
from shiplap_sparse3d.steps import StepWindow, connect_voxels, submanifold_plan

__all__ = [
    "ALGORITHM",
    "ALGORITHMS",
    "DEFAULT",
    "HASHMAP_RATIO",
    "OUT_COORD_ALGO",
    "OUT_COORD_HASHMAP_RATIO",
    "SERIALIZATION_MODE",
    "Algorithm",
    "SerializationMode",
    "SpConvConfig",
    "SparseConv3dFunction",
    "SparseConv3dNeighborCache",
    "SparseConv3dOutCoordAlgorithm",
    "SubMConv3dFunction",
    "SubMConv3dNeighborCache",
    "set_algorithm",
    "set_hashmap_ratio",
    "sparse_conv",
    "sparse_conv2d",
    "sparse_conv3d",
    "sparse_conv4d",
    "sparse_conv_transpose",
    "sparse_conv_transpose2d",
    "sparse_conv_transpose3d",
    "sparse_conv_transpose4d",
    "sparse_submanifold_conv3d",
    "submanifold_conv",
    "submanifold_conv2d",
    "submanifold_conv3d",
    "submanifold_conv4d",
]

BLOCK_SIZES = (32, 64, 128, 256)


@dataclass(frozen=True)
class SpConvConfig:
    """A frozen neighbour cache, which holds all that a convolution in compiled code reads.

    Attributes:
        neighbor_map: ``int32 [m, V]``, the input row under each tap, or -1.
        sorted_idx: the output rows, sorted by the Gray code rank of the taps under which they have an input, or None
            for more than 32 taps.
        valid_kernels, valid_kernel_segs: for each of ``block_sizes``, the taps under which a block of sorted rows has
            an input, and where the taps of each block begin. They are empty for more than 32 taps, like
            ``block_sizes``.
        block_sizes: the numbers of rows of a block.
        valid_signal_i, valid_signal_o: the input and the output row of each pair, tap by tap, or None for more than 32
            taps.
        valid_signal_seg: where the pairs of each tap begin, or None for more than 32 taps.
        splitk: the number of parts into which the sum over the taps is split. It is 1 for algorithms that do not split.
        algorithm: one of :class:`Algorithm`.
        plan: the neighbour tables of the convolution, with ``splitk`` parts if that is above 1.
        kernel: the kernel size per axis.
    """

    neighbor_map: Tensor
    sorted_idx: Tensor | None
    valid_kernels: list[Tensor]
    valid_kernel_segs: list[Tensor]
    block_sizes: list[int]
    valid_signal_i: Tensor | None
    valid_signal_o: Tensor | None
    valid_signal_seg: Tensor | None
    splitk: int
    algorithm: str
    plan: Plan
    kernel: Triple

    def conv(self, feats: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the convolution ``[m, co]`` of ``feats [n, ci]`` with ``weight [co, kw, kh, kd, ci]`` over the
        neighbours in this config. If ``bias`` is None, no bias is added. Raise ``SL202`` if the kernel size or the
        number of rows is not the config's.
        """
        if tuple(weight.shape[1:-1]) != self.kernel:
            raise error(
                "SL202",
                where="sparse3d.flexgemm, argument 'weight'",
                got=f"shape {tuple(weight.shape)}",
                expected=f"kernel {self.kernel}, that of the neighbours",
            )
        check_rows("sparse3d.flexgemm, argument 'feats'", feats, self.plan.rows)
        flat = weight.flatten(1, 3)
        if self.algorithm == Algorithm.EXPLICIT_GEMM:
            return explicit_gemm(feats, flat, bias, self.neighbor_map)
        return self.plan.conv(feats, flat, bias, tf32=triton_spconv.config.allow_tf32)


class WindowCache(PlanCache):
    """The neighbours of a convolution in one grid with one ``window`` (kernel size, stride, padding, dilation). Any
    number of layers can use it, with or without gradients.
    """

    def __init__(self, plan: Plan, grid: Triple, window: StepWindow) -> None:
        """Store ``plan``, and the ``grid`` and ``window`` that later calls must have."""
        super().__init__(plan)
        self.grid, self.window = grid, window

    @property
    def neighbor_map(self) -> Tensor:
        """The neighbour map, ``int32 [m, k]``. It holds the input row of each output under each tap, or -1 if there is
        none.
        """
        return flat_table(self._built)

    @property
    def neighbor_map_bwd(self) -> Tensor:
        """The transposed neighbour map, ``int32 [n, k]``. It holds the output row that reads each input by each tap, or
        -1 if there is none.
        """
        return flat_table(self._built.t)

    def __getitem__(self, name: str) -> Any:
        """Return the attribute ``name``, since FlexGEMM's caches are indexed, as in ``cache["neighbor_map"]``."""
        return getattr(self, name)

    def freeze(self, splitk: int = 1, algorithm: str = DEFAULT) -> SpConvConfig:
        """Return a config that holds all that a convolution in compiled code reads. It holds the tables for
        ``algorithm``, cut into ``splitk`` parts of the taps if its name ends in ``splitk``. It also holds FlexGEMM's
        lists of taps and pairs, which are None or empty for more than 32 taps. Raise ``SL208`` for an unknown algorithm
        and for ``splitk`` below 1.
        """
        check_algorithm(algorithm, splitk)
        table, parts = self.neighbor_map, splitk if algorithm.endswith("splitk") else 1
        plan, kernel = self.plan(algorithm, parts), self.window.kernel
        # The lists hold a bit for each tap in words of 32 bits.
        if table.shape[1] > 32:
            return SpConvConfig(table, None, [], [], [], None, None, None, parts, algorithm, plan, kernel)
        code, order, inputs, outputs, ends = cuda.neighbor_map_post_process_for_masked_implicit_gemm_1(table)
        pairs = [cuda.neighbor_map_post_process_for_masked_implicit_gemm_2(code, order, b) for b in BLOCK_SIZES]
        taps, begins, sizes = [t for t, _ in pairs], [b for _, b in pairs], list(BLOCK_SIZES)
        signals = inputs, outputs, ends
        return SpConvConfig(table, order, taps, begins, sizes, *signals, parts, algorithm, plan, kernel)

    def check(self, rows: int, grid: Triple, window: StepWindow) -> None:
        """Raise ``SL208`` unless this cache was built for ``rows`` inputs, the grid ``grid`` and the window ``window``
        (kernel size, stride, padding, dilation).
        """
        mine, asked = (self._built.rows, self.grid, *self.window), (rows, grid, *window)
        if mine != asked:
            raise error(
                "SL208",
                where="sparse3d.flexgemm, argument 'neighbor_cache'",
                what="the neighbour cache belongs to another convolution",
                got=f"(rows, grid, kernel, stride, padding, dilation) = {mine[:6]}",
                expected=asked[:6],
                fix="pass neighbor_cache=None, or the cache of a layer like this one",
            )

    def apply(self, feats: Tensor, weight: Tensor, bias: Tensor | None, algorithm: str) -> Tensor:
        """Return the convolution ``[m, co]`` of ``feats [n, ci]`` with ``weight [co, kw, kh, kd, ci]`` over the
        neighbours in this cache, computed by ``algorithm``. If ``bias`` is None, no bias is added.
        """
        return self.convolve(feats, weight.flatten(1, 3), bias, algorithm, triton_spconv.config.allow_tf32)


class SubMConv3dNeighborCache(WindowCache):
    """The neighbours of a submanifold convolution, whose outputs lie on the voxels of the input."""


class SparseConv3dNeighborCache(WindowCache):
    """The neighbours of a strided convolution. ``out_coords`` are its output voxels."""

    def __init__(self, plan: Plan, grid: Triple, window: StepWindow, out_coords: Tensor) -> None:
        """Store ``plan``, ``grid``, ``window`` and the output voxels."""
        super().__init__(plan, grid, window)
        self.out_coords = out_coords


def sparse_submanifold_conv3d(
    feats: Tensor,
    coords: Tensor | None = None,
    shape: Sequence[int] | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    neighbor_cache: SubMConv3dNeighborCache | NeighborCache | None = None,
    dilation: Sequence[int] = (1, 1, 1),
    *,
    config: SpConvConfig | None = None,
    algorithm: str = DEFAULT,
) -> Tensor | tuple[Tensor, SubMConv3dNeighborCache | NeighborCache]:
    """Return ``(out [n, co], cache)`` of a submanifold convolution, whose outputs lie on the voxels of the input. With
    a ``config``, return only ``out``.

    Args:
        feats: ``[n, ci]``.
        coords: ``int32 [n, 4]`` rows (batch, x, y, z).
        shape: ``(batches, channels, W, H, D)``, or as in FlexGEMM 2.0 ``(batches, W, H, D, channels)``, if only that
            has the channels of ``feats``. Only the grid is used.
        weight: ``[co, kw, kh, kd, ci]``, kernels of any size.
        bias: ``[co]`` or None.
        neighbor_cache: the cache of an earlier call on the same voxels with the same kernel and dilation.
        dilation: the spacing of the taps.
        config: a frozen cache, which replaces ``coords``, ``shape``, ``neighbor_cache``, ``dilation`` and
            ``algorithm``.
        algorithm: one of :class:`Algorithm`.

    Raises:
        ArgumentError: ``SL211`` for coords that repeat or lie outside the grid, ``SL208`` for the cache of another
            convolution.
    """
    if config is not None:
        return config.conv(feats, _require_tensor("weight", weight), bias)
    if isinstance(neighbor_cache, NeighborCache) or _has_channels_last(shape, feats.shape[1]):
        shape, weight = shape or (), _require_tensor("weight", weight)  # FlexGEMM 2.0 has a function of this name too
        options: dict[str, Any] = {"dilation": dilation, "neighbor_cache": neighbor_cache, "algorithm": algorithm}
        return submanifold_conv3d(feats, _require_tensor("coords", coords), shape, weight, bias, **options)
    coords, weight, grid = _require_tensor("coords", coords), _require_tensor("weight", weight), _check_grid(shape)
    ones = (1, 1, 1)
    window = StepWindow(_check_kernel(weight), ones, (0, 0, 0), _check_triple("dilation", dilation))
    cache = neighbor_cache
    if cache is None:
        check_rows("sparse_submanifold_conv3d", feats, coords.shape[0])
        require_scenes("sparse_submanifold_conv3d", coords, shape[0] if shape is not None else 0)
        plan = submanifold_plan(coords, grid, window.kernel, window.dilation)
        cache = SubMConv3dNeighborCache(plan, grid, window)
    cache.check(feats.shape[0], grid, window)
    return cache.apply(feats, weight, bias, algorithm), cache


def sparse_conv3d(
    feats: Tensor,
    coords: Tensor,
    shape: Sequence[int],
    weight: Tensor,
    bias: Tensor | None = None,
    neighbor_cache: SparseConv3dNeighborCache | NeighborCache | None = None,
    out_coords: Tensor | None = None,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
    *,
    algorithm: str = DEFAULT,
    **of_the_second_form: Any,
) -> tuple[Any, ...]:
    """Return ``(out [m, co], out_coords int32 [m, 4], cache)`` of a strided convolution. Raise ``SL208`` for the cache
    of another convolution, and ``SL211`` for coordinates that repeat or lie outside the grid.

    The output voxels are those of ``neighbor_cache``, else the argument ``out_coords``, else every voxel that an input
    reaches, ascending. The other arguments are those of :func:`sparse_submanifold_conv3d`. With arguments that only
    FlexGEMM 2.0 has (``output_coords``, ``output_shape``, ``allow_tf32``, a :class:`NeighborCache`), this is the
    function ``flex_gemm.sparse_conv3d``.
    """
    if of_the_second_form or isinstance(neighbor_cache, NeighborCache):
        rest = {"neighbor_cache": neighbor_cache, "algorithm": algorithm, **of_the_second_form}
        rest |= {"stride": stride, "padding": padding, "dilation": dilation}
        return convolution.sparse_conv3d(feats, coords, shape, weight, bias, **rest)
    grid = _check_grid(shape)
    step = _check_triple("stride", stride), _check_triple("padding", padding), _check_triple("dilation", dilation)
    window = StepWindow(_check_kernel(weight), *step)
    cache = neighbor_cache
    if cache is None:
        check_rows("sparse_conv3d", feats, coords.shape[0])
        require_scenes("sparse_conv3d", coords, shape[0])
        if out_coords is None:
            out_coords = ops.out_coords(coords, list(grid), *(list(values) for values in window[:4]))
        cache = SparseConv3dNeighborCache(connect_voxels(window, coords, grid, out_coords), grid, window, out_coords)
    cache.check(feats.shape[0], grid, window)
    # Values are not compared, since a GPU would have to be waited for.
    if out_coords is not None and out_coords.shape != cache.out_coords.shape:
        raise error(
            "SL208",
            where="sparse3d.flexgemm, argument 'out_coords'",
            got=f"{out_coords.shape[0]} rows",
            expected=f"the {cache.out_coords.shape[0]} of neighbor_cache, or None",
        )
    return cache.apply(feats, weight, bias, algorithm), cache.out_coords, cache


def _require_tensor(name: str, value: Tensor | None) -> Tensor:
    """Return ``value``, the argument ``name``. Raise ``SL209`` if it is None."""
    if value is None:
        raise error("SL209", where=f"sparse3d.flexgemm, argument {name!r}", got="None", expected="a tensor")
    return value


def _has_channels_last(shape: Sequence[int] | None, channels: int) -> bool:
    """Return whether ``shape`` has the channels last, as FlexGEMM 2.0 has it. This is so if ``shape`` has five sizes of
    which the last one, and not the second, is ``channels``. If ``shape`` is None, return False.
    """
    if shape is None or len(shape) != 5:
        return False
    # Where both forms fit, the shape is read as that of FlexGEMM 1.x.
    return is_known_size(shape[4], channels) and not is_known_size(shape[1], channels)


def _check_grid(shape: Sequence[int] | None) -> Triple:
    """Return the three spatial sizes of ``shape``, which is ``(B, C, W, H, D)``. Raise ``SL208`` if it is None or does
    not have five sizes.
    """
    if shape is None or len(shape) != 5:
        got = None if shape is None else tuple(shape)
        raise error("SL208", where="sparse3d.flexgemm, argument 'shape'", got=got, expected="(B, C, W, H, D)")
    return _check_triple("shape", shape[2:])


def _check_kernel(weight: Tensor) -> Triple:
    """Return the three kernel sizes of ``weight [co, kw, kh, kd, ci]``. Raise ``SL201`` if it does not have five
    dimensions.
    """
    if weight.dim() != 5:
        raise error(
            "SL201",
            where="sparse3d.flexgemm, argument 'weight'",
            got=f"shape {tuple(weight.shape)}",
            expected="[Co, Kw, Kh, Kd, Ci]",
        )
    return _check_triple("weight", weight.shape[1:-1])


def _check_triple(name: str, values: Sequence[int]) -> Triple:
    """Return ``values``, the argument ``name``, as a tuple of three integers. Raise ``SL208`` if there are not three
    values.
    """
    return expand_axes(values, f"sparse3d.flexgemm, argument {name!r}")


# --- the functions behind them ----------------------------------------------------------------------------------------


class SubMConv3dFunction:
    """The steps of a submanifold convolution as static methods, under FlexGEMM's names."""

    @staticmethod
    def apply(
        feats: Tensor,
        coords: Tensor,
        shape: Sequence[int],
        neighbor_cache: SubMConv3dNeighborCache | None,
        weight: Tensor,
        bias: Tensor | None = None,
        dilation: Sequence[int] = (1, 1, 1),
    ) -> Any:
        """Return ``(out [n, co], cache)``. This is :func:`sparse_submanifold_conv3d` with the arguments in the order of
        FlexGEMM's ``SubMConv3dFunction``.
        """
        return sparse_submanifold_conv3d(feats, coords, shape, weight, bias, neighbor_cache, dilation)

    @staticmethod
    def _compute_neighbor_cache(
        coords: Tensor, shape: Sequence[int], kernel_size: Triple, dilation: Triple, needs_grad: bool = True
    ) -> SubMConv3dNeighborCache:
        """Return the cache of a submanifold convolution, which holds its neighbour tables, grid and window (kernel
        size, stride, padding, dilation). ``shape`` is ``(B, C, W, H, D)``. ``needs_grad`` is not read.
        """
        grid, window = _check_grid(shape), StepWindow(kernel_size, (1, 1, 1), (0, 0, 0), dilation)
        return SubMConv3dNeighborCache(submanifold_plan(coords, grid, kernel_size, dilation), grid, window)

    @staticmethod
    def _compute_neighbor_cache_torch(
        coords: Tensor, shape: Sequence[int], kernel_size: Triple, dilation: Triple
    ) -> SubMConv3dNeighborCache:
        """Return the cache of a submanifold convolution, which holds its neighbour tables, grid and window (kernel
        size, stride, padding, dilation). ``shape`` is ``(B, C, W, H, D)``. Neighbours are found by adding offsets to
        coordinates, and not by the kernels that find voxels in grids.
        """
        low = [k // 2 * d for k, d in zip(kernel_size, dilation, strict=True)]
        taps = _tap_columns(box_offsets(kernel_size, dilation, padding=low), coords.device)
        plan = connect_by_offsets(coords, coords, taps, (1, 1, 1, 1))
        window = StepWindow(kernel_size, (1, 1, 1), (0, 0, 0), dilation)
        return SubMConv3dNeighborCache(plan, _check_grid(shape), window)

    @staticmethod
    def _sparse_submanifold_conv_forward(
        feats: Tensor, neighbor_cache: SubMConv3dNeighborCache, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return the submanifold convolution ``[n, co]`` of ``feats [n, ci]`` with ``weight [co, kw, kh, kd, ci]`` over
        the neighbours in ``neighbor_cache``. If ``bias`` is None, no bias is added.
        """
        return neighbor_cache.apply(feats, weight, bias, ALGORITHM)

    @staticmethod
    def _sparse_submanifold_conv_backward(
        grad_output: Tensor,
        feats: Tensor,
        neighbor_cache: SubMConv3dNeighborCache,
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of a submanifold convolution with respect to ``feats``, ``weight`` and ``bias``. The
        gradient of a tensor that does not require one is None.
        """
        return _gradients(grad_output, feats, neighbor_cache, weight, bias)


class SparseConv3dFunction:
    """The steps of a strided convolution as static methods, under FlexGEMM's names."""

    @staticmethod
    def apply(
        feats: Tensor,
        coords: Tensor,
        shape: Sequence[int],
        neighbor_cache: SparseConv3dNeighborCache | None,
        weight: Tensor,
        bias: Tensor | None = None,
        out_coords: Tensor | None = None,
        *window: Sequence[int],
    ) -> Any:
        """Return ``(out [m, co], out_coords, cache)``. This is :func:`sparse_conv3d` with the arguments in the order of
        FlexGEMM's ``SparseConv3dFunction``. ``window`` is stride, padding and dilation.
        """
        return sparse_conv3d(feats, coords, shape, weight, bias, neighbor_cache, out_coords, *window)

    @staticmethod
    def _get_output_coords(coords: Tensor, shape: Sequence[int], *window: Triple) -> Tensor:
        """Return the output voxels of a strided convolution, ``int32 [m, 4]`` (batch, x, y, z), ascending. ``shape`` is
        ``(B, C, W, H, D)``. ``window`` is kernel size, stride, padding and dilation.
        """
        voxels: Tensor = ops.out_coords(coords, [*_check_grid(shape)], *map(list, window))
        return voxels

    @staticmethod
    def _get_output_coords_torch(
        coords: Tensor, shape: Sequence[int], kernel_size: Triple, stride: Triple, padding: Triple, dilation: Triple
    ) -> Tensor:
        """Return the output voxels of a strided convolution, ``int32 [m, 4]`` (batch, x, y, z), ascending. ``shape`` is
        ``(B, C, W, H, D)``. The voxels are found by adding offsets to coordinates, and not by the kernels that find
        voxels in grids.
        """
        taps = _tap_columns(box_offsets(kernel_size, dilation, padding=padding), coords.device)
        high = [shape[0], *StepWindow(kernel_size, stride, padding, dilation).shape(_check_grid(shape))]
        cells: Tensor = offset_cells(coords, taps, [1, *stride], [0, 0, 0, 0], high)
        return cells

    @staticmethod
    def _compute_neighbor_cache(
        coords: Tensor,
        out_coords: Tensor,
        shape: Sequence[int],
        kernel_size: Triple,
        stride: Triple,
        padding: Triple,
        dilation: Triple,
        needs_grad: bool = True,
        is_out_coords_given: bool = False,
    ) -> SparseConv3dNeighborCache:
        """Return the cache of a convolution from ``coords`` onto ``out_coords``. It holds the neighbour tables, the
        grid, the window (kernel size, stride, padding, dilation) and the outputs. ``shape`` is ``(B, C, W, H, D)``.
        ``needs_grad`` and ``is_out_coords_given`` are not read.
        """
        grid, window = _check_grid(shape), StepWindow(kernel_size, stride, padding, dilation)
        return SparseConv3dNeighborCache(connect_voxels(window, coords, grid, out_coords), grid, window, out_coords)

    @staticmethod
    def _compute_neighbor_cache_torch(
        coords: Tensor,
        out_coords: Tensor,
        shape: Sequence[int],
        kernel_size: Triple,
        stride: Triple,
        padding: Triple,
        dilation: Triple,
        needs_grad: bool = True,
    ) -> SparseConv3dNeighborCache:
        """Return the cache of a convolution from ``coords`` onto ``out_coords``. It holds the neighbour tables, the
        grid, the window (kernel size, stride, padding, dilation) and the outputs. ``shape`` is ``(B, C, W, H, D)``.
        Neighbours are found by adding offsets to coordinates, and not by the kernels that find voxels in grids.
        ``needs_grad`` is not read.
        """
        taps = _tap_columns(box_offsets(kernel_size, dilation, padding=padding), coords.device)
        plan = connect_by_offsets(coords, out_coords, taps, (1, *stride))
        window = StepWindow(kernel_size, stride, padding, dilation)
        return SparseConv3dNeighborCache(plan, _check_grid(shape), window, out_coords)

    @staticmethod
    def _sparse_conv_forward(
        feats: Tensor, neighbor_cache: SparseConv3dNeighborCache, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return the sparse convolution ``[m, co]`` of ``feats [n, ci]`` with ``weight [co, kw, kh, kd, ci]`` over the
        neighbours in ``neighbor_cache``. If ``bias`` is None, no bias is added.
        """
        return neighbor_cache.apply(feats, weight, bias, ALGORITHM)

    @staticmethod
    def _sparse_conv_backward(
        grad_output: Tensor,
        feats: Tensor,
        neighbor_cache: SparseConv3dNeighborCache,
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of a sparse convolution with respect to ``feats``, ``weight`` and ``bias``. The gradient
        of a tensor that does not require one is None.
        """
        return _gradients(grad_output, feats, neighbor_cache, weight, bias)


def _tap_columns(offsets: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return ``offsets``, one triple for each tap, as ``int32 [taps, 4]`` on ``device``. The first column is zeros, for
    the batch.
    """
    return torch.nn.functional.pad(torch.tensor(offsets, dtype=torch.int32, device=device), (1, 0))


def _gradients(
    grad: Tensor, feats: Tensor, cache: WindowCache, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the convolution over ``cache`` with respect to ``feats``, ``weight`` and ``bias``. ``grad
    [m, co]`` is the gradient of its result. The gradient of a tensor that does not require one is None.
    """
    # New leaves, so that the graphs of the caller's tensors are not touched.
    x, w = (t.detach().requires_grad_(t.requires_grad) for t in (feats, weight))
    b = None if bias is None else bias.detach().requires_grad_(bias.requires_grad)
    leaves = [t for t in (x, w, b) if t is not None and t.requires_grad]
    with torch.enable_grad():
        found = iter(torch.autograd.grad(cache.apply(x, w, b, ALGORITHM), leaves, grad) if leaves else ())
    feats_grad, weight_grad = (next(found) if t.requires_grad else None for t in (x, w))
    return feats_grad, weight_grad, next(found, None)


# --- settings of the process, which callers make and nothing follows --------------------------------------------------


class SerializationMode:
    """FlexGEMM's constants for the order of output voxels. They change nothing here, since the order is always
    ascending (batch, x, y, z).
    """

    BXYZ, Z_ORDER, HILBERT = 0, 1, 2


class SparseConv3dOutCoordAlgorithm:
    """FlexGEMM's constants for the algorithms that find output voxels. They change nothing here, since there is only
    one algorithm.
    """

    HASHMAP, EXPAND_UNIQUE = 0, 1


ALGORITHM = DEFAULT
HASHMAP_RATIO = 2.0
OUT_COORD_HASHMAP_RATIO = 1.1
OUT_COORD_ALGO = SparseConv3dOutCoordAlgorithm.HASHMAP
SERIALIZATION_MODE = SerializationMode.BXYZ


def set_algorithm(algorithm: str) -> None:
    """Check the name of an algorithm and change nothing, since each call chooses by its argument ``algorithm``. Raise
    ``SL208`` for an unknown name. FlexGEMM stores the name for the whole process, which two models would then share.
    """
    check_algorithm(algorithm)


def set_hashmap_ratio(ratio: float) -> None:
    """Accept any ratio and change nothing. FlexGEMM's hash tables have ``ratio`` slots for each key, while the size of
    a table here follows from the number of its keys alone.
    """
