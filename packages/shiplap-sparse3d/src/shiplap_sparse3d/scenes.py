"""Scenes put together and cut: batches of a data loader, unions of voxels, boxes of them, and their neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from shiplap.plugin_api import error
from shiplap_sparse3d.axes import Axes, per_axis
from shiplap_sparse3d.tensor import SparseTensor


def require_sparse(where: str, *tensors: Any) -> None:
    """Raise ``SL209`` if one of ``tensors`` is not a ``SparseTensor``, and ``SL208`` if there is none. ``where`` names
    the function or module in the error.
    """
    if not tensors:
        raise error("SL208", where=where, got="no tensors", expected="1 or more")
    for x in tensors:
        if not isinstance(x, SparseTensor):
            got, fix = f"a {type(x).__name__}", "pass sparse3d.SparseTensor(feats, coords, spatial_shape)"
            raise error("SL209", where=where, got=got, expected="a SparseTensor", fix=fix)


def cat(tensors: Sequence[SparseTensor], dim: int = 1) -> SparseTensor:
    """Return one sparse tensor with the channels (``dim`` 1) or the scenes (``dim`` 0) of all ``tensors`` in turn.

    Raises:
        ArgumentError: ``SL202`` for channels on different voxels or scenes of different grids, ``SL208`` for another
            ``dim``.
    """
    where = f"sparse3d.cat, dim {dim}"
    require_sparse(where, *tensors)
    first = tensors[0]
    for other in tensors[1:]:
        if dim == 1 and not first.geometry.same(other.geometry):
            raise error(
                "SL202", where=where, got=f"{first} and {other} on other voxels", expected="tensors on the same voxels"
            )
        if dim == 0 and first.spatial_shape != other.spatial_shape:
            raise error("SL202", where=where, got=f"{first} and {other}", expected="grids of one size")
    if dim == 1:
        return first.replace(torch.cat([t.feats for t in tensors], 1))
    if dim != 0:
        raise error("SL208", where=where, got=dim, expected="0 (scenes) or 1 (channels)")
    moved, scenes = [], 0
    for t in tensors:
        b = t.coords[:, :1]
        # Padding keeps its -1.
        moved.append(torch.cat([torch.where(b < 0, b, b + scenes), t.coords[:, 1:]], 1))
        scenes += t.batch_size
    padded = any(t.geometry.padded for t in tensors)
    return first._with_voxels(torch.cat([t.feats for t in tensors]), torch.cat(moved), scenes, padded=padded)


def collate(samples: Sequence[Any]) -> Any:
    """Return the batch of ``samples``, each of which becomes a scene. This is a ``collate_fn`` for ``DataLoader``.

    Sparse tensors become one tensor with as many scenes. Cells, ``int32 [n_i, d]``, get the number of their scene as
    the first column and are joined, as the coordinates of a ``SparseTensor``. Other tensors of at least one dimension,
    such as features and labels, are joined along the first one. Arrays of NumPy become tensors. Tuples, lists and dicts
    are collated element by element. Anything else is passed to torch's ``default_collate``.

    Raises:
        ArgumentError: ``SL208`` for no samples, ``SL202`` for samples of different structure, channels or grids.
    """
    if not len(samples):
        raise error("SL208", where="sparse3d.collate", got="no samples", expected="1 or more")
    first = samples[0]
    if any(type(sample) is not type(first) for sample in samples):
        kinds = ", ".join(dict.fromkeys(type(sample).__name__ for sample in samples))
        raise error("SL202", where="sparse3d.collate", got=f"samples of {kinds}", expected="samples of one type")
    if isinstance(first, SparseTensor):
        return cat(samples, 0)
    if isinstance(first, np.ndarray) and first.ndim and first.dtype.kind in "biufc":  # numbers
        return _join_rows([*map(torch.from_numpy, samples)])
    if isinstance(first, Tensor) and first.dim():
        return _join_rows(samples)
    if isinstance(first, Mapping):
        _check_structure([sorted(map(str, sample)) for sample in samples])
        return {name: collate([sample[name] for sample in samples]) for name in first}
    if isinstance(first, (tuple, list)):
        _check_structure([len(sample) for sample in samples])
        parts = [collate(part) for part in zip(*samples, strict=True)]
        # A named tuple takes its members one by one.
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    try:
        return default_collate([*samples])
    except TypeError:  # paths, numbers of other libraries: the samples themselves
        return [*samples]


def _check_structure(found: Sequence[Any]) -> None:
    """Raise ``SL202`` unless all elements of ``found`` are equal. Each element describes the structure of a sample to
    collate.
    """
    if any(other != found[0] for other in found):
        got = ", ".join(map(str, dict.fromkeys(map(str, found))))
        raise error("SL202", where="sparse3d.collate", got=f"samples with {got}", expected="samples of one structure")


def _join_rows(samples: Sequence[Tensor]) -> Tensor:
    """Return the rows of all samples as one tensor. Coordinates (``int32`` matrices) get the number of their sample as
    a first column. Raise ``SL202`` if the samples differ in more than their numbers of rows.
    """
    first = samples[0]
    if any(sample.dim() != first.dim() or sample.shape[1:] != first.shape[1:] for sample in samples):
        got = ", ".join(str(tuple(sample.shape)) for sample in samples)
        raise error("SL202", where="sparse3d.collate", got=got, expected="tensors that differ in their rows alone")
    if first.dtype == torch.int32 and first.dim() == 2:
        samples = [torch.cat([torch.full_like(cells[:, :1], b), cells], 1) for b, cells in enumerate(samples)]
    return torch.cat([*samples])


def union(tensors: Sequence[SparseTensor]) -> SparseTensor:
    """Return the sum of sparse tensors on any voxels of one grid, on the union of their voxels. Where a tensor has no
    voxel, it counts as zero.

    Voxels are in ascending (batch, x, y, z) order, unless all tensors are on the same voxels. Their number depends on
    the data, so the host waits for a GPU.

    Raises:
        ArgumentError: ``SL202`` for other grids, batches or channels, ``SL208`` for padded tensors and for none.
    """
    where = "sparse3d.union"
    require_sparse(where, *tensors)
    first = tensors[0]
    total = first.feats
    for other in tensors[1:]:
        grids = first.spatial_shape != other.spatial_shape or first.batch_size != other.batch_size
        if grids or first.feats.shape[1] != other.feats.shape[1]:
            raise error(
                "SL202", where=where, got=f"{first} and {other}", expected="one grid, batch and number of channels"
            )
    # Tensors on the same voxels need no union, and the sum keeps the tables.
    if all(first.geometry.same(other.geometry) for other in tensors[1:]):
        for other in tensors[1:]:
            total = total + other.feats
        return first.replace(total)
    if any(x.geometry.padded for x in tensors):
        raise error("SL208", where=where, got="padded tensors on other voxels", expected="tensors without padding")
    feats, here = torch.cat([x.feats for x in tensors]), first.geometry
    there, plans = here.union(*(x.geometry for x in tensors[1:]))
    # The row in the union for each row of the tensors.
    rows = torch.cat([plan.t.table[:, 0] for plan in plans])
    total = feats.new_zeros(there.coords.shape[0], feats.shape[1]).index_add(0, rows.long(), feats)
    return SparseTensor(total, geometry=there)


def crop(x: SparseTensor, low: Axes, high: Axes) -> SparseTensor:
    """Return the voxels of ``x`` in the box of cells from ``low`` up to, and without, ``high``, on the same grid. Each
    bound is one int, or one for each axis. In a padded tensor the voxels outside the box become padding, so the number
    of rows stays.
    """
    require_sparse("sparse3d.crop", x)
    ndim = x.geometry.ndim
    bounds = [torch.tensor(per_axis(value, name, ndim)) for value, name in ((low, "low"), (high, "high"))]
    start, stop = (bound.to(x.coords.device) for bound in bounds)
    cells = x.coords[:, 1:]
    return x[((cells >= start) & (cells < stop)).all(1)]


def neighbor_indexes(x: SparseTensor, kernel_size: Axes = 3, dilation: Axes = 1) -> Tensor:
    """Return the row of the voxel at each cell of a kernel centred on each voxel, as ``int32 [n, k]``, or -1 if there
    is none. The cells are in the order of a convolution's weight, the last axis fastest. ``kernel_size`` and
    ``dilation`` are one number for all axes, or one for each. ``feats[indexes]`` are the neighbours' features where the
    result ``indexes`` is not -1.
    """
    require_sparse("sparse3d.neighbor_indexes", x)
    # Row numbers have no gradient, so the tables of the way back are not needed.
    table: Tensor = x.geometry.subm(kernel_size, dilation, back=False).unsorted().table
    return table
