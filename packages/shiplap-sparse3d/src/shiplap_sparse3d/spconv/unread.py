"""Members of spconv's tensors that no layer reads: each tensor passes them on to the next one, as one object."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from shiplap_sparse3d.spconv.record import ConvAlgo
from shiplap_sparse3d.spconv.timer import CUDAKernelTimer

__all__ = ["UnreadMembers", "unread_member"]


@dataclass(frozen=True)
class UnreadMembers:
    """The arguments of ``SparseConvTensor`` that only the user's code reads. Tensors share one instance until a member
    of one of them is set.
    """

    grid: Tensor | None = None
    voxel_num: Tensor | None = None
    benchmark: bool = False
    force_algo: ConvAlgo | None = None
    timer: Any = field(default_factory=lambda: CUDAKernelTimer(False))
    benchmark_record: dict[str, Any] = field(default_factory=dict)


def unread_member(name: str) -> Any:
    """Return a property of ``SparseConvTensor`` for the member ``name``, such as ``grid``. Models set such members, no
    layer reads them, and each new tensor takes them over. Setting one changes that tensor alone.
    """

    def get(tensor: Any) -> Any:
        """Return the member ``name`` (argument of ``unread_member``) of ``tensor``. No layer reads it."""
        return getattr(tensor._unread, name)

    def put(tensor: Any, value: Any) -> None:
        """Set the member ``name`` (argument of ``unread_member``) of ``tensor`` to ``value``. Tensors made from it
        earlier keep their own value.
        """
        tensor._unread = replace(tensor._unread, **{name: value})

    return property(get, put)
