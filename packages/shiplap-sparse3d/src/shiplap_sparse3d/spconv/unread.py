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
    """The attributes of ``SparseConvTensor`` that no layer reads, only the user's code. A tensor and those made from it
    share one instance until an attribute of one of them is set.
    """

    grid: Tensor | None = None
    voxel_num: Tensor | None = None
    benchmark: bool = False
    force_algo: ConvAlgo | None = None
    timer: Any = field(default_factory=lambda: CUDAKernelTimer(False))
    benchmark_record: dict[str, Any] = field(default_factory=dict)


def unread_member(name: str) -> Any:
    """Return a property of ``SparseConvTensor`` for the attribute ``name``, such as ``grid``. No layer reads it, and a
    tensor made from another one takes it over. Setting it changes one tensor alone.
    """

    def get(tensor: Any) -> Any:
        """Return the attribute ``name`` of ``tensor``. ``name`` is an argument of the enclosing function."""
        return getattr(tensor._unread, name)

    def put(tensor: Any, value: Any) -> None:
        """Set the attribute ``name`` of ``tensor`` to ``value``. ``name`` is an argument of the enclosing function.
        Tensors that were made from ``tensor`` before keep their own value.
        """
        tensor._unread = replace(tensor._unread, **{name: value})

    return property(get, put)
