"""Convolutions. Weights are ``[co, *kernel, ci / groups]`` (spconv's KRSC), initialised like ``torch.nn.Conv3d``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from shiplap.plugin_api import error
from shiplap_sparse3d.coords import other_channels
from shiplap_sparse3d.geometry import Axes, Strided, per_axis, triple
from shiplap_sparse3d.nn.module import SparseModule
from shiplap_sparse3d.plan import Plan
from shiplap_sparse3d.tensor import SparseTensor

__all__ = [
    "GenerativeConv1d",
    "GenerativeConv2d",
    "GenerativeConv3d",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
]


class Convolution(SparseModule):
    """Weight, bias and the call that all sparse convolutions share."""

    ndim = 3

    def __init__(self, ci: int, co: int, k: Axes, *, groups: int, bias: bool, **factory: Any) -> None:
        super().__init__()
        if groups < 1 or ci % groups or co % groups:
            raise error(
                "SL208",
                where=f"{type(self).__name__}, argument 'groups'",
                got=f"{groups} groups of {ci} and {co} channels",
                expected="a divisor of both",
            )
        self.ci, self.co, self.groups, self.kernel = ci, co, groups, per_axis(k, "kernel", self.ndim)
        self.weight = nn.Parameter(torch.empty(co, *self.kernel, ci // groups, **factory))
        self.bias = nn.Parameter(torch.empty(co, **factory)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Kaiming uniform over the fan-in ``ci / groups * k``, as ``torch.nn.Conv3d`` does."""
        fan_in = self.ci // self.groups * math.prod(self.kernel)
        bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def _check_input(self, x: SparseTensor) -> None:
        self._check_axes(x, self.ndim)
        if x.feats.size(1) != self.ci:  # shape would be a tuple with a symbol for the rows, in a graph
            raise other_channels(type(self).__name__, x.feats, self.ci, "ci")

    def _convolve(self, feats: Tensor, plan: Plan) -> Tensor:
        return plan.conv(feats, self.weight.flatten(1, -2), self.bias, self.groups)

    def _step(self, x: SparseTensor, step: Strided) -> SparseTensor:
        return SparseTensor(self._convolve(x.feats, step.plan), geometry=step.geometry)

    def extra_repr(self) -> str:
        parts = [f"{self.ci} -> {self.co}, kernel={self.kernel}"]
        for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0)):
            value = getattr(self, name, None)
            if value is not None and any(v != usual for v in value):
                parts.append(f"{name}={value}")
        parts += [f"groups={self.groups}"] if self.groups != 1 else []
        return ", ".join([*parts, f"bias={self.bias is not None}, weight={list(self.weight.shape)}"])


class SubMConv3d(Convolution):
    """Submanifold convolution: outputs on the input's voxels only (Graham et al., CVPR 2018).

    Args:
        ci, co: input and output channels.
        k: kernel size, one int or one per axis. An even one reaches one voxel further back than ahead.
        dilation: spacing of the taps.
        bias: whether to add one.
        groups: channels are convolved in as many groups, as in ``torch.nn.Conv3d``; ``ci`` of them: depthwise.

    Shape: ``feats [n, ci] -> [n, co]`` on the same coordinates.
    """

    def __init__(
        self, ci: int, co: int, k: Axes, dilation: Axes = 1, bias: bool = True, groups: int = 1, **factory: Any
    ) -> None:
        super().__init__(ci, co, k, groups=groups, bias=bias, **factory)
        self.dilation = per_axis(dilation, "dilation", self.ndim)

    def forward(self, x: SparseTensor) -> SparseTensor:
        self._check_input(x)
        return x.replace(self._convolve(x.feats, x.geometry.subm(self.kernel, self.dilation)))


class SparseConv3d(Convolution):
    """Strided convolution: outputs wherever the kernel reaches an input voxel, as ``torch.nn.Conv3d`` on those cells.

    Args:
        ci, co, k, dilation, bias, groups: as in :class:`SubMConv3d`.
        stride: step between outputs.
        padding: cells added on each side.
        capacity: rows of the result if fixed, see ``Geometry.strided``.

    Shape: ``feats [n, ci] -> [m, co]`` on the coarser grid; ``m`` depends on the coordinates.
    """

    def __init__(
        self,
        ci: int,
        co: int,
        k: Axes,
        stride: Axes = 1,
        padding: Axes = 0,
        dilation: Axes = 1,
        bias: bool = True,
        groups: int = 1,
        capacity: int | None = None,
        **factory: Any,
    ) -> None:
        super().__init__(ci, co, k, groups=groups, bias=bias, **factory)
        self.stride, self.padding = per_axis(stride, "stride", self.ndim), per_axis(padding, "padding", self.ndim)
        self.dilation, self.capacity = per_axis(dilation, "dilation", self.ndim), capacity

    def forward(self, x: SparseTensor) -> SparseTensor:
        self._check_input(x)
        window = self.kernel, self.stride, self.padding, self.dilation
        return self._step(x, x.geometry.strided(*window, capacity=self.capacity))


class SparseConvTranspose3d(Convolution):
    """Transposed convolution onto new voxels: all that an input reaches, as ``torch.nn.ConvTranspose3d`` there.

    Args:
        ci, co, k, dilation, bias, groups: as in :class:`SubMConv3d`.
        stride: step between inputs on the finer grid.
        padding: cells cut off on each side.
        output_padding: cells added at the far end.
        capacity: rows of the result if fixed, see ``Geometry.strided``.

    Shape: ``feats [n, ci] -> [m, co]`` on the finer grid; ``m`` depends on the coordinates.
    """

    def __init__(
        self,
        ci: int,
        co: int,
        k: Axes,
        stride: Axes = 1,
        padding: Axes = 0,
        output_padding: Axes = 0,
        dilation: Axes = 1,
        bias: bool = True,
        groups: int = 1,
        capacity: int | None = None,
        **factory: Any,
    ) -> None:
        super().__init__(ci, co, k, groups=groups, bias=bias, **factory)
        self.stride, self.padding = per_axis(stride, "stride", self.ndim), per_axis(padding, "padding", self.ndim)
        self.dilation, self.capacity = per_axis(dilation, "dilation", self.ndim), capacity
        self.output_padding = per_axis(output_padding, "output_padding", self.ndim)

    def forward(self, x: SparseTensor) -> SparseTensor:
        self._check_input(x)
        window = self.kernel, self.stride, self.padding, self.dilation, self.output_padding
        return self._step(x, x.geometry.transposed(*window, capacity=self.capacity))


class SparseInverseConv3d(Convolution):
    """The way back of the step that made the input's voxels: transposed convolution onto the voxels before it.

    Args:
        ci, co, bias, groups: as in :class:`SubMConv3d`.
        k: the kernel size of that step, a strided or transposed convolution or a pooling.

    Shape: ``feats [m, ci] -> [n, co]`` on the coordinates before. Equals ``conv_transpose3d`` at those cells.

    Raises:
        ArgumentError: SL208 when the input did not come from a step with this kernel.
    """

    def __init__(self, ci: int, co: int, k: Axes, bias: bool = True, groups: int = 1, **factory: Any) -> None:
        super().__init__(ci, co, k, groups=groups, bias=bias, **factory)

    def forward(self, x: SparseTensor) -> SparseTensor:
        self._check_input(x)
        origin = x.geometry.parent
        if origin is None or origin.window.kernel != triple(self.kernel, "kernel", self.ndim):
            made = "no strided convolution before it"
            if origin is not None:
                made = f"one with kernel {origin.window.kernel[3 - self.ndim :]}"
            name = f"SparseConv{self.ndim}d"
            raise error(
                "SL208",
                where=type(self).__name__,
                got=made,
                expected=f"a {name} with kernel {self.kernel}",
                fix=f"pair each inverse convolution with a {name} of the same kernel",
            )
        return SparseTensor(self._convolve(x.feats, origin.plan.t), geometry=origin.geometry)


class GenerativeConv3d(Convolution):
    """Convolution whose voxels grow: outputs wherever its kernel reaches, at stride 1 (Gwak et al., ECCV 2020).

    :class:`SparseConvTranspose3d` grows voxels and refines the grid at once.

    Args:
        ci, co, k, dilation, bias, groups: as in :class:`SubMConv3d`, whose taps these are.
        capacity: rows of the result if fixed, see ``Geometry.strided``.

    Shape: ``feats [n, ci] -> [m, co]``; the grid stays as it is, or grows by ``dilation`` for an even kernel.
    """

    def __init__(
        self,
        ci: int,
        co: int,
        k: Axes,
        dilation: Axes = 1,
        bias: bool = True,
        groups: int = 1,
        capacity: int | None = None,
        **factory: Any,
    ) -> None:
        super().__init__(ci, co, k, groups=groups, bias=bias, **factory)
        self.dilation, self.capacity = per_axis(dilation, "dilation", self.ndim), capacity

    def forward(self, x: SparseTensor) -> SparseTensor:
        self._check_input(x)
        return self._step(x, x.geometry.generative(self.kernel, self.dilation, capacity=self.capacity))


class SubMConv2d(SubMConv3d):
    """:class:`SubMConv3d` for voxels with two axes."""

    ndim = 2


class SubMConv1d(SubMConv3d):
    """:class:`SubMConv3d` for voxels with one axis."""

    ndim = 1


class SparseConv2d(SparseConv3d):
    """:class:`SparseConv3d` for voxels with two axes."""

    ndim = 2


class SparseConv1d(SparseConv3d):
    """:class:`SparseConv3d` for voxels with one axis."""

    ndim = 1


class SparseConvTranspose2d(SparseConvTranspose3d):
    """:class:`SparseConvTranspose3d` for voxels with two axes."""

    ndim = 2


class SparseConvTranspose1d(SparseConvTranspose3d):
    """:class:`SparseConvTranspose3d` for voxels with one axis."""

    ndim = 1


class SparseInverseConv2d(SparseInverseConv3d):
    """:class:`SparseInverseConv3d` for voxels with two axes."""

    ndim = 2


class SparseInverseConv1d(SparseInverseConv3d):
    """:class:`SparseInverseConv3d` for voxels with one axis."""

    ndim = 1


class GenerativeConv2d(GenerativeConv3d):
    """:class:`GenerativeConv3d` for voxels with two axes."""

    ndim = 2


class GenerativeConv1d(GenerativeConv3d):
    """:class:`GenerativeConv3d` for voxels with one axis."""

    ndim = 1
