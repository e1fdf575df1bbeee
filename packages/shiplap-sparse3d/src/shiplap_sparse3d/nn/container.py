"""The container of modules that take a ``SparseTensor`` and of modules that take its features."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shiplap.plugin_api import error
from shiplap_sparse3d.nn import norm
from shiplap_sparse3d.nn.module import SparseModule
from shiplap_sparse3d.tensor import SparseTensor

__all__ = ["Sequential"]


class Sequential(nn.Sequential, SparseModule):
    """Container in which sparse modules get the sparse tensor, and any other module (batch norm, activation, linear)
    its features.

    Behind a :class:`GlobalPool` everything gets the plain tensor that it returns. What
    ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` puts in place of a batch norm counts voxels, as
    :class:`shiplap_sparse3d.SyncBatchNorm` does, on every device.

    Raises:
        ArgumentError: SL208 for a batch norm of torch that would learn from padding rows.
    """

    def forward(self, x: SparseTensor) -> SparseTensor | Tensor:
        """Return ``x`` after all modules in turn. Sparse modules get the sparse tensor, and torch's own modules get its
        features. A plain tensor goes through all of them.
        """
        if isinstance(x, SparseTensor):
            self._check_gradient(x)
        for module in self:
            x = _apply_module(module, x)
        return x


def _apply_module(module: nn.Module, x: Any) -> Any:
    """Return ``module`` applied to ``x``: to a sparse tensor if the module takes one, to its features otherwise, or to
    a plain tensor. Raises SL208 for a batch norm that would learn from padding.
    """
    if not isinstance(x, SparseTensor) or isinstance(module, SparseModule):
        return module(x)
    if type(module) is nn.SyncBatchNorm and norm.shares_statistics(module):
        return x.replace(norm.shared_norm(module, x))
    if x.geometry.padded:
        _refuse_learning(module)
    if torch.compiler.is_compiling():
        if isinstance(module, (nn.BatchNorm1d, nn.GroupNorm)):
            return module(x)  # torch's function asks how many rows there are, that of a sparse tensor does not
        if type(module) is nn.Sequential and not (module._forward_hooks or module._forward_pre_hooks):
            for inner in module:
                x = _apply_module(inner, x)
            return x
    return x.replace(module(x.feats))


def _refuse_learning(module: nn.Module) -> None:
    """Raise SL208 for a batch norm of torch in ``module``, at any depth, that is in training mode and would learn from
    rows of padding.
    """
    for inner in module.modules():
        if inner.training and isinstance(inner, (nn.BatchNorm1d, nn.SyncBatchNorm)):
            raise error(
                "SL208",
                where=f"Sequential, {type(inner).__name__}",
                got="rows of padding",
                expected="statistics of voxels",
                fix="use sparse3d.BatchNorm",
            )
