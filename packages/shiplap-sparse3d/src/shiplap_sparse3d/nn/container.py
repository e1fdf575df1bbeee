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
    """A container in which each sparse module receives the sparse tensor, and any other module (batch norm, activation,
    linear) receives its features.

    Modules behind a :class:`GlobalPool` receive the ``torch.Tensor`` that it returns. A module that
    ``torch.nn.SyncBatchNorm.convert_sync_batchnorm`` has put in place of a batch norm counts voxels on every device, as
    :class:`shiplap_sparse3d.SyncBatchNorm` does.

    Raises:
        ArgumentError: ``SL208`` for a batch norm of torch whose statistics would include padding rows.
    """

    def forward(self, x: SparseTensor) -> SparseTensor | Tensor:
        """Return ``x`` after all modules in turn. While ``x`` is a sparse tensor, sparse modules receive it, and other
        modules receive and replace its features. A ``torch.Tensor`` is passed to every module unchanged.
        """
        if isinstance(x, SparseTensor):
            self._check_gradient(x)
        for module in self:
            x = _apply_module(module, x)
        return x


def _apply_module(module: nn.Module, x: Any) -> Any:
    """Return ``module`` applied to ``x``. If ``x`` is a sparse tensor and ``module`` is not a sparse module, the module
    is applied to the features of ``x``. Otherwise it is applied to ``x`` itself. Raise ``SL208`` for a batch norm of
    torch that uses the statistics of its batch if ``x`` has padding rows.
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
        # The rules above apply to each of its modules.
        if type(module) is nn.Sequential and not (module._forward_hooks or module._forward_pre_hooks):
            for inner in module:
                x = _apply_module(inner, x)
            return x
    return x.replace(module(x.feats))


def _refuse_learning(module: nn.Module) -> None:
    """Raise ``SL208`` if ``module``, or a module inside it, is a batch norm of torch that uses the statistics of its
    batch: in training mode, or without running statistics. These would include rows of padding.
    """
    for inner in module.modules():
        if not isinstance(inner, (nn.BatchNorm1d, nn.SyncBatchNorm)):
            continue
        if inner.training or (inner.running_mean is None and inner.running_var is None):
            raise error(
                "SL208",
                where=f"Sequential, {type(inner).__name__}",
                got="rows of padding",
                expected="statistics of voxels",
                fix="use sparse3d.BatchNorm",
            )
