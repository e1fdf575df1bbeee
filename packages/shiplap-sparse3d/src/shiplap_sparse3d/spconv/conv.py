"""Convolution layers: spconv's parameters and bookkeeping around ``Plan.conv``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shiplap.plugin_api import error
from shiplap_sparse3d.coords import other_channels
from shiplap_sparse3d.spconv import indices
from shiplap_sparse3d.spconv.activation import activation_of, apply_activation
from shiplap_sparse3d.spconv.core import (
    ConvAlgo,
    IndiceData,
    LayerWindow,
    SparseConvTensor,
    check_ndim,
    check_sparse,
    expand_nd,
)
from shiplap_sparse3d.spconv.graphed import convolve_in_graph
from shiplap_sparse3d.spconv.modules import SparseModule
from shiplap_sparse3d.spconv.tracing import one_node

__all__ = [
    "DEFAULT_SPARSE_CONV_TYPES",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseConvolution",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
]

Ints = int | Sequence[int]


class SparseConvolution(SparseModule):
    """The base of every convolution layer. A subclass passes fixed values of ``ndim``, ``subm``, ``transposed`` and
    ``inverse`` to the constructor.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, output_padding: as in torch.
        subm, transposed, inverse: which kind of convolution the layer is. If all are false, it is a strided one.
        indice_key: the key under which the layer keeps its voxels and neighbour tables in the tensor's ``indice_dict``.
            A submanifold layer also reads what an earlier layer has stored there.
        algo: the algorithm that spconv would run. Layers that share an ``indice_key`` must have the same one.
        act_type: ReLU, Sigmoid or LeakyReLU (with slope ``act_alpha``) behind the layer, as cumm's constant or by name.
        fp32_accum: accepted without effect, since sums are always kept in float32.
        large_kernel_fast_algo: whether masked implicit GEMM is chosen up to 128 taps instead of 32 if ``algo`` is None.
        record_voxel_count: whether to keep the largest number of output voxels in a buffer.
        name, device, dtype: as in torch and spconv.

    Shape: weight ``[out_channels, *kernel_size, in_channels / groups]`` (KRSC). A kernel of one cell and stride 1 reads
    that memory as ``[in_channels, out_channels]``, as spconv does.
    """

    is_convolution = True

    def __init__(
        self,
        ndim: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints = 3,
        stride: Ints = 1,
        padding: Ints = 0,
        dilation: Ints = 1,
        groups: int = 1,
        bias: bool = True,
        subm: bool = False,
        output_padding: Ints = 0,
        transposed: bool = False,
        inverse: bool = False,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        act_type: Any = None,
        act_alpha: float = 0,
        act_beta: float = 0,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the layer. The class describes the arguments. Raise ``SL208`` if they do not fit together."""
        super().__init__(name=name)
        check_ndim(type(self).__name__, ndim)
        self.ndim, self.in_channels, self.out_channels, self.groups = ndim, in_channels, out_channels, groups
        self.kernel_size, self.stride = expand_nd(ndim, kernel_size), expand_nd(ndim, stride)
        self.padding, self.dilation = expand_nd(ndim, padding), expand_nd(ndim, dilation)
        self.output_padding = expand_nd(ndim, output_padding)
        self.subm, self.transposed, self.inverse = subm, transposed, inverse
        self.indice_key, self.record_voxel_count, self.fp32_accum = indice_key, record_voxel_count, fp32_accum
        taps = math.prod(self.kernel_size)
        # spconv's own limits of taps for its masked algorithm.
        self.algo = indices.choose_algorithm(algo, taps, 128 if large_kernel_fast_algo else 32)
        # A kernel of one cell needs no neighbours, so the layer is a matrix product.
        self.conv1x1 = taps == 1 and groups == 1 and (subm or math.prod(self.stride) == 1)
        self.act_type = activation_of(type(self).__name__, act_type)
        self.act_alpha, self.act_beta = act_alpha, act_beta
        self._check_arguments()
        self._create_parameters(bias, device=device, dtype=dtype)

    def _check_arguments(self) -> None:
        """Raise ``SL208`` unless ``groups`` divides both numbers of channels. Raise it also for a layer that is not
        submanifold, with a kernel of one cell and stride 1, if it has padding.
        """
        where = type(self).__name__
        if self.in_channels % self.groups or self.out_channels % self.groups:
            got = f"{self.in_channels} and {self.out_channels} channels"
            raise error("SL208", where=where, got=got, expected=f"multiples of groups = {self.groups}")
        if self.conv1x1 and not self.subm and any(self.padding):
            got = f"kernel_size={self.kernel_size}, padding={self.padding}"
            raise error("SL208", where=where, got=got, expected="padding 0 with a kernel of one cell and stride 1")

    def _create_parameters(self, bias: bool, **factory: Any) -> None:
        """Create the weight ``[out, *kernel_size, in / groups]`` and the bias, with random values. If ``bias`` is
        false, the bias is None. If ``record_voxel_count`` is true, a strided or transposed layer also gets a buffer
        with the largest number of its output voxels. ``factory`` holds the device and the dtype.
        """
        # The other layers make no new voxels.
        if self.record_voxel_count and not self.subm and not self.inverse:
            self.register_buffer(indices.COUNT, torch.zeros(1, dtype=torch.int32, device=factory["device"]))
        shape = self.out_channels, *self.kernel_size, self.in_channels // self.groups
        self.weight = nn.Parameter(torch.empty(shape, **factory))
        self.bias = nn.Parameter(torch.empty(self.out_channels, **factory)) if bias else None
        self.reset_parameters()
        # Older checkpoints lack the buffer, and strict loading would fail.
        self.register_load_state_dict_pre_hook(indices.without_count)

    def reset_parameters(self) -> None:
        """Set weight and bias to random values, uniform between -b and b, as ``torch.nn.Conv3d`` does. The bound is ``b
        = 1 / sqrt(fan_in)`` for a ``fan_in`` of ``in_channels / groups * taps``.
        """
        fan_in = math.prod(self.weight.shape[1:])
        bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def is_inverseable(self) -> bool:
        """Return whether a ``SparseInverseConv`` layer can map this layer's outputs back to its inputs. That needs an
        ``indice_key`` and a layer that is not submanifold.
        """
        return self.indice_key is not None and not self.subm

    def get_max_num_voxels(self) -> Tensor | None:
        """Return the buffer with the largest number of output voxels so far, ``int32 [1]``. Return None for a layer
        without ``record_voxel_count``.
        """
        return getattr(self, indices.COUNT, None)

    @property
    def weight_shape(self) -> list[int]:
        """The shape of the weight as a list, ``[out_channels, *kernel_size, in_channels / groups]``."""
        return list(self.weight.shape)

    @property
    def window(self) -> LayerWindow:
        """The kernel size, the stride, the padding and the dilation of the layer as one object. For a transposed layer
        it also holds the output padding.
        """
        extra = self.output_padding if self.transposed else None
        return LayerWindow(self.kernel_size, self.stride, self.padding, self.dilation, extra)

    @partial(one_node, in_graph=convolve_in_graph)
    def forward(self, input: SparseConvTensor, add_input: SparseConvTensor | None = None) -> SparseConvTensor:
        """Return the convolution of ``input`` with its bias and activation, as a sparse tensor. If ``add_input`` is
        given, its features are added after the activation.

        Raise ``SL209`` if ``input`` is not a sparse tensor, and ``SL202`` if the number of channels or rows does not
        fit. Raise ``SL208`` if the record that an earlier layer stored under the ``indice_key`` does not fit this
        layer.
        """
        where = type(self).__name__
        checkpointed = check_sparse(where, input)
        features = input._features
        if features.shape[1] != self.in_channels:
            raise other_channels(where, features, self.in_channels)
        if self.conv1x1:
            output = input.with_features(self.pointwise(features), checkpointed, input._indices)
        else:
            output = self._convolve(input, features, self.indice_data(where, self.indice_key, input), checkpointed)
        if self.act_type is not None:
            output = output.replace_feature(apply_activation(output.features, self.act_type, self.act_alpha))
        return output if add_input is None else output + add_input

    def pointwise(self, features: Tensor) -> Tensor:
        """Return ``features [n, in]`` times the weight of a kernel of one cell, plus the bias if there is one, as ``[n,
        out]``. As in spconv, the weight's memory is read as ``[in, out]``.
        """
        # spconv views the memory of [out, 1, .., in] as [in, out], which is no transpose; so do its checkpoints.
        weight = self.weight.reshape(self.in_channels, self.out_channels)
        return nn.functional.linear(features, weight.t(), self.bias)

    def _convolve(self, input: SparseConvTensor, features: Tensor, data: IndiceData, inside: bool) -> SparseConvTensor:
        """Return the convolution of ``features`` as a sparse tensor on the output voxels, without the activation.
        ``input`` gives the scenes and the earlier records. ``data`` is the record of input voxels, output voxels and
        neighbours. ``inside`` is whether the call runs inside a reentrant checkpoint.
        """
        if self.inverse:
            # The next forward pass then builds both ways in one launch program.
            indices.note_way_back(self.indice_key, data)
        plan = data.way_back if self.inverse else data.plan
        # The taps of the flat weight are in the order of the table's columns.
        features = plan.conv(features, self.weight.flatten(1, self.ndim), self.bias, self.groups)
        if self.inverse:
            return input.move(features, data.geometry, data.indices, data.spatial_shape, inside)
        output = input.move(features, data.out_geometry, data.out_indices, data.out_spatial_shape, inside)
        if self.indice_key is not None:
            output.indice_dict[self.indice_key] = data
        if self.record_voxel_count:
            indices.count_voxels(self.get_max_num_voxels(), features.shape[0])
        return output

    def indice_data(self, where: str, key: str | None, input: SparseConvTensor) -> IndiceData:
        """Return the record of input voxels, output voxels and neighbours that this layer computes with. It is the
        record that ``input`` has under ``key``, or a new one if there is none. An inverse layer needs an existing
        record.

        Raise ``SL208`` if this layer cannot use the existing record. ``where`` is the layer's name in the message.
        """
        data = indices.find_record(where, input, key, self.algo)
        if self.inverse:
            return indices.check_inverse(where, input, key, data, self.kernel_size)
        if data is None:
            window, subm = self.window, self.subm
            # A submanifold record needs no way back: its table is its own transpose.
            back = None if subm else indices.leads_back(key, window)
            return indices.build_record(where, input, window, self.algo, subm=subm, training=self.training, back=back)
        if not self.subm:
            raise indices.key_taken_error(where, key)
        return indices.check_subm(where, input, key, data, self.kernel_size, self.dilation)

    def extra_repr(self) -> str:
        """Return the sizes and options of the layer as a string, for its ``repr``."""
        text = f"{self.in_channels}, {self.out_channels}, "
        names = "kernel_size", "stride", "padding", "dilation", "output_padding"
        text += ", ".join(f"{name}={getattr(self, name)}" for name in names)
        text += "" if self.groups == 1 else f", groups={self.groups}"
        text += "" if self.bias is not None else ", bias=False"
        return f"{text}, algo={self.algo}" + ("" if self.act_type is None else f", act={self.act_type}")


class _Strided(SparseConvolution):
    """The base of the strided convolutions with ``NDIM`` spatial axes. If the class attribute ``TRANSPOSED`` is true,
    the layer is a transposed convolution, and otherwise a strided one.
    """

    NDIM: ClassVar[int]
    TRANSPOSED: ClassVar[bool] = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints,
        stride: Ints = 1,
        padding: Ints = 0,
        dilation: Ints = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        """Create a convolution for the number of axes of the class, or a transposed one for a transposed class. The
        arguments are those of :class:`SparseConvolution`.
        """
        super().__init__(
            self.NDIM,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            transposed=self.TRANSPOSED,
            indice_key=indice_key,
            algo=algo,
            fp32_accum=fp32_accum,
            record_voxel_count=record_voxel_count,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
        )


class _Transposed(_Strided):
    """The base of the transposed convolutions with ``NDIM`` spatial axes."""

    TRANSPOSED = True


class _Inverse(SparseConvolution):
    """The base of the inverse convolutions with ``NDIM`` spatial axes. An inverse convolution maps the outputs of an
    earlier layer back to that layer's input voxels.
    """

    NDIM: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints,
        indice_key: str,
        bias: bool = True,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        """Create the inverse of the layer that has the same ``indice_key``, for the number of axes of the class.
        ``kernel_size`` must equal that layer's.
        """
        super().__init__(
            self.NDIM,
            in_channels,
            out_channels,
            kernel_size,
            bias=bias,
            inverse=True,
            indice_key=indice_key,
            algo=algo,
            fp32_accum=fp32_accum,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
        )


class _SubM(SparseConvolution):
    """The base of the submanifold convolutions with ``NDIM`` spatial axes. Their outputs lie on the voxels of the
    input.
    """

    NDIM: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Ints,
        stride: Ints = 1,
        padding: Ints = 0,
        dilation: Ints = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        """Create a submanifold convolution for the number of axes of the class. Its outputs lie on the input's voxels.
        The arguments are those of :class:`SparseConvolution`.
        """
        super().__init__(
            self.NDIM,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            True,
            indice_key=indice_key,
            algo=algo,
            fp32_accum=fp32_accum,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
        )


class SparseConv1d(_Strided):
    """A strided convolution on voxels with one spatial axis, ``[n, in_channels]`` -> ``[m, out_channels]``. Its outputs
    are all cells at which the kernel reaches an input voxel. Arguments and errors are those of
    :class:`SparseConvolution`.
    """

    NDIM = 1


class SparseConv2d(_Strided):
    """A strided convolution on voxels with two spatial axes, ``[n, in_channels]`` -> ``[m, out_channels]``. Its outputs
    are all cells at which the kernel reaches an input voxel. Arguments and errors are those of
    :class:`SparseConvolution`.
    """

    NDIM = 2


class SparseConv3d(_Strided):
    """A strided convolution on voxels with three spatial axes, ``[n, in_channels]`` -> ``[m, out_channels]``. Its
    outputs are all cells at which the kernel reaches an input voxel. Arguments and errors are those of
    :class:`SparseConvolution`.
    """

    NDIM = 3


class SparseConv4d(_Strided):
    """A strided convolution on voxels with four spatial axes, which is not supported. Creating the layer raises
    ``SL208``.
    """

    NDIM = 4


class SparseConvTranspose1d(_Transposed):
    """A transposed convolution on voxels with one spatial axis, ``[n, in_channels]`` -> ``[m, out_channels]``. Its
    outputs are all cells of the finer grid that the kernel reaches from an input voxel. Arguments and errors are those
    of :class:`SparseConvolution`.
    """

    NDIM = 1


class SparseConvTranspose2d(_Transposed):
    """A transposed convolution on voxels with two spatial axes, ``[n, in_channels]`` -> ``[m, out_channels]``. Its
    outputs are all cells of the finer grid that the kernel reaches from an input voxel. Arguments and errors are those
    of :class:`SparseConvolution`.
    """

    NDIM = 2


class SparseConvTranspose3d(_Transposed):
    """A transposed convolution on voxels with three spatial axes, ``[n, in_channels]`` -> ``[m, out_channels]``. Its
    outputs are all cells of the finer grid that the kernel reaches from an input voxel. Arguments and errors are those
    of :class:`SparseConvolution`.
    """

    NDIM = 3


class SparseConvTranspose4d(_Transposed):
    """A transposed convolution on voxels with four spatial axes, which is not supported. Creating the layer raises
    ``SL208``.
    """

    NDIM = 4


class SparseInverseConv1d(_Inverse):
    """The inverse of the layer with the same ``indice_key``, on voxels with one spatial axis, ``[m, in_channels]`` ->
    ``[n, out_channels]``. Its outputs lie on the input voxels of that layer.

    The call raises ``SL208`` if there is no such layer or if its kernel size differs.
    """

    NDIM = 1


class SparseInverseConv2d(_Inverse):
    """The inverse of the layer with the same ``indice_key``, on voxels with two spatial axes, ``[m, in_channels]`` ->
    ``[n, out_channels]``. Its outputs lie on the input voxels of that layer.

    The call raises ``SL208`` if there is no such layer or if its kernel size differs.
    """

    NDIM = 2


class SparseInverseConv3d(_Inverse):
    """The inverse of the layer with the same ``indice_key``, on voxels with three spatial axes, ``[m, in_channels]`` ->
    ``[n, out_channels]``. Its outputs lie on the input voxels of that layer.

    The call raises ``SL208`` if there is no such layer or if its kernel size differs.
    """

    NDIM = 3


class SparseInverseConv4d(_Inverse):
    """An inverse convolution on voxels with four spatial axes, which is not supported. Creating the layer raises
    ``SL208``.
    """

    NDIM = 4


class SubMConv1d(_SubM):
    """A submanifold convolution on voxels with one spatial axis, ``[n, in_channels]`` -> ``[n, out_channels]``. Its
    outputs lie on the voxels of the input. Layers with equal ``indice_key`` share their neighbour tables. Arguments and
    errors are those of :class:`SparseConvolution`.
    """

    NDIM = 1


class SubMConv2d(_SubM):
    """A submanifold convolution on voxels with two spatial axes, ``[n, in_channels]`` -> ``[n, out_channels]``. Its
    outputs lie on the voxels of the input. Layers with equal ``indice_key`` share their neighbour tables. Arguments and
    errors are those of :class:`SparseConvolution`.
    """

    NDIM = 2


class SubMConv3d(_SubM):
    """A submanifold convolution on voxels with three spatial axes, ``[n, in_channels]`` -> ``[n, out_channels]``. Its
    outputs lie on the voxels of the input. Layers with equal ``indice_key`` share their neighbour tables. Arguments and
    errors are those of :class:`SparseConvolution`.
    """

    NDIM = 3


class SubMConv4d(_SubM):
    """A submanifold convolution on voxels with four spatial axes, which is not supported. Creating the layer raises
    ``SL208``.
    """

    NDIM = 4


DEFAULT_SPARSE_CONV_TYPES = {
    *(SubMConv1d, SubMConv2d, SubMConv3d, SubMConv4d),
    *(SparseConv1d, SparseConv2d, SparseConv3d, SparseConv4d),
    *(SparseInverseConv1d, SparseInverseConv2d, SparseInverseConv3d, SparseInverseConv4d),
    *(SparseConvTranspose1d, SparseConvTranspose2d, SparseConvTranspose3d, SparseConvTranspose4d),
}
