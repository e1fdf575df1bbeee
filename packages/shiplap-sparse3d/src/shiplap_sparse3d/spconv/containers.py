"""The pytree of a ``SparseConvTensor``: its features and indices, as in ``shiplap_sparse3d.containers``.

Code that walks dataclasses makes a tensor by the constructor, so the copy has an ``indice_dict`` of its own with the
present records, and builds other tables anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shiplap.plugin_api.containers import register_container
from shiplap_sparse3d.spconv.core import SparseConvTensor

__all__: list[str] = []


class _TensorMembers:
    """The attributes of a sparse tensor besides features and indices, as the part of a pytree's structure that is not
    leaves. All instances are equal, so that the pytrees of two sparse tensors have the same structure.
    """

    def __init__(self, source: SparseConvTensor) -> None:
        """Store ``source``, from which a rebuilt tensor takes all attributes other than features and indices."""
        self.source = source

    def __eq__(self, other: object) -> bool:
        """Return True for any other instance, since pytrees of sparse tensors have the same structure whatever these
        attributes are.
        """
        return isinstance(other, _TensorMembers)

    def __hash__(self) -> int:
        """Return the same hash for all instances, since they are equal."""
        return hash(_TensorMembers)


def _make_tensor(children: Sequence[Any], rest: _TensorMembers) -> SparseConvTensor:
    """Return a sparse tensor with the leaves ``children`` (features, indices) of a pytree and the other attributes of
    ``rest.source``. If its indices are not those of the source, its ``indice_dict`` (the records of convolutions by
    key) is empty.
    """
    made = object.__new__(SparseConvTensor)
    vars(made).update(vars(rest.source))
    made._features, indices = children
    if isinstance(indices, Tensor):
        return made if indices is made._indices else made.onto(indices)
    made._indices, made.indice_dict = indices, {}  # tree_map may put anything here: checkpoint of torch 2.11 puts None
    return made


FIELDS = ["features", "indices", "spatial_shape", "batch_size", "grid", "voxel_num", "indice_dict", "benchmark"]
FIELDS += ["force_algo"]

register_container(
    SparseConvTensor, lambda x: ([x.features, x.indices], _TensorMembers(x)), _make_tensor, fields=FIELDS
)
