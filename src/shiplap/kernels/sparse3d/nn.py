"""Modules. Weights are ``[co, kx, ky, kz, ci]`` (spconv's KRSC), initialised like ``torch.nn.Conv3d``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shiplap.errors import error
from shiplap.kernels.sparse3d.plan import Plan
from shiplap.kernels.sparse3d.tensor import SparseTensor, triple

__all__ = ["Sequential", "SparseConv3d", "SparseInverseConv3d", "SubMConv3d"]


class _Conv(nn.Module):
    """Weight, bias and the call every sparse convolution shares."""

    def __init__(self, ci: int, co: int, k: int | Sequence[int], *, bias: bool, **factory: Any) -> None:
        super().__init__()
        self.ci, self.co, self.kernel = ci, co, triple(k, "kernel")
        self.weight = nn.Parameter(torch.empty(co, *self.kernel, ci, **factory))
        self.bias = nn.Parameter(torch.empty(co, **factory)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Kaiming uniform over the fan-in ``ci * k``, as ``torch.nn.Conv3d`` does."""
        fan_in = self.ci * math.prod(self.kernel)
        bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def _convolve(self, feats: Tensor, plan: Plan) -> Tensor:
        return plan.conv(feats, self.weight.flatten(1, 3), self.bias)

    def extra_repr(self) -> str:
        return f"{self.ci}, {self.co}, kernel={self.kernel}, bias={self.bias is not None}"


class SubMConv3d(_Conv):
    """Submanifold convolution: outputs on the input's voxels only (Graham et al., CVPR 2018).

    Args:
        ci, co: input and output channels.
        k: kernel size, one int or one per axis.
        dilation: spacing of the taps.
        bias: whether to add one.

    Shape: ``feats [n, ci] -> [n, co]`` on the same coordinates.
    """

    def __init__(
        self,
        ci: int,
        co: int,
        k: int | Sequence[int],
        dilation: int | Sequence[int] = 1,
        bias: bool = True,
        **factory: Any,
    ) -> None:
        super().__init__(ci, co, k, bias=bias, **factory)
        self.dilation = triple(dilation, "dilation")

    def forward(self, x: SparseTensor) -> SparseTensor:
        return x.replace(self._convolve(x.feats, x.geometry.subm(self.kernel, self.dilation)))


class SparseConv3d(_Conv):
    """Strided convolution: outputs wherever the kernel reaches an input voxel, as ``torch.nn.Conv3d`` on those cells.

    Args:
        ci, co, k, dilation, bias: as in :class:`SubMConv3d`.
        stride: step between outputs.
        padding: cells added on each side.

    Shape: ``feats [n, ci] -> [m, co]`` on the coarser grid; ``m`` depends on the coordinates.
    """

    def __init__(
        self,
        ci: int,
        co: int,
        k: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        bias: bool = True,
        **factory: Any,
    ) -> None:
        super().__init__(ci, co, k, bias=bias, **factory)
        self.stride, self.padding = triple(stride, "stride"), triple(padding, "padding")
        self.dilation = triple(dilation, "dilation")

    def forward(self, x: SparseTensor) -> SparseTensor:
        step = x.geometry.strided(self.kernel, self.stride, self.padding, self.dilation)
        return SparseTensor(self._convolve(x.feats, step.plan), geometry=step.geometry)


class SparseInverseConv3d(_Conv):
    """The way back of the strided convolution that made the input's voxels: transposed convolution onto its inputs.

    Args:
        ci, co, bias: as in :class:`SubMConv3d`.
        k: the kernel size of that strided convolution.

    Shape: ``feats [m, ci] -> [n, co]`` on the finer coordinates. Equals ``conv_transpose3d`` at those cells.

    Raises:
        ArgumentError: SL208 when the input did not come from a strided convolution with this kernel.
    """

    def __init__(self, ci: int, co: int, k: int | Sequence[int], bias: bool = True, **factory: Any) -> None:
        super().__init__(ci, co, k, bias=bias, **factory)

    def forward(self, x: SparseTensor) -> SparseTensor:
        origin = x.geometry.parent
        if origin is None or origin[1] != self.kernel:
            got = "no strided convolution before it" if origin is None else f"one with kernel {origin[1]}"
            raise error(
                "SL208", where="SparseInverseConv3d", got=got, expected=f"a SparseConv3d with kernel {self.kernel}",
                fix="pair each inverse convolution with a SparseConv3d of the same kernel",
            )  # fmt: skip
        finer, _, step = origin
        return SparseTensor(self._convolve(x.feats, step.plan.t), geometry=finer)


class Sequential(nn.Sequential):
    """Sparse modules get the tensor; any other module (batch norm, activation, linear) its features."""

    def forward(self, x: SparseTensor) -> SparseTensor:
        for module in self:
            x = module(x) if isinstance(module, (_Conv, Sequential)) else x.replace(module(x.feats))
        return x
