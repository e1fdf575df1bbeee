"""``flex_gemm.ops.spconv``: convolutions as functions of features, coordinates and weights.

A neighbour cache is a :class:`~shiplap_sparse3d.Plan` with the window that it was made for, so one that was built
without gradients, or for another algorithm, serves training as well. ``freeze`` leaves tensors and integers, for
compiled code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d import ops
from shiplap_sparse3d.coords import check_rows
from shiplap_sparse3d.geometry import expand_to_three
from shiplap_sparse3d.plan import Plan, wants_sorted
from shiplap_sparse3d.steps import StepWindow, Triple, connect_voxels, submanifold_plan

__all__ = [
    "ALGORITHM",
    "HASHMAP_RATIO",
    "OUT_COORD_ALGO",
    "OUT_COORD_HASHMAP_RATIO",
    "SERIALIZATION_MODE",
    "Algorithm",
    "SerializationMode",
    "SpConvConfig",
    "SparseConv3dNeighborCache",
    "SparseConv3dOutCoordAlgorithm",
    "SubMConv3dNeighborCache",
    "set_algorithm",
    "set_hashmap_ratio",
    "sparse_conv3d",
    "sparse_submanifold_conv3d",
]


class Algorithm:
    """The algorithms of a convolution. Tiles, and the split of products, are the tuned choice of each call."""

    EXPLICIT_GEMM = "explicit_gemm"
    IMPLICIT_GEMM = "implicit_gemm"
    IMPLICIT_GEMM_SPLITK = "implicit_gemm_splitk"
    MASKED_IMPLICIT_GEMM = "masked_implicit_gemm"
    MASKED_IMPLICIT_GEMM_SPLITK = "masked_implicit_gemm_splitk"


ALGORITHMS = tuple(v for n, v in vars(Algorithm).items() if n.isupper())
DEFAULT = Algorithm.MASKED_IMPLICIT_GEMM_SPLITK


@dataclass(frozen=True)
class SpConvConfig:
    """A frozen neighbour cache.

    Attributes:
        plan: tensors and integers; sorted for the masked algorithms on a GPU.
        kernel: kernel size per axis.
        algorithm: one of :class:`Algorithm`.
        splitk: kept for the caller; the split of a product is the tuned choice's.
    """

    plan: Plan
    kernel: Triple
    algorithm: str = DEFAULT
    splitk: int = 1

    def conv(self, feats: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve ``feats [n, ci]`` with ``weight [co, kw, kh, kd, ci]`` to ``[m, co]``."""
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
            return _explicit_gemm(feats, flat, bias, self.plan.table)
        return self.plan.conv(feats, flat, bias)


def _check_algorithm(algorithm: str, splitk: int) -> None:
    if algorithm not in ALGORITHMS or splitk < 1:
        raise error(
            "SL208",
            where="sparse3d.flexgemm",
            got=f"algorithm {algorithm!r}, splitk {splitk}",
            expected=f"one of {', '.join(ALGORITHMS)}, splitk >= 1",
        )


class NeighborCache:
    """The neighbours of a convolution, for any number of layers of one ``window``, with gradients or without."""

    def __init__(self, plan: Plan, grid: Triple, window: StepWindow) -> None:
        self.grid, self.window, self._built = grid, window, plan
        self._plans: dict[bool, Plan] = {plan.order is not None: plan}  # by whether it is sorted

    @property
    def neighbor_map(self) -> Tensor:
        """Return ``int32 [m, k]``: the input row under each tap, -1 where there is none."""
        return self._plan(False).table

    def __getitem__(self, name: str) -> Tensor:
        """Return ``cache["neighbor_map"]``, as FlexGEMM's caches do."""
        tensor: Tensor = getattr(self, name)
        return tensor

    def freeze(self, splitk: int = 1, algorithm: str = DEFAULT) -> SpConvConfig:
        """Return the config for compiled code. Raises SL208 for an unknown algorithm and ``splitk`` below 1."""
        _check_algorithm(algorithm, splitk)
        # Only the masked kernels skip taps, for which the table has to be sorted.
        masked = algorithm in (Algorithm.MASKED_IMPLICIT_GEMM, Algorithm.MASKED_IMPLICIT_GEMM_SPLITK)
        plan = self._plan(masked and wants_sorted(self._built.table))
        return SpConvConfig(plan, self.window.kernel, algorithm, splitk)

    def _plan(self, sort: bool) -> Plan:
        if sort not in self._plans:
            self._plans[sort] = self._built.sorted() if sort else self._built.unsorted()
        return self._plans[sort]

    def check(self, rows: int, grid: Triple, window: StepWindow) -> None:
        """Raise SL208 unless this is the cache of such a convolution."""
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


class SubMConv3dNeighborCache(NeighborCache):
    """The neighbours of a submanifold convolution."""


class SparseConv3dNeighborCache(NeighborCache):
    """The neighbours of a strided convolution, and its output voxels."""

    def __init__(self, plan: Plan, grid: Triple, window: StepWindow, out_coords: Tensor) -> None:
        super().__init__(plan, grid, window)
        self.out_coords = out_coords


def sparse_submanifold_conv3d(
    feats: Tensor,
    coords: Tensor | None = None,
    shape: Sequence[int] | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    neighbor_cache: SubMConv3dNeighborCache | None = None,
    dilation: Sequence[int] = (1, 1, 1),
    *,
    config: SpConvConfig | None = None,
    algorithm: str = DEFAULT,
) -> Tensor | tuple[Tensor, SubMConv3dNeighborCache]:
    """Submanifold convolution: ``(out [n, co], cache)``, or with a ``config`` ``out`` alone.

    Args:
        feats: ``[n, ci]``.
        coords: ``int32 [n, 4]`` rows (batch, x, y, z).
        shape: ``(batches, channels, W, H, D)``; only the grid is looked at.
        weight: ``[co, kw, kh, kd, ci]``, kernels of any size.
        bias: ``[co]`` or None.
        neighbor_cache: of an earlier call on the same voxels with the same kernel and dilation.
        dilation: spacing of the taps.
        config: a frozen cache; ``coords``, ``shape``, ``neighbor_cache``, ``dilation`` and ``algorithm`` are its own
            then.
        algorithm: one of :class:`Algorithm`.

    Raises:
        ArgumentError: SL211 for duplicate or outside coords, SL208 for the cache of another convolution.
    """
    if config is not None:
        return config.conv(feats, _require_tensor("weight", weight), bias)
    coords, weight, grid = _require_tensor("coords", coords), _require_tensor("weight", weight), _check_grid(shape)
    ones = (1, 1, 1)
    window = StepWindow(_check_kernel(weight), ones, (0, 0, 0), _check_triple("dilation", dilation))
    cache = neighbor_cache
    if cache is None:
        check_rows("sparse_submanifold_conv3d", feats, coords.shape[0])
        plan = submanifold_plan(coords, grid, window.kernel, window.dilation)
        cache = SubMConv3dNeighborCache(plan, grid, window)
    cache.check(feats.shape[0], grid, window)
    return cache.freeze(algorithm=algorithm).conv(feats, weight, bias), cache


def sparse_conv3d(
    feats: Tensor,
    coords: Tensor,
    shape: Sequence[int],
    weight: Tensor,
    bias: Tensor | None = None,
    neighbor_cache: SparseConv3dNeighborCache | None = None,
    out_coords: Tensor | None = None,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
    *,
    algorithm: str = DEFAULT,
) -> tuple[Tensor, Tensor, SparseConv3dNeighborCache]:
    """Strided convolution: ``(out [m, co], out_coords int32 [m, 4], cache)``.

    ``out_coords`` are those of the cache, those given, or every voxel that an input reaches, ascending. The rest is as
    in :func:`sparse_submanifold_conv3d`.
    """
    grid = _check_grid(shape)
    step = _check_triple("stride", stride), _check_triple("padding", padding), _check_triple("dilation", dilation)
    window = StepWindow(_check_kernel(weight), *step)
    cache = neighbor_cache
    if cache is None:
        check_rows("sparse_conv3d", feats, coords.shape[0])
        if out_coords is None:
            out_coords = ops.out_coords(coords, list(grid), *(list(values) for values in window[:4]))
        cache = SparseConv3dNeighborCache(connect_voxels(window, coords, grid, out_coords), grid, window, out_coords)
    cache.check(feats.shape[0], grid, window)
    if out_coords is not None and out_coords.shape != cache.out_coords.shape:
        raise error(
            "SL208",
            where="sparse3d.flexgemm, argument 'out_coords'",
            got=f"{out_coords.shape[0]} rows",
            expected=f"the {cache.out_coords.shape[0]} of neighbor_cache, or None",
        )
    return cache.freeze(algorithm=algorithm).conv(feats, weight, bias), cache.out_coords, cache


def _explicit_gemm(feats: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor) -> Tensor:
    """Convolve by one product over gathered neighbours, ``[m, k * ci]``: the plainest way, with the most memory."""
    padded = torch.cat([feats, feats.new_zeros(1, feats.shape[1])])  # -1 is its last row
    return torch.nn.functional.linear(padded[table.long()].flatten(1), weight.flatten(1), bias)


def _require_tensor(name: str, value: Tensor | None) -> Tensor:
    if value is None:
        raise error("SL209", where=f"sparse3d.flexgemm, argument {name!r}", got="None", expected="a tensor")
    return value


def _check_grid(shape: Sequence[int] | None) -> Triple:
    if shape is None or len(shape) != 5:
        got = None if shape is None else tuple(shape)
        raise error("SL208", where="sparse3d.flexgemm, argument 'shape'", got=got, expected="(B, C, W, H, D)")
    return _check_triple("shape", shape[2:])


def _check_kernel(weight: Tensor) -> Triple:
    if weight.dim() != 5:
        raise error(
            "SL201",
            where="sparse3d.flexgemm, argument 'weight'",
            got=f"shape {tuple(weight.shape)}",
            expected="[Co, Kw, Kh, Kd, Ci]",
        )
    return _check_triple("weight", weight.shape[1:-1])


def _check_triple(name: str, values: Sequence[int]) -> Triple:
    return expand_to_three(values, f"sparse3d.flexgemm, argument {name!r}")


# --- settings of the process, which callers make and nothing follows --------------------------------------------------


class SerializationMode:
    """The orders of output voxels. Here the order is always ascending (batch, x, y, z)."""

    BXYZ, Z_ORDER, HILBERT = 0, 1, 2


class SparseConv3dOutCoordAlgorithm:
    """The algorithms for output voxels. There is only one here."""

    HASHMAP, EXPAND_UNIQUE = 0, 1


ALGORITHM = DEFAULT
HASHMAP_RATIO = 2.0
OUT_COORD_HASHMAP_RATIO = 1.1
OUT_COORD_ALGO = SparseConv3dOutCoordAlgorithm.HASHMAP
SERIALIZATION_MODE = SerializationMode.BXYZ


def set_algorithm(algorithm: str) -> None:
    """Accept a known algorithm. Raises SL208 for an unknown name; ``algorithm=`` of a call chooses one.

    Nothing is kept: two models in one process would share such a setting.
    """
    _check_algorithm(algorithm, 1)


def set_hashmap_ratio(ratio: float) -> None:
    """Accept any ratio: the size of a table follows from the number of its keys."""
