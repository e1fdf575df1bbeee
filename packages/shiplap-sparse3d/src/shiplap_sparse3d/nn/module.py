"""The base class of modules that take a ``SparseTensor`` and not rows of features."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shiplap.plugin_api import error
from shiplap_sparse3d.axes import expand_axes, per_axis
from shiplap_sparse3d.coords import check_rows
from shiplap_sparse3d.geometry import Geometry, GeometryOrigin
from shiplap_sparse3d.reentrant import refuse_checkpoint as refuse_reentrant
from shiplap_sparse3d.scenes import require_sparse
from shiplap_sparse3d.tensor import SparseTensor

__all__ = ["SparseModule"]


class SparseModule(nn.Module):
    """The base of the modules that take a ``SparseTensor``. :class:`Sequential` passes the sparse tensor to instances
    of this class, and its features to other modules.
    """

    @classmethod
    def _refuse_arguments(cls, others: Mapping[str, Any]) -> None:
        """Raise ``SL209`` if ``others``, the keyword arguments that the constructor does not have, is not empty. The
        message lists the arguments that it has.
        """
        if others:
            got = ", ".join(f"{name}={value!r}" for name, value in others.items())
            # ``others`` only collects the arguments that are refused here.
            names = [name for name in inspect.signature(cls).parameters if name not in ("self", "others", "factory")]
            fix = f"remove the argument; {cls.__name__} takes {', '.join(names)}"
            raise error("SL209", where=cls.__name__, got=got, expected=f"arguments of {cls.__name__}", fix=fix)

    def _whole_number(self, value: Any, name: str, least: int) -> int:
        """Return ``value``, the argument ``name``, as an int. Raise ``SL209`` if it is not an integer, and ``SL208`` if
        it is below ``least``.
        """
        (number,) = per_axis(value, f"{type(self).__name__}, argument {name!r}", 1, least)
        return number

    def _check_gradient(self, x: SparseTensor) -> None:
        """Raise ``SL215`` if ``x`` enters or leaves a reentrant checkpoint, in which its gradient would be lost."""
        refuse_reentrant(type(self).__name__, x)

    def _check_axes(self, x: SparseTensor, ndim: int) -> None:
        """Raise ``SL209`` if ``x`` is not a sparse tensor, and ``SL201`` if it does not have ``ndim`` axes. Raise
        ``SL202`` if its features and its voxels differ in number.
        """
        require_sparse(type(self).__name__, x)
        if x.geometry.ndim != ndim:
            raise error(
                "SL201",
                where=type(self).__name__,
                got=f"voxels with {x.geometry.ndim} axes",
                expected=f"{ndim} axes",
                fix="use the module of that name for as many axes",
            )
        self._check_gradient(x)
        check_rows(type(self).__name__, x.feats, x.geometry.coords.shape[0])


def voxels_of(target: Tensor | SparseTensor, x: SparseTensor) -> Tensor | Geometry:
    """Return the voxels of ``target``, the argument with which a caller chooses the outputs of a layer for ``x``. If
    ``target`` is a sparse tensor, this is its geometry.

    If it is the tensor of coordinates of voxels from which layers led to those of ``x``, as in an encoder, these are
    returned. They have their grid, which may have cells that a strided layer left out. Other coordinates are returned
    unchanged.
    """
    if isinstance(target, SparseTensor):
        return target.geometry
    origin = x.geometry.parent
    while origin is not None and origin.geometry.coords is not target:
        origin = origin.geometry.parent
    return target if origin is None else origin.geometry


def origin_of(
    module: nn.Module, x: SparseTensor, kernel: Sequence[int], stride: Sequence[int] | None = None
) -> GeometryOrigin:
    """Return the record of the layer that made the voxels of ``x``, which holds that layer's input voxels and its
    window. ``module``, which reverses that layer, is named in the error. Raise ``SL208`` if no layer made the voxels,
    or if it had another ``kernel`` or ``stride``. A ``stride`` of None is not compared.
    """
    ndim, origin = x.geometry.ndim, x.geometry.parent
    if origin is not None:
        window = origin.window
        same = window.kernel == expand_axes(kernel, "kernel", ndim)
        if same and (stride is None or window.stride == expand_axes(stride, "stride", ndim)):
            return origin
    made = "no strided convolution before it"
    if origin is not None:
        made = f"one with kernel {origin.window.kernel[-ndim:]}"
        made += "" if stride is None else f" and stride {origin.window.stride[-ndim:]}"
    name = f"SparseConv{ndim}d"
    raise error(
        "SL208",
        where=type(module).__name__,
        got=made,
        expected=f"a {name} with kernel {kernel}" + ("" if stride is None else f" and stride {stride}"),
        fix=f"pair each inverse convolution with a {name} of the same kernel",
    )
