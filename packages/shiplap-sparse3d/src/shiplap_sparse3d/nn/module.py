"""The base class of modules that take a ``SparseTensor`` and not rows of features."""

from __future__ import annotations

from torch import nn

from shiplap.plugin_api import error
from shiplap_sparse3d.coords import check_rows
from shiplap_sparse3d.reentrant import refuse_checkpoint as refuse_reentrant
from shiplap_sparse3d.tensor import SparseTensor

__all__ = ["SparseModule"]


class SparseModule(nn.Module):
    """A module that takes a ``SparseTensor``. Subclass it to be handed one by :class:`Sequential`."""

    def _check_gradient(self, x: SparseTensor) -> None:
        """SL215 where a reentrant checkpoint would lose the gradient of ``x``."""
        refuse_reentrant(type(self).__name__, x)

    def _check_axes(self, x: SparseTensor, ndim: int) -> None:
        if not isinstance(x, SparseTensor):
            raise error(
                "SL209",
                where=type(self).__name__,
                got=f"a {type(x).__name__}",
                expected="a SparseTensor",
                fix="pass sparse3d.SparseTensor(feats, coords, spatial_shape)",
            )
        if x.geometry.ndim != ndim:
            raise error(
                "SL201",
                where=type(self).__name__,
                got=f"voxels with {x.geometry.ndim} axes",
                expected=f"{ndim} axes",
                fix="use the module of that name for as many axes",
            )
        self._check_gradient(x)
        check_rows(type(self).__name__, x.feats, x.geometry.coords.shape[0])
