"""A convolution layer inside a graph of ``torch.compile``: ``SparseConvolution.forward`` in fewer frames.

Dynamo traces each line and each frame of every layer of a network, whether or not its caches have the graph. That takes
most of the time that a second process waits (docs/consumers.md, "How long the first compiled call takes"). So the usual
case is written out here: a submanifold layer that finds its record, on the record's own voxels. All other cases, and
every error, go to the functions that eager calls use.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from shiplap_sparse3d.coords import other_channels
from shiplap_sparse3d.spconv import indices
from shiplap_sparse3d.spconv.activation import apply_activation
from shiplap_sparse3d.spconv.core import SparseConvTensor, check_sparse
from shiplap_sparse3d.spconv.record import ConvAlgo, IndiceData
from shiplap_sparse3d.spconv.sizes import assume_rows

__all__ = ["convolve_in_graph"]


class TracedLayer(Protocol):
    """The members of a ``SparseConvolution`` that this module reads."""

    weight: Tensor
    bias: Tensor | None
    indice_key: str | None
    act_type: str | None
    act_alpha: float
    algo: ConvAlgo
    kernel_size: list[int]
    dilation: list[int]
    ndim: int
    in_channels: int
    groups: int
    subm: bool
    inverse: bool
    conv1x1: bool
    training: bool
    record_voxel_count: bool

    def pointwise(self, features: Tensor) -> Tensor: ...
    def indice_data(self, where: str, key: str | None, input: SparseConvTensor) -> IndiceData: ...
    def get_max_num_voxels(self) -> Tensor | None: ...


def convolve_in_graph(
    layer: TracedLayer, input: SparseConvTensor, add_input: SparseConvTensor | None = None
) -> SparseConvTensor:
    """Return ``layer(input, add_input)`` inside a graph of ``torch.compile``, in fewer Python frames than
    ``SparseConvolution.forward``. The result is the convolution with its bias and activation, plus ``add_input`` if it
    is given.
    """
    known = isinstance(input, SparseConvTensor)
    if not known:
        check_sparse(type(layer).__name__, input)
    features = input.features
    if features.size(1) != layer.in_channels:  # shape would be a tuple with a symbol for the rows
        raise other_channels(type(layer).__name__, features, layer.in_channels)
    output = (
        input.replace_feature(layer.pointwise(features)) if layer.conv1x1 else _convolve_traced(layer, input, features)
    )
    if layer.act_type is not None:
        output = output.replace_feature(apply_activation(output.features, layer.act_type, layer.act_alpha))
    return output if add_input is None else output + add_input


def _convolve_traced(layer: TracedLayer, input: SparseConvTensor, features: Tensor) -> SparseConvTensor:
    """Return the convolution of ``features`` as a sparse tensor on the layer's output voxels, without the activation.

    The neighbours come from the record under the layer's ``indice_key``, or from a new record.
    """
    key, voxels, inverse = layer.indice_key, input.indices, layer.inverse
    data = None if key is None else input.indice_dict.get(key)
    # Identity of the indices shows that the record is of these very voxels.
    if data is None or inverse or data.indices is not voxels or not _fits_record(layer, input, data):
        data = layer.indice_data(type(layer).__name__, key, input)
    # A graph traced without gradients also finds the plans that only such graphs may use.
    plan = data.way_back if inverse else data.known_plan or data.passing_plan
    # With gradients the property ``plan`` also builds the tables of the way back.
    if plan is None or (torch.is_grad_enabled() and not inverse):
        plan = data.plan
    features = plan.conv(features, layer.weight.flatten(1, layer.ndim), layer.bias, layer.groups)
    if inverse:
        return input.move(features, data.geometry, data.indices, data.spatial_shape, False)
    if layer.training:  # a graph knows of one row since the tensor was made
        assume_rows(features.shape[0], training=True)
    output = input.move(features, data.out_geometry, data.out_indices, data.out_spatial_shape, False)
    if key is not None:
        output.indice_dict[key] = data
    if layer.record_voxel_count:
        indices.count_voxels(layer.get_max_num_voxels(), features.shape[0])
    return output


def _fits_record(layer: TracedLayer, input: SparseConvTensor, data: IndiceData) -> bool:
    """Return whether ``layer`` can use ``data`` without further checks. ``data`` is the record (voxels and neighbours)
    that an earlier layer stored under the same ``indice_key``.

    That is so if both layers are submanifold and kernel, dilation, algorithm and spatial shape are equal. Lists are
    unpacked, because Dynamo traces their comparison as a program of its own.
    """
    if not layer.subm or not data.is_subm or data.algo != layer.algo:
        return False
    if layer.ndim != 3 or len(input.spatial_shape) != 3:
        return False
    a, b, c = layer.kernel_size
    d, e, f = layer.dilation
    g, h, i = data.window.ksize
    j, k, m = data.window.dilation
    x, y, z = input.spatial_shape
    p, q, r = data.spatial_shape
    if x < p or x > p or y < q or y > q or z < r or z > r:  # ``same_numbers``, which says why, without a frame
        return False
    return a == g and b == h and c == i and d == j and e == k and f == m
