"""``SparseConvTensor``, and the record a layer leaves under its ``indice_key``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiplap.compat.sizes import assert_in_graph
from shiplap.errors import error
from shiplap_sparse3d import ops as kernels
from shiplap_sparse3d.coords import check_rows
from shiplap_sparse3d.geometry import Geometry, Strided, per_axis
from shiplap_sparse3d.plan import Plan
from shiplap_sparse3d.tensor import SparseTensor

__all__ = ["ConvAlgo", "ImplicitGemmIndiceData", "IndiceData", "SparseConvTensor", "Window", "expand_nd"]

MAX_NDIM = 3


class ConvAlgo(Enum):
    """spconv's algorithms. Accepted everywhere; layers that share an ``indice_key`` must name the same one."""

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


def expand_nd(ndim: int, val: int | Sequence[int]) -> list[int]:
    """``3`` or ``(3, 3, 1)`` → one int per axis. Raises SL208 for another number of them."""
    return list(per_axis(val, "spconv", ndim))


def check_ndim(where: str, ndim: int) -> None:
    if not 1 <= ndim <= MAX_NDIM:
        raise error(
            "SL208",
            where=where,
            got=f"{ndim} spatial axes",
            expected=f"1 to {MAX_NDIM}",
            fix="fold an axis into the batch index where no layer convolves along it",
        )


def check_sparse(where: str, x: Any) -> None:
    """Before a layer reads ``x``: SL209 for what is no sparse tensor, SL202 where features and voxels are not as many.

    Not when a tensor is made: models replace the features first and assign the voxels after that.
    """
    if not isinstance(x, SparseConvTensor):
        fix = "SparseConvTensor(features, indices, spatial_shape, batch_size)"
        raise error("SL209", where=where, got=type(x).__name__, expected="a SparseConvTensor", fix=fix)
    check_rows(where, x.features, x.indices.shape[0])


def autocast(tensor: Tensor) -> Tensor:
    """``tensor`` in the dtype of ``torch.autocast`` on its device; outside of it, and float64, as it is."""
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def indices_of(coords: Tensor, ndim: int) -> Tensor:
    """``int32 [n, 4]`` → ``[n, 1 + ndim]``: without the axes that there are not."""
    return coords if ndim == MAX_NDIM else torch.cat([coords[:, :1], coords[:, -ndim:]], 1)


@dataclass(frozen=True)
class Window:
    """What a layer looks through, one int per axis each; ``output_padding`` makes it a transposed one."""

    ksize: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    output_padding: list[int] | None = None

    def step(self, geometry: Geometry, *, pooled: bool = False) -> Strided:
        """What it leads to from ``geometry``, built at most once."""
        window = self.ksize, self.stride, self.padding, self.dilation
        if self.output_padding is None:
            return geometry.pooled(*window) if pooled else geometry.strided(*window)
        # spconv's grid has the size of an undilated kernel.
        extra = [o - (d - 1) * (k - 1) for o, d, k in zip(self.output_padding, self.dilation, self.ksize, strict=True)]
        return geometry.transposed(*window, extra)


@dataclass
class IndiceData:
    """What a layer leaves in ``indice_dict``: where it read, where it wrote, and the plan between the two.

    Attributes:
        geometry, out_geometry: the voxels on either side; ``indices`` and ``out_indices`` are theirs.
        plan: from inputs to outputs.
        pair_fwd, pair_bwd: spconv's tables ``int32 [taps, m]`` and ``[taps, n]``, the other side's row or -1.
        indice_pairs, indice_pair_num: spconv's ``Native`` form, ``int32 [2, taps, n]`` padded with -1, and pairs a tap.
    """

    indices: Tensor
    out_indices: Tensor
    spatial_shape: list[int]
    out_spatial_shape: list[int]
    is_subm: bool
    algo: ConvAlgo
    window: Window
    geometry: Geometry
    out_geometry: Geometry

    @property
    def plan(self) -> Plan:
        if self.is_subm:
            return self.geometry.subm(self.ksize, self.dilation)
        return self.window.step(self.geometry).plan

    @property
    def pool_plan(self) -> Plan:
        """The plan with tables that are not sorted, for pooling."""
        if self.is_subm:
            return Plan(by_output(self.plan), self.plan.rows)
        return self.window.step(self.geometry, pooled=True).plan

    @property
    def ksize(self) -> list[int]:
        return self.window.ksize

    @property
    def stride(self) -> list[int]:
        return self.window.stride

    @property
    def padding(self) -> list[int]:
        return self.window.padding

    @property
    def dilation(self) -> list[int]:
        return self.window.dilation

    @property
    def pair_fwd(self) -> Tensor:
        return by_output(self.plan).t()

    @property
    def pair_bwd(self) -> Tensor:
        return kernels.transpose_table(by_output(self.plan), self.plan.rows).t()

    @property
    def indice_pairs(self) -> Tensor:
        return compact(self.pair_bwd)[0]

    @property
    def indice_pair_num(self) -> Tensor:
        return compact(self.pair_bwd)[1]


ImplicitGemmIndiceData = IndiceData  # one record serves both: a table is either form


def by_output(plan: Plan) -> Tensor:
    """The table of ``plan`` with one row per output, in their order."""
    return plan.unsorted().table


def compact(pair_bwd: Tensor) -> tuple[Tensor, Tensor]:
    """``int32 [taps, n]``, the output row of each input row → pairs ``[2, taps, n]`` (input, output), hits first and
    then -1, and how many there are a tap."""
    hit = pair_bwd >= 0
    first = (~hit).to(torch.int8).argsort(dim=1, stable=True)
    inputs = torch.arange(pair_bwd.shape[1], dtype=torch.int32, device=pair_bwd.device).expand_as(pair_bwd)
    pairs = torch.stack([torch.where(hit, inputs, -1).gather(1, first), pair_bwd.gather(1, first)])
    return pairs, hit.sum(1, dtype=torch.int32)


def _ints(spatial_shape: Sequence[int] | np.ndarray[Any, Any] | Tensor) -> list[int]:
    """The numbers of cells as Python's own integers, or as sizes of the graph that is being made."""
    if not torch.compiler.is_compiling():
        return [int(v) for v in spatial_shape]
    return [_of_graph(spatial_shape[axis]) for axis in range(len(spatial_shape))]


def _of_graph(cells: Any) -> int:
    """A number that stands in an array is what it is now, which each run of the graph asserts."""
    if isinstance(cells, int):
        return cells
    number: int = _number(cells)
    assert_in_graph(torch.as_tensor(cells) == number, _OTHER_ARRAY)
    return number


_OTHER_ARRAY = (
    "SL209: spatial_shape is an array, and holds other numbers than when torch.compile made this graph of them; "
    "pass a list of ints, which the graph can follow"
)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _number(value: Any) -> int:
    return int(value)


class SparseConvTensor:
    """Features on active voxels, as spconv's layers pass them on.

    Args:
        features: ``[n, c]``.
        indices: ``int32 [n, 1 + ndim]`` rows (batch, then one index per axis), distinct and inside the grid.
        spatial_shape: cells per axis, one to three.
        batch_size: number of scenes.
        grid, benchmark, permanent_thrust_allocator, enable_timer, force_algo: accepted; nothing reads them.
        voxel_num: carried along.
        indice_dict: records of earlier layers by ``indice_key``.

    Raises:
        ArgumentError: SL208 for four axes and for arguments that do not fit each other.
    """

    def __init__(
        self,
        features: Tensor,
        indices: Tensor,
        spatial_shape: Sequence[int],
        batch_size: int,
        grid: Tensor | None = None,
        voxel_num: Tensor | None = None,
        indice_dict: dict[str, IndiceData] | None = None,
        benchmark: bool = False,
        permanent_thrust_allocator: bool = False,
        enable_timer: bool = False,
        force_algo: ConvAlgo | None = None,
    ) -> None:
        self._features = features
        self._indices = indices
        self._geometry: Geometry | None = None
        self.spatial_shape = _ints(spatial_shape)
        self.batch_size = batch_size
        self.grid, self.voxel_num = grid, voxel_num
        self.indice_dict: dict[str, IndiceData] = {} if indice_dict is None else indice_dict
        self.benchmark = benchmark
        self.benchmark_record: dict[str, Any] = {}
        self.thrust_allocator = None
        self.force_algo = force_algo
        self.int8_scale = None
        self._check()

    def _check(self) -> None:
        where, shape = "SparseConvTensor", self.spatial_shape
        check_ndim(where, len(shape))
        for name, tensor in (("features", self._features), ("indices", self._indices)):
            if tensor.ndim != 2:
                raise error("SL208", where=f"{where}, {name}", got=f"{tensor.ndim} dims", expected="2 dims")
        if self._indices.shape[1] != len(shape) + 1:
            got = f"{self._indices.shape[1]} columns of indices, {len(shape)} axes of spatial_shape"
            raise error("SL208", where=where, got=got, expected="one column for the batch and one per axis")
        if self._indices.dtype != torch.int32:
            raise error("SL204", where=f"{where}, indices", got=self._indices.dtype, expected="int32")
        if self._features.is_quantized:
            raise error("SL204", where=f"{where}, features", got=self._features.dtype, expected="a floating dtype")
        if self.batch_size <= 0:
            raise error("SL208", where=where, got=f"batch_size {self.batch_size}", expected="1 or more")

    # --- what layers read ---------------------------------------------------------------------------------------------

    @property
    def features(self) -> Tensor:
        return self._features

    @features.setter
    def features(self, val: Tensor) -> None:
        raise error(
            "SL208",
            where="SparseConvTensor.features",
            got="an assignment",
            expected="a new tensor",
            fix="x = x.replace_feature(f)",
        )

    @property
    def indices(self) -> Tensor:
        return self._indices

    @indices.setter
    def indices(self, val: Tensor) -> None:
        self._indices, self._geometry = val, None

    @property
    def ndim(self) -> int:
        return len(self.spatial_shape)

    @property
    def geometry(self) -> Geometry:
        """The voxels as shiplap has them: coordinates of three axes and the tables built on them so far."""
        known, shape = self._geometry, tuple(self.spatial_shape)
        if known is None or known.spatial_shape[-self.ndim :] != shape or known.batch_size != self.batch_size:
            self._geometry = known = Geometry(self._indices, shape, self.batch_size)
        return known

    @property
    def is_quantized(self) -> bool:
        return False

    def q_scale(self) -> float:
        raise error("SL208", where="SparseConvTensor.q_scale", got=self._features.dtype, expected="a quantised tensor")

    @property
    def spatial_size(self) -> int:
        return math.prod(self.spatial_shape)

    def find_indice_pair(self, key: str | None) -> IndiceData | None:
        """The record under ``key``, or None."""
        return None if key is None else self.indice_dict.get(key)

    # --- tensors made from this one -----------------------------------------------------------------------------------

    def shadow_copy(self) -> SparseConvTensor:
        """Another tensor with the same members; ``indice_dict`` and tables are shared."""
        return self.replace_feature(self._features)

    def replace_feature(self, feature: Tensor) -> SparseConvTensor:
        """Other features on the same voxels; ``indice_dict`` and tables are shared."""
        other = SparseConvTensor(
            feature,
            self._indices,
            self.spatial_shape,
            self.batch_size,
            self.grid,
            self.voxel_num,
            self.indice_dict,
            self.benchmark,
            force_algo=self.force_algo,
        )
        other.benchmark_record = self.benchmark_record
        other._geometry = self._geometry
        return other

    def move(self, feature: Tensor, geometry: Geometry, indices: Tensor, spatial_shape: list[int]) -> SparseConvTensor:
        """``feature`` on other voxels of the same scenes, with a copy of ``indice_dict``."""
        other = self.replace_feature(feature)
        other.indices, other.spatial_shape, other.indice_dict = indices, list(spatial_shape), self.indice_dict.copy()
        other._geometry = geometry
        return other

    def select_by_index(self, valid_indices: Tensor) -> SparseConvTensor:
        """The voxels under a mask or row numbers, without records: they are about other voxels."""
        other = self.replace_feature(self._features[valid_indices])
        other.indices, other.indice_dict = self._indices[valid_indices], {}
        return other

    def minus(self) -> SparseConvTensor:
        return self.replace_feature(-self._features)

    def dequantize(self) -> SparseConvTensor:
        return self.replace_feature(self._features.dequantize())

    @classmethod
    def from_dense(cls, x: Tensor) -> SparseConvTensor:
        """From ``[batch, *spatial, c]`` (channels last): the cells where any channel is not zero."""
        indices = (x != 0).any(-1).nonzero()
        return cls(x[tuple(indices.unbind(1))], indices.int(), list(x.shape[1:-1]), x.shape[0])

    def dense(self, channels_first: bool = True) -> Tensor:
        """``[batch, c, *spatial]`` (or channels last), zeros where no voxel is active."""
        check_sparse("SparseConvTensor.dense", self)
        cells = SparseTensor(self._features, geometry=self.geometry).dense()
        cells = cells.reshape(self.batch_size, self._features.shape[1], *self.spatial_shape)
        return cells.contiguous() if channels_first else cells.movedim(1, -1).contiguous()

    def __add__(self, other: SparseConvTensor | Tensor) -> SparseConvTensor:
        if isinstance(other, SparseConvTensor):
            other = other.features
        return self.replace_feature(self._features + other) if isinstance(other, Tensor) else NotImplemented

    __radd__ = __iadd__ = __add__

    def __repr__(self) -> str:
        return f"SparseConvTensor[shape={self._features.shape}]"

    def __dir__(self) -> list[str]:
        return [*_NAMES, *self.__dict__]  # models ask it for "replace_feature", and object's own is closed to a graph


_NAMES = dir(SparseConvTensor)
