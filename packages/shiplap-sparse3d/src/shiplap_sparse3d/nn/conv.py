"""Convolutions.

Weights are ``[out_channels, *kernel_size, in_channels / groups]`` (spconv's KRSC), initialised like
``torch.nn.Conv3d``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shiplap import ShiplapError
from shiplap.plugin_api import error
from shiplap_sparse3d.axes import Axes, Triple, expand_axes, per_axis
from shiplap_sparse3d.coords import other_channels
from shiplap_sparse3d.geometry import Strided
from shiplap_sparse3d.nn.module import SparseModule, origin_of, voxels_of
from shiplap_sparse3d.plan import Plan
from shiplap_sparse3d.steps import StepWindow
from shiplap_sparse3d.tensor import SparseTensor

__all__ = [
    "GenerativeConv1d",
    "GenerativeConv2d",
    "GenerativeConv3d",
    "GenerativeConv4d",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
]

_MAX_BOX = 1 << 15  # cells of the box of custom offsets, whose table is built first
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Convolution(SparseModule):
    """The base of the sparse convolutions. It holds the sizes, the ``weight`` and the ``bias`` (or None). Its methods
    compute the convolution over a table of neighbours.
    """

    ndim = 3

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes,
        groups: int,
        bias: bool,
        device: Any,
        dtype: torch.dtype | None,
        others: Mapping[str, Any],
        taps: tuple[int, ...] | None = None,
    ) -> None:
        """Create the weight ``[out, *kernel, in / groups]``, or ``[out, taps, in / groups]`` if ``taps`` are given.
        Also create the bias if ``bias`` is true, and set it to None otherwise. Raise ``SL208`` for invalid sizes,
        ``SL209`` for ``others`` (arguments that the layer does not have), and ``SL204`` for other dtypes.
        """
        super().__init__()
        # torch's layers have this argument, and its default is the only mode here.
        if others.get("padding_mode") == "zeros":
            others = {name: value for name, value in others.items() if name != "padding_mode"}
        self._refuse_arguments(others)
        self.in_channels = self._whole_number(in_channels, "in_channels", 0)
        self.out_channels = self._whole_number(out_channels, "out_channels", 0)
        self.groups = self._whole_number(groups, "groups", 1)
        if self.in_channels % self.groups or self.out_channels % self.groups:
            raise error(
                "SL208",
                where=f"{type(self).__name__}, argument 'groups'",
                got=f"{groups} groups of {in_channels} and {out_channels} channels",
                expected="a divisor of both",
            )
        if dtype is not None and dtype not in _FLOATS:
            raise self._dtype_error("argument 'dtype'", dtype)
        self.kernel_size = per_axis(kernel_size, "kernel_size", self.ndim, 1)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.taps, box = taps, self.kernel_size if taps is None else (len(taps),)
        self.weight = nn.Parameter(torch.empty(out_channels, *box, in_channels // groups, **factory))
        self.bias = nn.Parameter(torch.empty(out_channels, **factory)) if bias else None
        self.reset_parameters()

    def _dtype_error(self, what: str, dtype: torch.dtype) -> ShiplapError:
        """Return the error ``SL204`` for ``dtype``, in which convolutions are not computed. ``what`` names the argument
        that has it.
        """
        expected = ", ".join(map(str, _FLOATS))
        return error("SL204", where=f"{type(self).__name__}, {what}", got=dtype, expected=expected)

    def _padding(self, padding: Axes | str, stride: tuple[int, ...], dilation: tuple[int, ...]) -> tuple[int, ...]:
        """Return the padding as one number per axis, for numbers, ``"valid"`` (none) or ``"same"``, as in
        ``torch.nn.Conv3d``. Raise ``SL208`` for another string, and for ``"same"`` if the stride is not 1 or both ends
        of an axis cannot be padded equally.
        """
        if not isinstance(padding, str):
            return per_axis(padding, "padding", self.ndim, 0)
        where = f"{type(self).__name__}, argument 'padding'"
        if padding not in ("valid", "same"):
            raise error("SL208", where=where, got=repr(padding), expected="numbers, 'valid' or 'same'")
        around = [d * (k - 1) for k, d in zip(self.kernel_size, dilation, strict=True)]
        if padding == "valid":
            return (0,) * self.ndim
        if any(s != 1 for s in stride) or any(cells % 2 for cells in around):
            got = f"'same' with stride {stride}, kernel_size {self.kernel_size}, dilation {dilation}"
            fix = "pass the padding as numbers, or leave out the stride and take odd kernel sizes"
            raise error("SL208", where=where, got=got, expected="stride 1, and as many cells on both sides", fix=fix)
        return tuple(cells // 2 for cells in around)

    def _triple(self, value: tuple[int, ...], fill: int = 1) -> Triple:
        """Return ``value``, one number per axis, as three numbers with ``fill`` in front, or as four for four axes."""
        return expand_axes(value, "window", self.ndim, fill)

    def _capacity(self, capacity: int | None) -> int | None:
        """Return ``capacity``, the fixed number of output rows, or None for no fixed number. Raise ``SL208`` or
        ``SL209`` unless it is an integer of at least 0.
        """
        return None if capacity is None else self._whole_number(capacity, "capacity", 0)

    def reset_parameters(self) -> None:
        """Set ``weight`` and ``bias`` to random values, uniform between -b and b, as ``torch.nn.Conv3d`` does. The
        bound is ``b = 1 / sqrt(fan_in)`` for a ``fan_in`` of ``in_channels / groups * taps``.
        """
        fan_in = self.in_channels // self.groups * math.prod(self.weight.shape[1:-1])
        bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def _check_input(self, x: SparseTensor) -> None:
        """Raise ``SL209`` if ``x`` is not a sparse tensor. Raise ``SL201``, ``SL202`` or ``SL204`` if its axes, its
        channels or its dtype do not fit the layer.
        """
        self._check_axes(x, self.ndim)
        if x.feats.size(1) != self.in_channels:  # shape would be a tuple with a symbol for the rows, in a graph
            raise other_channels(type(self).__name__, x.feats, self.in_channels)
        if x.feats.dtype not in _FLOATS:
            raise self._dtype_error("feats", x.feats.dtype)

    def _convolve(self, feats: Tensor, plan: Plan) -> Tensor:
        """Return the convolution ``[m, out]`` of ``feats [n, in]`` with the layer's weight and bias, over the neighbour
        tables of ``plan``.
        """
        return plan.conv(feats, self.weight.flatten(1, -2), self.bias, self.groups)

    def _step(self, x: SparseTensor, step: Strided) -> SparseTensor:
        """Return the convolution of ``x`` as a sparse tensor on the output voxels of ``step``. ``step`` holds these
        voxels and a plan, which is the table from outputs to the input rows that they read.
        """
        return SparseTensor(self._convolve(x.feats, step.plan), geometry=step.geometry)

    def extra_repr(self) -> str:
        """Return the sizes, the options that are not defaults and the weight's shape as a string, for ``repr``."""
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0)):
            value = getattr(self, name, None)
            if value is not None and any(v != usual for v in value):
                parts.append(f"{name}={value}")
        parts += [f"groups={self.groups}"] if self.groups != 1 else []
        return ", ".join([*parts, f"bias={self.bias is not None}, weight={list(self.weight.shape)}"])


def _select_taps(plan: Plan, taps: tuple[int, ...]) -> Plan:
    """Return a plan (neighbour tables) with the taps of ``plan`` whose numbers are in ``taps``, in this order. ``plan``
    must be that of a submanifold convolution with an odd kernel. The transposed table then has the opposite taps.
    """
    table, opposite = plan.unsorted().table, tuple(plan.table.shape[1] - 1 - tap for tap in taps)
    # Taps that are their own mirror image have a table that is its own transpose.
    symmetric = opposite == taps[::-1]
    back = None if symmetric else (_columns(table, opposite), None, None)
    chosen = Plan(_columns(table, taps), plan.rows, symmetric=symmetric, back=back)
    return chosen if plan.order is None else chosen.sorted()


def _columns(table: Tensor, numbers: Sequence[int]) -> Tensor:
    """Return the columns ``numbers`` of ``table``, in this order."""
    return table.index_select(1, torch.tensor(numbers, device=table.device))


class SubMConv3d(Convolution):
    """A submanifold convolution, whose outputs lie on the voxels of the input only (Graham et al., CVPR 2018).

    Args:
        in_channels, out_channels: channels of the input and of the output.
        kernel_size: one int or one per axis. An even size reaches one voxel further back than ahead.
        region: ``"cube"`` for all taps of the kernel, ``"cross"`` for those on an axis through its middle.
        offsets: the cells that a voxel reads, ``[0, 0, 0]`` for itself, in place of ``kernel_size``.
        stride, padding: outputs lie on the voxels of the input, so the stride is 1 and the padding
            ``dilation * (kernel_size // 2)``, or ``"same"``.
        dilation: the spacing of the taps.
        groups: the number of groups of channels, as in ``torch.nn.Conv3d``. With ``in_channels`` it is depthwise.
        bias: whether to add a bias.

    Shape: ``feats [n, in_channels] -> [n, out_channels]`` on the same coordinates.

    Raises:
        ArgumentError: ``SL208`` for another stride or padding.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes | None = None,
        stride: Axes = 1,
        padding: Axes | str = "same",
        dilation: Axes = 1,
        groups: int = 1,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        region: Literal["cube", "cross"] = "cube",
        offsets: Sequence[Sequence[int]] | None = None,
        **others: Any,
    ) -> None:
        """Create a convolution with a box ``kernel_size``, a ``cross`` in it, or ``offsets``. It has a bias if ``bias``
        is true, and none otherwise. Raise ``SL208`` for a stride or padding that would lead to other voxels. Raise
        ``SL209`` unless exactly one of ``kernel_size`` and ``offsets`` is given.
        """
        kernel, taps = self._read_region(kernel_size, region, offsets)
        super().__init__(in_channels, out_channels, kernel, groups, bias, device, dtype, others, taps)
        self.dilation = per_axis(dilation, "dilation", self.ndim, 1)
        self._check_window(per_axis(stride, "stride", self.ndim, 1), padding)

    def _read_region(
        self, kernel_size: Axes | None, region: str, offsets: Sequence[Sequence[int]] | None
    ) -> tuple[Axes, tuple[int, ...] | None]:
        """Return the size of the kernel's box, and the numbers of its cells that are taps, or None if all are taps.
        Raise ``SL209`` unless one of ``kernel_size`` and ``offsets`` is given, and ``SL208`` for an unknown region, a
        cross of even size, and offsets that repeat or reach too far.
        """
        where, ndim = type(self).__name__, self.ndim
        if (kernel_size is None) == (offsets is None):
            raise error("SL209", where=where, got=f"{kernel_size=}, {offsets=}", expected="one of the two")
        if region not in ("cube", "cross") or (offsets is not None and region != "cube"):
            raise error("SL208", where=f"{where}, argument 'region'", got=repr(region), expected="'cube' or 'cross'")
        if offsets is not None:
            cells = [per_axis(offset, f"{where}, argument 'offsets'", ndim) for offset in offsets]
            if not cells or len({*cells}) < len(cells):
                raise error("SL208", where=f"{where}, argument 'offsets'", got=offsets, expected="distinct cells")
        elif region == "cube":
            assert kernel_size is not None
            return kernel_size, None
        else:
            assert kernel_size is not None
            sizes = per_axis(kernel_size, "kernel_size", ndim, 1)
            if any(size % 2 == 0 for size in sizes):
                raise error("SL208", where=f"{where}, 'cross'", got=f"kernel_size {sizes}", expected="odd sizes")
            every = itertools.product(*(range(-(size // 2), size // 2 + 1) for size in sizes))
            cells = [cell for cell in every if sum(step != 0 for step in cell) <= 1]
        box = [2 * max(abs(cell[axis]) for cell in cells) + 1 for axis in range(ndim)]
        # The table of the whole box is built before the taps are chosen from it.
        if math.prod(box) > _MAX_BOX:
            got = f"offsets in a box {tuple(box)}"
            raise error("SL208", where=f"{where}, argument 'offsets'", got=got, expected=f"at most {_MAX_BOX} cells")
        taps = []
        for cell in cells:
            number = 0
            for step, size in zip(cell, box, strict=True):
                number = number * size + step + size // 2
            # The number of the cell in the box, the last axis fastest, as in the weight.
            taps.append(number)
        return box, tuple(taps)

    def _check_window(self, stride: tuple[int, ...], padding: Axes | str) -> None:
        """Raise ``SL208`` unless the stride is 1 and the padding centres the kernel on its output. With other values
        the outputs would not lie on the voxels of the input.
        """
        around = tuple(k // 2 * d for k, d in zip(self.kernel_size, self.dilation, strict=True))
        if any(step != 1 for step in stride):
            got, fix = f"stride {stride}", f"take SparseConv{self.ndim}d, which leads to other voxels"
        elif padding == "same" or self._padding(padding, stride, self.dilation) == around:
            return
        else:
            got = f"padding {padding!r} of kernel_size {self.kernel_size}, dilation {self.dilation}"
            fix = f"leave the padding out, pass {around}, or take SparseConv{self.ndim}d"
        expected = f"stride 1 and padding {around}: outputs lie on the voxels of the input"
        raise error("SL208", where=type(self).__name__, got=got, expected=expected, fix=fix)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return the convolution of ``x`` as a sparse tensor on the voxels of ``x``. Raise ``SL201``, ``SL202`` or
        ``SL204`` unless the axes, the channels and the dtype fit the layer.
        """
        self._check_input(x)
        plan = x.geometry.subm(self.kernel_size, self.dilation)
        return x.replace(self._convolve(x.feats, plan if self.taps is None else _select_taps(plan, self.taps)))


class SparseConv3d(Convolution):
    """A strided convolution whose outputs are all cells at which the kernel reaches an input voxel. The values are
    those of ``torch.nn.Conv3d`` at these cells.

    Args:
        in_channels, out_channels, kernel_size, dilation, bias, groups: as in :class:`SubMConv3d`.
        stride: the step between outputs.
        padding: the cells added on each side, as numbers, ``"valid"`` (none) or ``"same"``.
        capacity: the number of rows of the result if it is fixed, see ``Geometry.strided``.
        out_coords: ``"reached"``, or ``"floor"`` for outputs only at ``floor(c / stride)`` of the voxels, as in
            MinkowskiEngine. The middle tap then lies on the first cell that an output spans, without a padding.

    The second argument of a call gives the output voxels, as a sparse tensor or as coordinates on the coarser grid.

    Shape: ``feats [n, in_channels] -> [m, out_channels]`` on the coarser grid. ``m`` depends on the coordinates.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes,
        stride: Axes = 1,
        padding: Axes | str = 0,
        dilation: Axes = 1,
        groups: int = 1,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        capacity: int | None = None,
        out_coords: Literal["reached", "floor"] = "reached",
        **others: Any,
    ) -> None:
        """Create a strided convolution, with a bias if ``bias`` is true and without one otherwise. Raise ``SL208`` if
        ``out_coords`` is unknown, or if it is ``"floor"`` with a padding or a capacity.
        """
        super().__init__(in_channels, out_channels, kernel_size, groups, bias, device, dtype, others)
        self.stride = per_axis(stride, "stride", self.ndim, 1)
        self.dilation, self.capacity = per_axis(dilation, "dilation", self.ndim, 1), self._capacity(capacity)
        self.padding, self.out_coords = self._padding(padding, self.stride, self.dilation), out_coords
        if out_coords not in ("reached", "floor") or (out_coords == "floor" and (any(self.padding) or capacity)):
            got = f"{out_coords!r} with padding {self.padding}, capacity {capacity}"
            expected = "'reached', or 'floor' without padding and capacity"
            raise error("SL208", where=f"{type(self).__name__}, argument 'out_coords'", got=got, expected=expected)

    def forward(self, x: SparseTensor, coordinates: Tensor | SparseTensor | None = None) -> SparseTensor:
        """Return the convolution of ``x`` as a sparse tensor on the coarser grid. If ``coordinates`` are given, they
        are the output voxels. Otherwise the outputs are all cells at which the kernel reaches an input voxel. With
        ``out_coords="floor"`` they are ``floor(c / stride)`` of the input's coordinates ``c`` instead.
        """
        self._check_input(x)
        if coordinates is not None or self.out_coords == "floor":
            return self._step(x, self._onto(x, coordinates))
        window = self.kernel_size, self.stride, self.padding, self.dilation
        return self._step(x, x.geometry.strided(*window, capacity=self.capacity))

    def _onto(self, x: SparseTensor, coordinates: Tensor | SparseTensor | None) -> Strided:
        """Return the step from ``x`` onto the voxels ``coordinates``, which holds these voxels and the neighbour tables
        onto them. If ``coordinates`` is None, the outputs are ``floor(c / stride)`` of the input's coordinates ``c``.
        """
        if coordinates is None:
            return x.geometry.floored(self.kernel_size, self.stride, self.dilation)
        kernel, stride, dilation = (self._triple(v) for v in (self.kernel_size, self.stride, self.dilation))
        window = StepWindow(kernel, stride, self._triple(self.padding, 0), dilation)
        return x.geometry.onto(voxels_of(coordinates, x), window)


class SparseConvTranspose3d(Convolution):
    """A transposed convolution whose outputs are all cells that the kernel reaches from an input voxel. The values are
    those of ``torch.nn.ConvTranspose3d`` at these cells.

    Args:
        in_channels, out_channels, kernel_size, dilation, bias, groups: as in :class:`SubMConv3d`.
        stride: the step between inputs on the finer grid.
        padding: the cells cut off on each side.
        output_padding: the cells added at the far end.
        capacity: the number of rows of the result if it is fixed, see ``Geometry.strided``.

    The second argument of a call gives the output voxels, as a sparse tensor or as coordinates on the finer grid.

    Shape: ``feats [n, in_channels] -> [m, out_channels]`` on the finer grid. ``m`` depends on the coordinates.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes,
        stride: Axes = 1,
        padding: Axes = 0,
        output_padding: Axes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Axes = 1,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        capacity: int | None = None,
        **others: Any,
    ) -> None:
        """Create a transposed convolution, with a bias if ``bias`` is true and without one otherwise. The arguments
        have the order of ``torch.nn.ConvTranspose3d``.
        """
        super().__init__(in_channels, out_channels, kernel_size, groups, bias, device, dtype, others)
        self.stride, self.padding = per_axis(stride, "stride", self.ndim, 1), per_axis(padding, "padding", self.ndim, 0)
        self.dilation, self.capacity = per_axis(dilation, "dilation", self.ndim, 1), self._capacity(capacity)
        self.output_padding = per_axis(output_padding, "output_padding", self.ndim)

    def forward(self, x: SparseTensor, coordinates: Tensor | SparseTensor | None = None) -> SparseTensor:
        """Return the transposed convolution of ``x`` as a sparse tensor on the finer grid. If ``coordinates`` are
        given, they are the output voxels. Otherwise the outputs are all cells that the kernel reaches from an input
        voxel.
        """
        self._check_input(x)
        window = self.kernel_size, self.stride, self.padding, self.dilation, self.output_padding
        if coordinates is not None:
            axes = zip(window, (1, 1, 0, 1, 0), strict=True)
            kernel, stride, padding, dilation, extra = (self._triple(value, fill) for value, fill in axes)
            step = x.geometry.onto(voxels_of(coordinates, x), StepWindow(kernel, stride, padding, dilation, extra))
            return self._step(x, step)
        return self._step(x, x.geometry.transposed(*window, capacity=self.capacity))


class SparseInverseConv3d(Convolution):
    """A transposed convolution onto the input voxels of the earlier layer that made the voxels of this layer's input.

    Args:
        in_channels, out_channels, bias, groups: as in :class:`SubMConv3d`.
        kernel_size: the kernel size of the earlier layer, which is a strided or transposed convolution or a pooling.

    Shape: ``feats [m, in_channels] -> [n, out_channels]`` on the input voxels of the earlier layer.
    The values are those of ``conv_transpose3d`` at these cells.

    Raises:
        ArgumentError: ``SL208`` if the input does not come from a layer with this kernel size.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes,
        groups: int = 1,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **others: Any,
    ) -> None:
        """Create the inverse of a strided convolution with the same ``kernel_size``. It has a bias if ``bias`` is true,
        and none otherwise.
        """
        super().__init__(in_channels, out_channels, kernel_size, groups, bias, device, dtype, others)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return the convolution of ``x`` as a sparse tensor on the input voxels of the earlier layer that made the
        voxels of ``x``. Raise ``SL208`` if no layer with this kernel size made them.
        """
        self._check_input(x)
        origin = origin_of(self, x, self.kernel_size)
        return SparseTensor(self._convolve(x.feats, origin.plan.t), geometry=origin.geometry)


class GenerativeConv3d(Convolution):
    """A convolution at stride 1 whose outputs are all cells that the kernel reaches, so that voxels grow (Gwak et al.,
    ECCV 2020).

    :class:`SparseConvTranspose3d` grows voxels and refines the grid at once.

    Args:
        in_channels, out_channels, kernel_size, dilation, bias, groups: as in :class:`SubMConv3d`, with the same taps.
        capacity: the number of rows of the result if it is fixed, see ``Geometry.strided``.

    Shape: ``feats [n, in_channels] -> [m, out_channels]``.
    The grid stays as it is, or grows by ``dilation`` for an even kernel.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes,
        dilation: Axes = 1,
        groups: int = 1,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        capacity: int | None = None,
        **others: Any,
    ) -> None:
        """Create a generative convolution, with a bias if ``bias`` is true and without one otherwise. Its outputs are
        all cells under the kernel around each voxel.
        """
        super().__init__(in_channels, out_channels, kernel_size, groups, bias, device, dtype, others)
        self.dilation, self.capacity = per_axis(dilation, "dilation", self.ndim, 1), self._capacity(capacity)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return the convolution of ``x`` as a sparse tensor on all cells that the kernel reaches around its voxels.
        The resolution of the grid stays the same.
        """
        self._check_input(x)
        return self._step(x, x.geometry.generative(self.kernel_size, self.dilation, capacity=self.capacity))


class SubMConv4d(SubMConv3d):
    """A :class:`SubMConv3d` for voxels with four spatial axes."""

    ndim = 4


class SubMConv2d(SubMConv3d):
    """A :class:`SubMConv3d` for voxels with two spatial axes."""

    ndim = 2


class SubMConv1d(SubMConv3d):
    """A :class:`SubMConv3d` for voxels with one spatial axis."""

    ndim = 1


class SparseConv4d(SparseConv3d):
    """A :class:`SparseConv3d` for voxels with four spatial axes."""

    ndim = 4


class SparseConv2d(SparseConv3d):
    """A :class:`SparseConv3d` for voxels with two spatial axes."""

    ndim = 2


class SparseConv1d(SparseConv3d):
    """A :class:`SparseConv3d` for voxels with one spatial axis."""

    ndim = 1


class SparseConvTranspose4d(SparseConvTranspose3d):
    """A :class:`SparseConvTranspose3d` for voxels with four spatial axes."""

    ndim = 4


class SparseConvTranspose2d(SparseConvTranspose3d):
    """A :class:`SparseConvTranspose3d` for voxels with two spatial axes."""

    ndim = 2


class SparseConvTranspose1d(SparseConvTranspose3d):
    """A :class:`SparseConvTranspose3d` for voxels with one spatial axis."""

    ndim = 1


class SparseInverseConv4d(SparseInverseConv3d):
    """A :class:`SparseInverseConv3d` for voxels with four spatial axes."""

    ndim = 4


class SparseInverseConv2d(SparseInverseConv3d):
    """A :class:`SparseInverseConv3d` for voxels with two spatial axes."""

    ndim = 2


class SparseInverseConv1d(SparseInverseConv3d):
    """A :class:`SparseInverseConv3d` for voxels with one spatial axis."""

    ndim = 1


class GenerativeConv4d(GenerativeConv3d):
    """A :class:`GenerativeConv3d` for voxels with four spatial axes."""

    ndim = 4


class GenerativeConv2d(GenerativeConv3d):
    """A :class:`GenerativeConv3d` for voxels with two spatial axes."""

    ndim = 2


class GenerativeConv1d(GenerativeConv3d):
    """A :class:`GenerativeConv3d` for voxels with one spatial axis."""

    ndim = 1
