"""``SparseConvTensor``, and the helpers that check, scatter and convert its members."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from shiplap.plugin_api import error
from shiplap.plugin_api.memos import built_outside_modes
from shiplap_sparse3d.axes import expand_axes, per_axis, same_number, same_numbers
from shiplap_sparse3d.coords import as_many_rows, check_rows
from shiplap_sparse3d.geometry import Geometry
from shiplap_sparse3d.reentrant import inside_checkpoint, made_inside, refuse_checkpoint_in_eager
from shiplap_sparse3d.rows import cells_in_use, rows_where
from shiplap_sparse3d.spconv.record import ConvAlgo, ImplicitGemmIndiceData, IndiceData, LayerWindow
from shiplap_sparse3d.spconv.sizes import assume_rows, cells_of, check_least, name_rows
from shiplap_sparse3d.spconv.timer import CUDAKernelTimer
from shiplap_sparse3d.spconv.tracing import is_proxy, proxy_among
from shiplap_sparse3d.spconv.unread import UnreadMembers, unread_member
from shiplap_sparse3d.sums import SummableTensor
from shiplap_sparse3d.tensor import SparseTensor

__all__ = [
    "ConvAlgo",
    "ImplicitGemmIndiceData",
    "IndiceData",
    "LayerWindow",
    "SparseConvTensor",
    "expand_nd",
    "scatter_nd",
]

# The kernels of these layers have up to three axes.
MAX_NDIM = 3


def expand_nd(ndim: int, val: int | Sequence[int]) -> list[int]:
    """Return a list of ``ndim`` ints, one for each axis. ``val`` is one number for all axes or a sequence of ``ndim``
    numbers.

    Raise ``SL208`` if the sequence has another length.
    """
    return list(per_axis(val, "spconv", ndim))


def check_ndim(where: str, ndim: int) -> None:
    """Raise ``SL208`` unless ``ndim``, the number of spatial axes, is from 1 to ``MAX_NDIM``. ``where`` is the layer's
    name in the message.
    """
    if not 1 <= ndim <= MAX_NDIM:
        raise error(
            "SL208",
            where=where,
            got=f"{ndim} spatial axes",
            expected=f"1 to {MAX_NDIM}",
            fix="fold an axis into the batch index where no layer convolves along it",
        )


def check_sparse(where: str, x: Any) -> bool:
    """Check that ``x`` is a sparse tensor with one row of features for each voxel. Return whether the forward pass of a
    reentrant checkpoint is running. While a graph is compiled, return False.

    Raise ``SL209`` if ``x`` is not a sparse tensor, and ``SL202`` if features and voxels differ in number. ``where`` is
    the layer's name.

    The check is not made when the tensor is created, because models replace the features first and assign the voxels
    afterwards.
    """
    if not isinstance(x, SparseConvTensor):
        fix = "pass SparseConvTensor(features, indices, spatial_shape, batch_size)"
        raise error("SL209", where=where, got=type(x).__name__, expected="a SparseConvTensor", fix=fix)
    if is_compiling():  # nothing is asked of a graph, which would be traced through all of it
        return False
    if x._features.shape[0] != x._indices.shape[0]:
        check_rows(where, x._features, x._indices.shape[0])
    return refuse_checkpoint_in_eager(where, x)


def autocast_features(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in the dtype of ``torch.autocast`` for its device. Return it unchanged if it is float64 or if
    autocast is off.
    """
    device = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def scatter_nd(indices: Tensor, updates: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of ``shape`` and of the dtype of ``updates``. It has ``updates`` at the positions ``indices [...,
    d]``, which must be distinct, and zeros elsewhere.
    """
    return updates.new_zeros(*shape).index_put(tuple(indices.long().unbind(-1)), updates)


@built_outside_modes
def indices_of(coords: Tensor, ndim: int) -> Tensor:
    """Return ``coords``, the ``int32 [n, 4]`` coordinates (scene and three axes) of a ``Geometry``, as spconv's ``[n, 1
    + ndim]``. The columns are the scene and the last ``ndim`` axes.
    """
    return coords if ndim == MAX_NDIM else torch.cat([coords[:, :1], coords[:, -ndim:]], 1)


class SparseConvTensor(SummableTensor):
    """Features on the active voxels of a batch of scenes, as spconv's layers take and return them.

    Args:
        features: ``[n, c]``.
        indices: ``int32 [n, 1 + ndim]`` rows (batch, then one index per axis), distinct and inside the grid.
        spatial_shape: cells per axis, one to three.
        batch_size: number of scenes.
        grid, benchmark, permanent_thrust_allocator, enable_timer, force_algo: accepted, but no layer reads them.
        voxel_num: passed on to the tensors made from this one.
        indice_dict: records of earlier layers by ``indice_key``.

    Raises:
        ArgumentError: ``SL208`` for four axes and for arguments that do not fit each other.
    """

    spelled = "x.replace_feature", "x.features", "SparseSequential"
    grid, voxel_num, benchmark = unread_member("grid"), unread_member("voxel_num"), unread_member("benchmark")
    benchmark_record, force_algo = unread_member("benchmark_record"), unread_member("force_algo")
    _timer = unread_member("timer")  # models copy it from one tensor to the next
    thrust_allocator: Any = None
    int8_scale: Any = None
    checkpointed: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a new object of this class. While ``torch.fx`` traces and an argument is its proxy (stand-in), return
        a proxy of the constructor's call instead.
        """
        if is_compiling() or (proxy := proxy_among((*args, *kwargs.values()))) is None:
            return object.__new__(cls)
        return proxy.tracer.create_proxy("call_function", cls, args, kwargs)  # torch.fx is tracing

    def __init__(
        self,
        features: Tensor,
        indices: Tensor,
        spatial_shape: Sequence[int] | np.ndarray[Any, Any] | Tensor,
        batch_size: int | Tensor,
        grid: Tensor | None = None,
        voxel_num: Tensor | None = None,
        indice_dict: dict[str, IndiceData] | None = None,
        benchmark: bool = False,
        permanent_thrust_allocator: bool = False,
        enable_timer: bool = False,
        force_algo: ConvAlgo | None = None,
    ) -> None:
        """Set the members from the arguments, which the class describes. Raise ``SL208`` or ``SL204`` if features,
        indices and spatial shape do not fit together.

        The number of rows is checked later, by the first layer.
        """
        self._features = features
        self._indices = indices
        # The geometry is made when a layer first needs it: models may still assign other indices.
        self._known: tuple[Geometry, Tensor] | None = None
        self.spatial_shape = cells_of(spatial_shape)
        self.batch_size = int(batch_size) if isinstance(batch_size, Tensor) else batch_size
        self.indice_dict: dict[str, IndiceData] = {} if indice_dict is None else indice_dict
        self._unread = UnreadMembers(grid, voxel_num, benchmark, force_algo, CUDAKernelTimer(enable_timer), {})
        self.checkpointed = made_inside()
        self._check()

    def _check(self) -> None:
        """Raise ``SL208`` unless ``indices`` is a matrix with one column for the scene and one per spatial axis. Raise
        ``SL204`` unless its dtype is int32. Raise ``SL208`` or ``SL204`` for unsuitable features and for a
        ``batch_size`` below 1. In a graph, also give features and indices one number of rows.
        """
        where, shape = "SparseConvTensor", self.spatial_shape
        check_ndim(where, len(shape))
        self._check_features()
        if self._indices.ndim != 2:
            raise error("SL208", where=f"{where}, indices", got=f"{self._indices.ndim} dims", expected="2 dims")
        if self._indices.shape[1] != len(shape) + 1:
            got = f"{self._indices.shape[1]} columns of indices, {len(shape)} axes of spatial_shape"
            raise error("SL208", where=where, got=got, expected="one column for the batch and one per axis")
        if self._indices.dtype != torch.int32:
            raise error("SL204", where=f"{where}, indices", got=self._indices.dtype, expected="int32")
        check_least(where, [self.batch_size], lambda: f"batch_size {self.batch_size}")
        assume_rows(self._indices.shape[0])
        self._indices, self._features = name_rows(*as_many_rows(self._indices, self._features))

    def _check_features(self) -> None:
        """Raise ``SL208`` unless the features have two dims, and ``SL204`` if their dtype is quantised."""
        where, features = "SparseConvTensor, features", self._features
        if features.ndim != 2:
            raise error("SL208", where=where, got=f"{features.ndim} dims", expected="2 dims")
        if features.is_quantized:
            raise error("SL204", where=where, got=features.dtype, expected="a floating dtype")

    # --- what layers read ---------------------------------------------------------------------------------------------
    #
    # Torch 2.11 does not run the setter of a property in a graph: the getter gives what was assigned, and nothing else
    # that the setter does is done. So what runs in a graph does not read past the getters, and the geometry is compared
    # with the indices that it was made of.

    @property
    def features(self) -> Tensor:
        """The features ``[n, c]``, one row for each voxel."""
        return self._features

    @features.setter
    def features(self, val: Tensor) -> None:
        """Set the features to ``val [n, c]``. Models of spconv 1.x assign them."""
        self._features = val  # models of spconv 1.x assign them

    @property
    def indices(self) -> Tensor:
        """The voxels, ``int32 [n, 1 + ndim]``. The first column is the scene. The others are the coordinates in the
        order of ``spatial_shape``.
        """
        return self._indices

    @indices.setter
    def indices(self, val: Tensor) -> None:
        """Set the voxels to ``val``, ``int32 [n, 1 + ndim]``. The records of convolutions in ``indice_dict`` stay."""
        self._set_indices(val)

    @property
    def ndim(self) -> int:
        """The number of spatial axes."""
        return len(self.spatial_shape)

    @property
    def geometry(self) -> Geometry:
        """The voxels as a ``Geometry``, which holds coordinates of three axes and the neighbour tables built so far. It
        is rebuilt if other indices, another spatial shape or another batch size were assigned since its last use.
        """
        indices, shape, scenes = self.indices, tuple(self.spatial_shape), self.batch_size
        if self._known is not None:
            known, made_of = self._known
            same = same_numbers(known.spatial_shape, shape) and same_number(known.batch_size, scenes)
            if same and made_of is indices:
                return known
        assume_rows(indices.shape[0])
        made = Geometry(indices, shape, scenes)
        self._known = made, indices
        return made

    @property
    def is_quantized(self) -> bool:
        """False, since this package has no quantised sparse tensors."""
        return False

    def q_scale(self) -> float:
        """Raise ``SL208``. Only quantised tensors have a scale, and this package has none."""
        raise error("SL208", where="SparseConvTensor.q_scale", got=self.features.dtype, expected="a quantised tensor")

    @property
    def spatial_size(self) -> int:
        """The number of cells of one scene's grid, which is the product of ``spatial_shape``."""
        return math.prod(self.spatial_shape)

    def find_indice_pair(self, key: str | None) -> IndiceData | None:
        """Return the record (input voxels, output voxels and neighbours) that a layer stored with ``key`` as its
        ``indice_key``. Return None if there is none or if ``key`` is None.
        """
        return None if key is None else self.indice_dict.get(key)

    # --- tensors made from this one -----------------------------------------------------------------------------------

    def shadow_copy(self) -> SparseConvTensor:
        """Return a new sparse tensor with the same features, voxels and other members. It shares ``indice_dict`` and
        the neighbour tables with this one.
        """
        return self.replace_feature(self.features)

    def replace_feature(self, feature: Tensor) -> SparseConvTensor:
        """Return a new sparse tensor with the features ``feature [n, c]`` on the voxels of this one. It shares
        ``indice_dict`` and the neighbour tables with this one.
        """
        if is_compiling():
            return self.with_features(feature, None, self.indices)
        if is_proxy(feature):
            return SparseConvTensor(feature, self.indices, self.spatial_shape, self.batch_size)
        return self.with_features(feature, inside_checkpoint(), self._indices)

    def with_features(self, feature: Tensor, checkpointed: bool | None, indices: Tensor) -> SparseConvTensor:
        """Return a new sparse tensor with the features ``feature [n, c]`` on the voxels of this one, whose coordinates
        are passed as ``indices``. It shares ``indice_dict`` with this one.

        ``checkpointed`` is true inside a reentrant checkpoint, and false outside one. It is None in a graph, where
        the test for quantised features is left out.
        """
        # Every layer makes a tensor, and Dynamo traces each line of it: what has been checked once is carried over, and
        # what a graph is not asked is not called.
        other = object.__new__(SparseConvTensor)
        other._features, other._indices, other._known = feature, indices, self._known
        other.spatial_shape, other.batch_size = self.spatial_shape, self.batch_size
        other.indice_dict, other._unread = self.indice_dict, self._unread
        if checkpointed:
            other.checkpointed = True
        if feature.ndim != 2 or (checkpointed is not None and feature.is_quantized):
            other._check_features()
        return other

    def move(
        self, feature: Tensor, geometry: Geometry, indices: Tensor, spatial_shape: list[int], checkpointed: bool
    ) -> SparseConvTensor:
        """Return a new sparse tensor with the features ``feature [m, c]`` on other voxels of the same scenes. The
        voxels are given as ``geometry`` and as coordinates ``indices``. The new tensor has a copy of ``indice_dict``.
        ``checkpointed`` is whether the call runs inside a reentrant checkpoint.
        """
        other = object.__new__(SparseConvTensor)
        other._features, other._indices, other._known = feature, indices, (geometry, indices)
        other.spatial_shape, other.batch_size = list(spatial_shape), self.batch_size
        # A copy: records of this branch must not be visible to branches that began before.
        other.indice_dict, other._unread = self.indice_dict.copy(), self._unread
        if checkpointed:
            other.checkpointed = True
        if indices is not self._indices:
            assume_rows(indices.shape[0])
        return other

    def select_by_index(self, valid_indices: Tensor) -> SparseConvTensor:
        """Return a new sparse tensor with the voxels and features that ``valid_indices``, a mask ``bool [n]`` or row
        numbers, selects. The ``indice_dict`` of the new tensor is empty, since its records would describe other voxels.
        """
        # An op, so that a graph knows an upper bound of the number of rows.
        rows = rows_where(valid_indices) if valid_indices.dtype == torch.bool else valid_indices
        return self.replace_feature(self.features[rows]).onto(self.indices[rows])

    def onto(self, indices: Tensor) -> SparseConvTensor:
        """Replace the voxels of this tensor by ``indices``, replace its ``indice_dict`` by an empty one, and return
        this tensor. Its caller must have just created it, since other holders would see the change.
        """
        self._set_indices(indices)
        self.indice_dict = {}
        return self

    def _set_indices(self, indices: Tensor) -> None:
        """Set the voxels of this tensor to ``indices``. While a graph is compiled, also assert in it that there is at
        least one voxel.
        """
        self._indices = indices
        assume_rows(indices.shape[0])

    def minus(self) -> SparseConvTensor:
        """Return a new sparse tensor with the negated features on the voxels of this one."""
        return self.replace_feature(-self.features)

    def dequantize(self) -> SparseConvTensor:
        """Return a new sparse tensor with ``features.dequantize()`` at the voxels of this one."""
        return self.replace_feature(self.features.dequantize())

    @classmethod
    def from_dense(cls, x: Tensor) -> SparseConvTensor:
        """Return a sparse tensor with those cells of ``x`` in which any channel is not zero. ``x`` is a tensor
        ``[batch, *spatial, c]`` with a value for each cell, channels last.
        """
        indices, features = cells_in_use(x)
        return cls(features, indices, list(x.shape[1:-1]), x.shape[0])

    def dense(self, channels_first: bool = True) -> Tensor:
        """Return a tensor with a value for each cell, which is zero where there is no voxel. If ``channels_first`` is
        true, its shape is ``[batch, c, *spatial]``, and otherwise ``[batch, *spatial, c]``.
        """
        check_sparse("SparseConvTensor.dense", self)
        here = self.geometry
        if is_compiling():  # sizes of one source: those of the geometry may have come from another object
            shape = expand_axes(self.spatial_shape, "spatial_shape", self.ndim)
            here = Geometry.unchecked(here.coords, shape, self.batch_size, here.padded, here.ndim)
        cells = SparseTensor(self.features, geometry=here).dense()
        cells = cells.reshape(self.batch_size, self.features.shape[1], *self.spatial_shape)
        return cells.contiguous() if channels_first else cells.movedim(1, -1).contiguous()

    def plus(self, other: SparseConvTensor | Tensor) -> SparseConvTensor:
        """Return a new sparse tensor on the voxels of this one, whose features are the sum of its features and
        ``other``, row by row. ``other`` is a tensor, or a sparse tensor whose features are added.

        Return ``NotImplemented`` for another type.
        """
        if isinstance(other, SparseConvTensor):
            other = other.features
        return self.replace_feature(self.features + other) if isinstance(other, Tensor) else NotImplemented

    __add__ = __radd__ = __iadd__ = plus

    def __repr__(self) -> str:
        """Return the class and the shape of the features as text."""
        return f"SparseConvTensor[shape={self.features.shape}]"

    def __dir__(self) -> list[str]:
        """Return the names of the members. In a compiled graph, leave out the members that were set on this object."""
        # Models ask it for "replace_feature". No graph lists the names of object, and none of torch 2.11 those of self.
        return [*_NAMES] if is_compiling() else [*_NAMES, *self.__dict__]


_NAMES = dir(SparseConvTensor)
