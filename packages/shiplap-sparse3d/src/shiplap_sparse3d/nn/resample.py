"""Resampling between grids without weights: nearest upsampling, pixel shuffle and its inverse."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d import pooling
from shiplap_sparse3d.axes import Axes, expand_axes, per_axis
from shiplap_sparse3d.geometry import Strided
from shiplap_sparse3d.nn.module import SparseModule, voxels_of
from shiplap_sparse3d.steps import StepWindow
from shiplap_sparse3d.tensor import SparseTensor

__all__ = [
    "SparsePixelShuffle1d",
    "SparsePixelShuffle2d",
    "SparsePixelShuffle3d",
    "SparsePixelShuffle4d",
    "SparsePixelUnshuffle1d",
    "SparsePixelUnshuffle2d",
    "SparsePixelUnshuffle3d",
    "SparsePixelUnshuffle4d",
    "SparseUpsample1d",
    "SparseUpsample2d",
    "SparseUpsample3d",
    "SparseUpsample4d",
]


class Resampling(SparseModule):
    """The base of the modules that lead from a coarse grid to a finer one or back. ``factor`` is the number of finer
    cells along each axis of a coarse cell.
    """

    ndim = 3

    def __init__(self, factor: Axes, **others: Any) -> None:
        """Set the factor for each axis."""
        super().__init__()
        self._refuse_arguments(others)
        self.factor = per_axis(factor, "factor", self.ndim, 1)

    def _step_to_finer(self, x: SparseTensor, coordinates: Tensor | SparseTensor | None) -> Strided:
        """Return the step from ``x`` to the finer grid, which holds the output voxels and the neighbour tables onto
        them. If ``coordinates`` are given, they are the output voxels. Otherwise the outputs are all finer cells that
        the voxels of ``x`` span.
        """
        self._check_axes(x, self.ndim)
        if coordinates is None:
            return x.geometry.transposed(self.factor, self.factor)
        return x.geometry.onto(voxels_of(coordinates, x), self._window(up=True), plain=True)

    def _window(self, *, up: bool) -> StepWindow:
        """Return the window that divides the fine grid into blocks of ``factor`` cells along each axis. Kernel size and
        stride are ``factor``, the padding is 0 and the dilation is 1.

        If ``up`` is true, the window is for the step from the coarse to the fine grid. Otherwise it is for the step
        from the fine to the coarse grid.
        """
        factor = expand_axes(self.factor, "factor", self.ndim)
        zeros, ones = expand_axes(0, "padding", self.ndim, 0), expand_axes(1, "dilation", self.ndim)
        return StepWindow(factor, factor, zeros, ones, zeros if up else None)

    def extra_repr(self) -> str:
        """Return the factor as a string, for the module's ``repr``."""
        return f"factor={self.factor}"


class SparseUpsample3d(Resampling):
    """A nearest upsampling, in which each cell of the finer grid gets the features of the voxel that spans it.

    Args:
        factor: cells of the finer grid for each cell, an int or one per axis.

    Shape: ``feats [m, c] -> [n, c]`` on all cells that the voxels span. The second argument of a call, a sparse tensor
    or coordinates, can give other output voxels. Output voxels that no voxel spans get zeros.
    """

    def forward(self, x: SparseTensor, coordinates: Tensor | SparseTensor | None = None) -> SparseTensor:
        """Return ``x`` on a grid finer by ``factor``, as a sparse tensor. Each finer cell that a voxel spans has the
        voxel's features. If ``coordinates`` are given, they are the output voxels, with zeros where no voxel of ``x``
        spans them.
        """
        step = self._step_to_finer(x, coordinates)
        plan = step.plan.unsorted()
        # Each finer cell lies in the block of one voxel, so the sum has one summand.
        feats = pooling.sum_pool(x.feats, plan.table, plan.back[0] if plan.back else None)
        return SparseTensor(feats, geometry=step.geometry)


class SparsePixelShuffle3d(Resampling):
    """A pixel shuffle, in which the channels of each voxel become cells of a finer grid. The values are those of
    ``torch.nn.PixelShuffle`` at these cells.

    A voxel spans ``k = prod(factor)`` cells, numbered with the last axis fastest. Channel ``c * k + v`` becomes channel
    ``c`` of cell ``v``.

    Args:
        factor: as in :class:`SparseUpsample3d`. The second argument of a call gives the output voxels, as there.

    Shape: ``feats [m, c * k] -> [n, c]``.
    """

    def forward(self, x: SparseTensor, coordinates: Tensor | SparseTensor | None = None) -> SparseTensor:
        """Return ``x`` on a grid finer by ``factor``, as a sparse tensor. The ``V * c`` channels of a voxel become
        ``c`` channels of each of the ``V`` finer cells that it spans. If ``coordinates`` are given, they are the output
        voxels. Raise ``SL202`` if ``V`` does not divide the number of channels.
        """
        taps = math.prod(self.factor)
        if x.feats.shape[1] % taps:
            got, expected = f"{x.feats.shape[1]} channels", f"a multiple of {taps}"
            raise error("SL202", where=type(self).__name__, got=got, expected=expected)
        step = self._step_to_finer(x, coordinates)
        table = step.plan.unsorted().table
        # Each finer cell lies in one block, so it has one hit at most.
        hit, tap = (table >= 0).int().max(1)
        values = (
            x.feats.reshape(x.feats.shape[0], x.feats.shape[1] // taps, taps).transpose(1, 2).flatten(0, 1)
        )  # a row for each voxel and tap
        row = table.gather(1, tap[:, None])[:, 0].clamp_min(0).long() * taps + tap
        feats = _rows_or_zeros(values, torch.where(hit > 0, row, -1))
        return SparseTensor(feats, geometry=step.geometry)


class SparsePixelUnshuffle3d(Resampling):
    """A pixel unshuffle, in which the finer cells of each coarser cell become its channels. The values are those of
    ``torch.nn.PixelUnshuffle`` at the cells that contain a voxel.

    Finer cells without a voxel give zeros. This is the inverse of :class:`SparsePixelShuffle3d` onto the voxels of its
    input.

    Args:
        factor: as in :class:`SparseUpsample3d`.

    Shape: ``feats [n, c] -> [m, c * k]`` on the cells ``floor(c / factor)``, or on the voxels of the second argument of
    a call.
    """

    def forward(self, x: SparseTensor, coordinates: Tensor | SparseTensor | None = None) -> SparseTensor:
        """Return ``x`` on a grid coarser by ``factor``, as a sparse tensor. A coarser cell has the channels of the
        ``V`` finer cells that it spans, with zeros for cells without a voxel. Channel ``i`` of finer cell ``v`` becomes
        channel ``i * V + v``. If ``coordinates`` are given, they are the output voxels.
        """
        self._check_axes(x, self.ndim)
        if coordinates is None:
            step = x.geometry.floored(self.factor, self.factor, centred=False)
        else:
            step = x.geometry.onto(voxels_of(coordinates, x), self._window(up=False), plain=True)
        table = step.plan.unsorted().table
        feats = _rows_or_zeros(x.feats, table.flatten().long()).view(*table.shape, x.feats.shape[1])
        return SparseTensor(feats.transpose(1, 2).flatten(1), geometry=step.geometry)


def _rows_or_zeros(feats: Tensor, rows: Tensor) -> Tensor:
    """Return ``feats[rows]`` for ``feats [n, c]``, with zeros where a number in ``rows`` is -1."""
    padded = torch.nn.functional.pad(feats, (0, 0, 0, 1))
    return padded.index_select(0, torch.where(rows < 0, feats.shape[0], rows))


class SparseUpsample4d(SparseUpsample3d):
    """A :class:`SparseUpsample3d` for voxels with four spatial axes."""

    ndim = 4


class SparseUpsample2d(SparseUpsample3d):
    """A :class:`SparseUpsample3d` for voxels with two spatial axes."""

    ndim = 2


class SparseUpsample1d(SparseUpsample3d):
    """A :class:`SparseUpsample3d` for voxels with one spatial axis."""

    ndim = 1


class SparsePixelShuffle4d(SparsePixelShuffle3d):
    """A :class:`SparsePixelShuffle3d` for voxels with four spatial axes."""

    ndim = 4


class SparsePixelShuffle2d(SparsePixelShuffle3d):
    """A :class:`SparsePixelShuffle3d` for voxels with two spatial axes."""

    ndim = 2


class SparsePixelShuffle1d(SparsePixelShuffle3d):
    """A :class:`SparsePixelShuffle3d` for voxels with one spatial axis."""

    ndim = 1


class SparsePixelUnshuffle4d(SparsePixelUnshuffle3d):
    """A :class:`SparsePixelUnshuffle3d` for voxels with four spatial axes."""

    ndim = 4


class SparsePixelUnshuffle2d(SparsePixelUnshuffle3d):
    """A :class:`SparsePixelUnshuffle3d` for voxels with two spatial axes."""

    ndim = 2


class SparsePixelUnshuffle1d(SparsePixelUnshuffle3d):
    """A :class:`SparsePixelUnshuffle3d` for voxels with one spatial axis."""

    ndim = 1
