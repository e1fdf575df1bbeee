"""The pytree of a ``SparseTensor``: its features, and its voxels as the same object where that is possible.

``DistributedDataParallel``, ``fully_shard`` and checkpointing search for tensors in the inputs and outputs of a module.
They find the features. The coordinates are a leaf of the pytree too, for ``torch.export`` and ``tree_map``. A tree that
is rebuilt with the same coordinates gets the same ``Geometry`` back, with its tables and its way back. Code that walks
dataclasses gets the ``Geometry`` itself: it holds integers, which have neither gradients nor precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap.plugin_api.containers import register_container
from shiplap_sparse3d.geometry import Geometry, Strided
from shiplap_sparse3d.plan import Plan
from shiplap_sparse3d.tensor import SparseTensor

__all__: list[str] = []


class _GridFacts:
    """The attributes of a ``Geometry`` besides its coordinates, which torch's pytrees keep as its context. ``facts`` is
    the tuple ``(spatial_shape, batch_size, padded, ndim)``. ``source`` is the geometry that has them, or None. Two
    objects are equal if their facts are equal, whatever their sources are.
    """

    def __init__(self, facts: tuple[Any, ...], source: Geometry | None = None) -> None:
        """Store ``facts``, the attributes of a geometry besides its coordinates, and ``source``, the geometry that has
        them, if there is one.
        """
        self.facts, self.source = facts, source

    def __eq__(self, other: object) -> bool:
        """Return whether ``other`` has equal facts. The source is not compared."""
        return isinstance(other, _GridFacts) and self.facts == other.facts

    def __hash__(self) -> int:
        """Return the hash of the facts."""
        return hash(self.facts)

    def __repr__(self) -> str:
        """Return the facts as text."""
        return f"Grid{self.facts}"


def _take_geometry(geometry: Geometry) -> tuple[Sequence[Any], Any]:
    """Return ``([coordinates], facts)`` of ``geometry``, from which torch's pytrees rebuild it. The coordinates are its
    only leaf. ``facts`` is a ``_GridFacts`` with the other attributes.
    """
    facts = geometry.spatial_shape, geometry.batch_size, geometry.padded, geometry.ndim
    return [geometry.coords], _GridFacts(facts, geometry)


def _make_geometry(children: Sequence[Any], grid: _GridFacts) -> Geometry:
    """Return the geometry with the coordinates in ``children``, a sequence of one tensor, and the attributes ``grid``.
    If the tensor is that of the geometry from which ``grid`` was taken, return that geometry itself with its neighbour
    tables. Raise ``SL219`` if the number of rows has changed.
    """
    (coords,) = children
    # The tables stay valid, and layers on the same geometry find them.
    if grid.source is not None and coords is grid.source.coords:
        return grid.source
    # A batch that was cut by rows would silently lose a part of a scene.
    if grid.source is not None and _lost_rows(coords, grid.source.coords):
        got = f"{len(coords)} rows of {len(grid.source.coords)}"
        raise error("SL219", where="SparseTensor, as a tree of tensors", got=got, expected="as many rows as there were")
    shape, batch_size, padded, ndim = grid.facts
    return Geometry.unchecked(coords, shape, batch_size, padded, ndim)


def _lost_rows(coords: Any, before: Any) -> bool:
    """Return whether ``coords`` has another number of rows than ``before``. In a graph, and unless both are plain
    instances of ``Tensor``, the result is False.
    """
    plain = type(coords) is Tensor and type(before) is Tensor and not torch.compiler.is_compiling()
    return plain and coords.dim() == 2 and coords.shape[0] != before.shape[0]


def _load_grid(facts: Any) -> _GridFacts:
    """Return the ``_GridFacts`` of ``facts``, a list that ``torch.export`` has saved with a pytree. The list holds the
    cells per axis, the number of scenes, whether rows may be padding, and the number of axes.
    """
    shape, *rest = facts
    return _GridFacts((tuple(shape), *rest))


def _make_tensor(children: Sequence[Any], rest: Any) -> SparseTensor:
    """Return the sparse tensor of ``children``, its features and its geometry, without the checks of the constructor.
    ``rest`` is not used.
    """
    made = object.__new__(SparseTensor)
    made.feats, made.geometry = children
    made.checkpointed = False
    return made


def _take_plan(plan: Plan) -> tuple[Sequence[Any], Any]:
    """Return ``(tensors, settings)`` of ``plan`` (the neighbour tables of a convolution) for torch's pytrees. The
    tensors are the leaves ``[table, order, masks, back]``. The settings are ``(rows, reflect, symmetric)``.
    """
    return [plan.table, plan.order, plan.masks, plan.back], (plan.rows, plan.reflect, plan.symmetric)


def _make_plan(children: Sequence[Any], rest: Any) -> Plan:
    """Return the plan (the neighbour tables of a convolution) that ``_take_plan`` took apart. ``children`` are its
    tensors ``(table, order, masks, back)``, and ``rest`` its settings ``(rows, reflect, symmetric)``.
    """
    (table, order, masks, back), (rows, reflect, symmetric) = children, rest
    return Plan(table, rows, order, masks, reflect, symmetric, back)


register_container(Geometry, _take_geometry, _make_geometry, dump=lambda grid: list(grid.facts), load=_load_grid)
register_container(SparseTensor, lambda x: ([x.feats, x.geometry], None), _make_tensor, fields=("feats", "geometry"))
register_container(Plan, _take_plan, _make_plan, load=tuple)
register_container(Strided, lambda s: ([s.geometry, s.plan], None), lambda children, rest: Strided(*children))
