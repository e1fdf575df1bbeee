"""Layers that join branches: concatenation, sums on the same voxels, sums on the union of voxels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shiplap.plugin_api import error
from shiplap_sparse3d import ops as kernels
from shiplap_sparse3d.axes import same_number, same_numbers
from shiplap_sparse3d.spconv.core import SparseConvTensor, check_sparse, indices_of
from shiplap_sparse3d.spconv.modules import SparseModule
from shiplap_sparse3d.spconv.tracing import one_node

__all__ = ["AddTable", "AddTableMisaligned", "ConcatTable", "JoinTable", "sparse_add"]


def _check_joinable(where: str, tensors: list[SparseConvTensor], *attributes: str) -> None:
    """Raise ``SL209`` if one of ``tensors`` is not a sparse tensor, and ``SL208`` if they differ in one of
    ``attributes`` (such as "spatial_shape"). ``where`` is the layer's name in the message.
    """
    for tensor in tensors:
        check_sparse(where, tensor)
    for what in attributes:
        seen = [_ATTRIBUTES[what](tensor) for tensor in tensors]
        for value in seen[1:]:
            if not _equal_members(value, seen[0]):
                raise error(
                    "SL208",
                    where=where,
                    got=f"{what} {value}",
                    expected=f"{what} {seen[0]}",
                    fix="use AddTableMisaligned for tensors on different voxels of one grid",
                )


def _equal_members(value: Any, first: Any) -> bool:
    """Return whether ``value`` and ``first`` are equal. They are two lists of sizes or two numbers. While a graph is
    compiled, sizes may be symbols.
    """
    if isinstance(value, list):
        return len(value) == len(first) and same_numbers(value, first)
    return same_number(value, first)


# The properties in which the tensors that a layer joins may have to agree.
_ATTRIBUTES: dict[str, Any] = {
    "spatial_shape": lambda t: t.spatial_shape,
    "batch_size": lambda t: t.batch_size,
    "number of channels": lambda t: t.features.shape[1],
    "number of voxels": lambda t: t.indices.shape[0],
}


class _JoinModule(SparseModule):
    """The base of the layers that join several sparse tensors into one."""

    def input_spatial_size(self, out_size: Any) -> Any:
        """Return ``out_size``, since the layer does not change the spatial size."""
        return out_size


class JoinTable(_JoinModule):
    """A layer that concatenates the channels of several sparse tensors, row by row, on the voxels of the first one. The
    result shares the first one's ``indice_dict``.
    """

    @one_node
    def forward(self, input: list[SparseConvTensor]) -> SparseConvTensor:
        """Return a sparse tensor with the features of all tensors of ``input`` concatenated along the channels, on the
        voxels of the first one. Raise ``SL208`` if their spatial shapes, batch sizes or numbers of voxels differ.
        """
        _check_joinable("JoinTable", input, "spatial_shape", "batch_size", "number of voxels")
        return input[0].replace_feature(torch.cat([tensor.features for tensor in input], 1))


class AddTable(_JoinModule):
    """A layer that adds the features of several sparse tensors, row by row, on the voxels of the first one. The result
    shares the first one's ``indice_dict``.
    """

    @one_node
    def forward(self, input: list[SparseConvTensor]) -> SparseConvTensor:
        """Return a sparse tensor with the sum of the features of all tensors of ``input``, row by row, on the voxels of
        the first one. Raise ``SL208`` if their spatial shapes, batch sizes or numbers of rows or channels differ.
        """
        _check_joinable("AddTable", input, *_ATTRIBUTES)
        total = input[0].features
        for tensor in input[1:]:
            # Out of place, since autograd may need the features of the first tensor.
            total = total + tensor.features
        return input[0].replace_feature(total)


class AddTableMisaligned(_JoinModule):
    """A layer that adds several sparse tensors on the union of their voxels, by :func:`sparse_add`."""

    @one_node
    def forward(self, input: list[SparseConvTensor]) -> SparseConvTensor:
        """Return a sparse tensor on the union of the voxels of all tensors of ``input``. Its features are the sum of
        theirs at each voxel.
        """
        return sparse_add(*input)


class ConcatTable(SparseModule):
    """A container that calls each of its modules with the same input. It returns the list of their results."""

    def forward(self, input: Any) -> list[Any]:
        """Return the list of the results of all modules for the same ``input``."""
        return [module(input) for module in self._modules.values() if module is not None]

    def add(self, module: nn.Module) -> ConcatTable:
        """Append ``module`` and return this container."""
        self.add_module(str(len(self._modules)), module)
        return self

    def input_spatial_size(self, out_size: Any) -> Any:
        """Return the input size that the first module computes for the output size ``out_size``."""
        return self._modules["0"].input_spatial_size(out_size)  # type: ignore[union-attr,operator]


def sparse_add(*tens: SparseConvTensor) -> SparseConvTensor:
    """Return the sum of sparse tensors of one grid, on the union of their voxels. The voxels are in ascending order,
    and ``indice_dict`` is empty.

    If one operand has every voxel of the union, the sum is on its voxels instead, in their order and with its
    ``indice_dict``. While a graph is compiled, this is not tested. Raise ``SL208`` if grids or numbers of channels
    differ.
    """
    first = tens[0]
    _check_joinable("sparse_add", list(tens), "spatial_shape", "batch_size", "number of channels")
    # The union is found by uniting all rows and keeping the distinct ones.
    coords = torch.cat([tensor.geometry.coords for tensor in tens])
    union, inverse, _ = kernels.distinct_voxels(coords)
    features = torch.cat([tensor.features for tensor in tens])
    total = features.new_zeros(union.shape[0], features.shape[1]).index_add(0, inverse.long(), features)
    if not torch.compiler.is_compiling():
        start = 0
        for tensor in tens:
            stop = start + tensor.indices.shape[0]
            # This tensor has every voxel of the union.
            if stop - start == union.shape[0]:
                return tensor.replace_feature(total[inverse[start:stop].long()])
            start = stop
    return first.replace_feature(total).onto(indices_of(union, first.ndim))
