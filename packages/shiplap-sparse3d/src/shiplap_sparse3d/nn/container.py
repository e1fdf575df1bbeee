"""What tells sparse modules from those that work on rows of features, and the container that needs to know."""

from __future__ import annotations

from torch import Tensor, nn

from shiplap.extend import error
from shiplap_sparse3d.tensor import SparseTensor

__all__ = ["Sequential", "SparseModule"]


class SparseModule(nn.Module):
    """A module that takes a ``SparseTensor``. Subclass it to be handed one by :class:`Sequential`."""

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


class Sequential(nn.Sequential, SparseModule):
    """Sparse modules get the tensor, any other module (batch norm, activation, linear) its features.

    Behind a :class:`GlobalPool` everything gets the plain tensor that it returns.

    Raises:
        ArgumentError: SL208 for a batch norm of torch that would learn from padding rows.
    """

    def forward(self, x: SparseTensor) -> SparseTensor | Tensor:
        for module in self:
            if isinstance(x, SparseTensor) and not isinstance(module, SparseModule):
                if x.geometry.padded:
                    _refuse_learning(module)
                x = x.replace(module(x.feats))
            else:
                x = module(x)
        return x


def _refuse_learning(module: nn.Module) -> None:
    """Refuse batch norms of torch, at any depth, that would learn from rows of padding."""
    for inner in module.modules():
        if inner.training and isinstance(inner, (nn.BatchNorm1d, nn.SyncBatchNorm)):
            raise error(
                "SL208",
                where=f"Sequential, {type(inner).__name__}",
                got="rows of padding",
                expected="statistics of voxels",
                fix="use sparse3d.BatchNorm",
            )
