"""Features of sparse voxels at any points of their grid: the nearest voxel's, or interpolated between eight.

Queries are ``float32 [b, l, 3]`` in units of voxels; row ``b`` of them belongs to scene ``b``. The centre of voxel (i,
j, k) is (i + 0.5, j + 0.5, k + 0.5). A voxel that is not there has the index -1 and nothing of it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor

import shiplap as sl
from shiplap.plugin_api import error
from shiplap_sparse3d.coords import GridLookup, check_coords, check_rows, refuse_rows, require_tensor
from shiplap_sparse3d.cpu import LIBRARY
from shiplap_sparse3d.ops import rows_under

__all__ = ["grid_sample_3d", "indice_weighted_sum", "indice_weighted_sum_grad", "nearest_map", "trilinear_map"]

_GRID = ("len(spatial_shape) == 3", "min(spatial_shape) >= 1")
_SORT = "24 * n + 49472"  # of sort_voxels (csrc/voxels.h)


# --- where to read ---------------------------------------------------------------------------------------------------


def _find_rows(lookup: GridLookup, cells: Tensor, shape: list[int]) -> Tensor:
    """Return the row of the voxel at each of ``cells [b, l, 3]``, found by ``lookup``, as ``int32 [b, l]``, or -1 if
    there is no voxel. The first index of ``cells`` is the scene. Cells are whole numbers in floating point. NaN and
    cells outside the grid ``shape`` have no voxel.
    """
    b, points, _ = cells.shape
    limit = torch.tensor(shape, dtype=torch.float64, device=cells.device)  # float32 has not every int32
    known = ((cells >= 0) & (cells.double() < limit)).all(2)
    scene = torch.arange(b, device=cells.device).view(b, 1, 1).expand(b, points, 1)
    # NaN and far values become -1 before the cast, whose result would be undefined.
    return lookup(torch.cat([scene, cells.where(known[..., None], -1.0).long()], 2))


def _present_voxels(op: str, coords: Tensor, shape: list[int]) -> GridLookup:
    """Return a lookup that finds the rows of the voxels ``coords`` by their coordinates in the grid ``shape``. Raise
    ``SL211`` for rows outside the grid and for duplicates. ``op`` is the op's name in the error.
    """
    check_coords(op, coords, shape)
    return GridLookup(coords, shape)


@sl.op("sparse3d::nearest_map", requires=_GRID)
def nearest_map(
    coords: Int32[Tensor, "n 4"], queries: Float32[Tensor, "b l 3"], spatial_shape: list[int]
) -> Int32[Tensor, "b l"]:
    """Return the row of the voxel that contains each query, ``int32 [b, l]``, or -1 if there is none. The first index
    of ``queries`` is the scene. Raise ``SL211`` for duplicate voxels and for voxels outside the grid.

    ``queries`` are points in units of voxels. Voxel (i, j, k) contains the points from (i, j, k) up to, and without, (i
    + 1, j + 1, k + 1).
    """
    return _find_rows(_present_voxels("nearest_map", coords, spatial_shape), queries.floor(), spatial_shape)


@sl.op("sparse3d::trilinear_map", outputs=("indices", "weights"), requires=_GRID)
def trilinear_map(
    coords: Int32[Tensor, "n 4"], queries: Float32[Tensor, "b l 3"], spatial_shape: list[int]
) -> tuple[Int32[Tensor, "b l 8"], Float32[Tensor, "b l 8"]]:
    """Return the rows of the eight voxels around each query, and their weights in trilinear interpolation. A missing
    voxel has the row -1 and the weight 0.

    Corner ``i`` lies ``(i & 1, i >> 1 & 1, i >> 2 & 1)`` from the lowest corner. The weights of the voxels that exist
    are divided by their sum. Raise ``SL211`` as ``subm_table`` does.
    """
    lookup = _present_voxels("trilinear_map", coords, spatial_shape)
    lowest = (queries - 0.5).floor()
    indices, weights = [], []
    for corner in range(8):
        cells = lowest + torch.tensor([corner & 1, corner >> 1 & 1, corner >> 2 & 1], device=queries.device)
        indices.append(_find_rows(lookup, cells, spatial_shape))
        # Centres of voxels are at integers + 0.5.
        weights.append((1 - (queries - cells - 0.5).abs()).prod(2).where(indices[-1] >= 0, 0.0))
    stacked = torch.stack(weights, 2)
    return torch.stack(indices, 2), (stacked / stacked.sum(2, keepdim=True).clamp_min(1e-12)).float()


# --- reading ---------------------------------------------------------------------------------------------------------


def _check_indices(op: str, indices: Tensor, rows: int) -> None:
    """Raise ``SL211`` if a row of ``indices [q, k]`` has a number outside ``[-1, rows)``. ``op`` is the op's name in
    the error.
    """
    refuse_rows(
        op, ((indices < -1) | (indices >= rows)).any(1), "indices row {row} has an entry outside " + f"[-1, {rows})"
    )


def _gather_features(feats: Tensor, indices: Tensor) -> Tensor:
    """Return ``feats[indices]`` in at least float32, ``[q, k, c]``, with zeros for the index -1."""
    wide = torch.promote_types(feats.dtype, torch.float32)
    return rows_under(feats, indices).to(wide)


@sl.op("sparse3d::indice_weighted_sum")
def indice_weighted_sum(
    feats: Float[Tensor, "n c"], indices: Int32[Tensor, "q k"], weights: Float32[Tensor, "q k"]
) -> Float[Tensor, "q c"]:
    """Return ``out[i] = sum_j weights[i, j] * feats[indices[i, j]]``. An index of -1 adds nothing, whatever its weight.
    Raise ``SL211`` for an index outside ``[-1, n)``.
    """
    _check_indices("indice_weighted_sum", indices, feats.shape[0])
    # A weight of NaN or infinity must not count where there is no voxel.
    share = torch.where(indices >= 0, weights, 0)[..., None]
    return (_gather_features(feats, indices) * share).sum(1).to(feats.dtype)


@sl.op("sparse3d::indice_weighted_sum_grad", requires=("rows >= 0",))
def indice_weighted_sum_grad(
    grad: Float[Tensor, "q c"], indices: Int32[Tensor, "q k"], weights: Float32[Tensor, "q k"], rows: int
) -> Float[Tensor, "rows c"]:
    """Return the gradient of ``indice_weighted_sum`` with respect to its features, ``[rows, c]``. ``grad`` is the
    gradient of the output, and ``rows`` is the number of rows of the features.

    Terms for the same row are added in ascending order of (i, j) on every device, so results do not depend on threads.
    Raise ``SL211`` as ``indice_weighted_sum`` does.
    """
    _check_indices("indice_weighted_sum_grad", indices, rows)
    # ``nonzero`` is ordered, which fixes the order of the sums.
    i, j = (indices >= 0).nonzero().unbind(1)
    wide = torch.promote_types(grad.dtype, torch.float32)
    share = grad[i].to(wide) * weights[i, j][:, None]
    return share.new_zeros(rows, grad.shape[1], dtype=share.dtype).index_add(0, indices[i, j].long(), share).to(grad)


def _weights_grad(outer: Tensor, inner: Tensor, indices: Tensor) -> Tensor:
    """Return the gradient of the weights ``[q, k]`` of a weighted sum, ``out[i, j] = outer[i] . inner[indices[i, j]]``,
    as ``float32 [q, k]``. It is 0 for the index -1.
    """
    return (outer[:, None] * _gather_features(inner, indices)).sum(2).float()


@indice_weighted_sum.backward(strided=True)
def _(grad: Tensor, saved: SimpleNamespace, needs: SimpleNamespace) -> dict[str, Tensor]:
    """Return the gradients of ``indice_weighted_sum`` with respect to its features and weights, as a dict by argument
    name. ``grad`` is the gradient of the result. An argument whose gradient autograd does not need (``needs``) is left
    out.
    """
    gradients = {}
    if needs.feats:
        gradients["feats"] = indice_weighted_sum_grad(grad, saved.indices, saved.weights, saved.feats.shape[0])
    if needs.weights:
        gradients["weights"] = _weights_grad(grad, saved.feats, saved.indices)
    return gradients


@indice_weighted_sum_grad.backward(strided=True)
def _(grad: Tensor, saved: SimpleNamespace, needs: SimpleNamespace) -> dict[str, Tensor]:
    """Return the gradients of ``indice_weighted_sum_grad`` with respect to its ``grad`` and ``weights``, as a dict by
    argument name. ``grad`` is the gradient of the result. An argument whose gradient autograd does not need (``needs``)
    is left out.
    """
    gradients = {}
    if needs.grad:
        gradients["grad"] = indice_weighted_sum(grad, saved.indices, saved.weights)
    if needs.weights:
        gradients["weights"] = _weights_grad(saved.grad, grad, saved.indices)
    return gradients


nearest_map.kernel("cpu", sl.cabi(LIBRARY, "sparse3d_nearest_map"), workspace=_SORT)
trilinear_map.kernel("cpu", sl.cabi(LIBRARY, "sparse3d_trilinear_map"), workspace=_SORT)
indice_weighted_sum.kernel("cpu", sl.cabi(LIBRARY, "sparse3d_indice_weighted_sum"))
indice_weighted_sum_grad.kernel(
    "cpu",
    sl.cabi(LIBRARY, "sparse3d_indice_weighted_sum_grad"),
    workspace="8 * (rows + q * k) + 192",
)


# --- public ----------------------------------------------------------------------------------------------------------


def grid_sample_3d(
    feats: Tensor, coords: Tensor, shape: Sequence[int], grid: Tensor, mode: str = "trilinear"
) -> Tensor:
    """Return the features of sparse voxels at the points ``grid``, ``[b, l, c]``, differentiable in ``feats``.

    Args:
        feats: ``[n, c]``.
        coords: ``int32 [n, 4]`` rows (batch, x, y, z), distinct.
        shape: ``(batches, channels, X, Y, Z)``. Only the grid ``X, Y, Z`` is used.
        grid: ``[b, l, 3]`` points in units of voxels, whose centres are at integers + 0.5.
        mode: ``"trilinear"`` interpolates between the existing ones of the eight voxels around the point.
            ``"nearest"`` takes the voxel that contains the point. Without such a voxel the result is zeros.

    Raises:
        ArgumentError: ``SL208`` for another ``mode`` or form of ``shape``, ``SL211`` for duplicate coordinates and
            those outside the grid, ``SL304`` if ``grid`` requires a gradient (detach it).
    """
    if len(shape) != 5:
        raise error(
            "SL208", where="grid_sample_3d", got=f"shape {tuple(shape)}", expected="(batches, channels, X, Y, Z)"
        )
    for name, value in (("feats", feats), ("coords", coords), ("grid", grid)):
        require_tensor(f"grid_sample_3d, argument {name!r}", value)
    check_rows("grid_sample_3d", feats, coords.shape[0])
    queries, spatial = grid.float(), list(shape[2:])
    if mode == "trilinear":
        indices, weights = trilinear_map(coords, queries, spatial)
    elif mode == "nearest":
        # Cells first: float32 may have a point that is just below a border of float64 in the next cell.
        indices = nearest_map(coords, grid.floor().float(), spatial)[..., None]
        # The nearest voxel is a weighted sum of one row.
        weights = torch.ones_like(indices, dtype=torch.float32)
    else:
        raise error("SL208", where="grid_sample_3d", got=f"mode {mode!r}", expected="trilinear or nearest")
    sampled: Tensor = indice_weighted_sum(feats, indices.flatten(0, 1), weights.flatten(0, 1))
    return sampled.view(*grid.shape[:2], feats.shape[1])
