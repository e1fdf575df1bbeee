"""Hash maps on the device of their tensors: ops that insert and look up 64-bit keys, or voxels of a grid.

A table is ``keys int64 [t]`` and ``values int32 [t]``, both -1 where it is empty. It is probed linearly from
``home_slot``, and a slot goes to the lowest key (as unsigned) that passes it, which makes the tables a function of the
set of their entries: neither the order of insertion nor the number of threads shows (Amble and Knuth, "Ordered hash
tables", 1974). The key -1 is padding: never inserted, never found. A key given more than once, in one call or in
several, keeps its lowest value (as unsigned). Probes are bounded by the capacity.
"""

from __future__ import annotations

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

import shiplap as sl
from shiplap.plugin_api import error
from shiplap_sparse3d.coords import MAX_CELLS, inside_grid, keys_of, refuse_rows
from shiplap_sparse3d.cpu import LIBRARY

__all__ = [
    "hash_insert",
    "hash_insert_3d",
    "hash_insert_3d_index",
    "hash_lookup",
    "hash_lookup_3d",
    "init_hashmap",
]

# The key of a free slot and of padding, and the value of a key that is missing.
EMPTY = -1

_TABLE = ("table_keys", "table_values")
_CAPACITY = "t < 4294967296"
_GRID = ("len(spatial_shape) == 3", "min(spatial_shape) >= 1")


def init_hashmap(n: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """Return the keys (``int64``) and values (``int32``) of an empty hash table, all -1, with room for ``n`` distinct
    keys.

    Its capacity is ``2 * n + 1``. Every key takes one slot, so any ``n`` keys fit. At least half of the slots stay
    empty, so runs of used slots are short. If ``device`` is None, the tensors are on torch's default device.
    """
    capacity = 2 * n + 1
    return (
        torch.full((capacity,), EMPTY, dtype=torch.int64, device=device),
        torch.full((capacity,), EMPTY, dtype=torch.int32, device=device),
    )


# --- the reference: all entries of a table, laid out anew ------------------------------------------------------------

_KEY, _VALUE = 2**64, 2**32


def home_slot(key: int, capacity: int) -> int:
    """Return the slot of a hash table of ``capacity`` slots at which the search for the 64-bit ``key`` starts. It is
    the result of MurmurHash3's 64-bit finaliser, scaled to the capacity.
    """
    mixed = key % _KEY
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 1):
        mixed = (mixed ^ mixed >> 33) * factor % _KEY
    return (mixed >> 32) * capacity >> 32


def _to_signed(value: int, modulus: int) -> int:
    """Return ``value``, a number from 0 to ``modulus - 1``, as a signed number. Values from ``modulus // 2`` on become
    negative.
    """
    return value - modulus if value >= modulus // 2 else value


def _insert_sorted(op: str, table_keys: Tensor, table_values: Tensor, keys: Tensor, values: Tensor) -> None:
    """Insert ``keys`` with ``values`` into the hash table, in place, by building the table again. In ascending order
    (as unsigned numbers) each key takes the first free slot from where its search starts.

    Of several values for a key the lowest, as an unsigned number, is stored. Raise ``SL211`` with the name ``op`` if
    there are more keys than slots.
    """
    entries: dict[int, int] = {}
    for key, value in zip(
        [*table_keys.tolist(), *keys.tolist()], [*table_values.tolist(), *values.tolist()], strict=True
    ):
        if key != EMPTY:
            # Keys and values are compared as unsigned numbers, as ``atomic_min`` on a GPU does.
            entries[key % _KEY] = min(value % _VALUE, entries.get(key % _KEY, _VALUE))
    capacity = table_keys.shape[0]
    if len(entries) > capacity:
        raise table_full_error(op, capacity)
    slots: list[tuple[int, int]] = [(EMPTY, EMPTY)] * capacity
    # In ascending order each key takes the first free slot, which is the layout that every order of insertion leads to.
    for key in sorted(entries):
        slot = home_slot(key, capacity)
        while slots[slot][0] != EMPTY:
            slot = (slot + 1) % capacity
        slots[slot] = _to_signed(key, _KEY), _to_signed(entries[key], _VALUE)
    table_keys.copy_(torch.tensor([k for k, _ in slots], dtype=torch.int64))
    table_values.copy_(torch.tensor([v for _, v in slots], dtype=torch.int32))


def table_full_error(op: str, capacity: int) -> sl.ShiplapError:
    """Return the error ``SL211`` of the op ``op`` for a hash table of ``capacity`` slots without a free one."""
    return error(
        "SL211",
        where=f"sparse3d::{op}",
        got=f"more distinct keys than the {capacity} slots of the table",
        expected="a table that holds them all",
        fix="make the table with init_hashmap(number of keys)",
    )


def _look_up_keys(table_keys: Tensor, table_values: Tensor, keys: Tensor) -> Tensor:
    """Return the value of each of ``keys`` in the hash table ``(table_keys, table_values)``, as ``int32`` in the shape
    of ``keys``. It is -1 for a key that is missing.
    """
    order = table_keys.argsort()
    if order.numel() == 0:
        return keys.new_full(keys.shape, EMPTY, dtype=torch.int32)
    # A missing key may sort behind the last one, so the place is clamped and then compared.
    at = order[torch.searchsorted(table_keys[order], keys.contiguous()).clamp_max(order.numel() - 1)]
    return torch.where((table_keys[at] == keys) & (keys != EMPTY), table_values[at], EMPTY)


def voxel_keys(op: str, coords: Tensor, spatial_shape: list[int]) -> Tensor:
    """Return the keys ``int64 [n]`` of the voxels ``coords``, with -1 for padding. A key is the number of the voxel's
    cell among all scenes. Raise ``SL211`` for rows outside the grid and for a grid with 2^63 cells or more. ``op`` is
    the op's name in the error.
    """
    padding = coords[:, 0] == EMPTY
    refuse_rows(
        op,
        ~(inside_grid(coords, spatial_shape) | padding),
        "coords row {row} is outside spatial_shape " + str(tuple(spatial_shape)),
    )
    check_cells(op, coords, spatial_shape)
    return torch.where(padding, EMPTY, keys_of(coords, spatial_shape))


def check_cells(op: str, coords: Tensor, spatial_shape: list[int]) -> None:
    """Raise ``SL211`` if the cells of the grid ``spatial_shape``, counted over all scenes in ``coords``, are 2^63 or
    more. Int64 keys cannot number so many. ``op`` is the op's name in the message.
    """
    scenes = int(coords[:, 0].max()) + 1 if coords.shape[0] else 1
    if scenes * spatial_shape[0] * spatial_shape[1] * spatial_shape[2] >= MAX_CELLS:
        raise error("SL211", where=f"sparse3d::{op}", got=f"a grid {tuple(spatial_shape)} of 2^63 cells or more")


# --- ops -------------------------------------------------------------------------------------------------------------


@sl.op("sparse3d::hash_insert", mutates=_TABLE, requires=(_CAPACITY,))
def hash_insert(
    table_keys: Int64[Tensor, "t"],
    table_values: Int32[Tensor, "t"],
    keys: Int64[Tensor, "m"],
    values: Int32[Tensor, "m"],
) -> None:
    """Insert ``keys`` with ``values`` into the table, in place. Of several values for a key the lowest is stored. Raise
    ``SL211`` if the table has no room. Its content is then undefined.

    The table is a pair of tensors, as :func:`init_hashmap` returns them. The key -1 is padding, which is not inserted.
    Values are compared as unsigned numbers, also with the values that the table already has.
    """
    _insert_sorted("hash_insert", table_keys, table_values, keys, values)


@sl.op("sparse3d::hash_lookup", requires=(_CAPACITY,))
def hash_lookup(
    table_keys: Int64[Tensor, "t"], table_values: Int32[Tensor, "t"], keys: Int64[Tensor, "m"]
) -> Int32[Tensor, "m"]:
    """Return the value of each of ``keys`` in the table, or -1 for a key that is missing.

    The table is a pair of tensors, as :func:`init_hashmap` returns them. The key -1 is padding, which is never found.
    """
    return _look_up_keys(table_keys, table_values, keys)


@sl.op("sparse3d::hash_insert_3d", mutates=_TABLE, requires=(_CAPACITY, *_GRID))
def hash_insert_3d(
    table_keys: Int64[Tensor, "t"],
    table_values: Int32[Tensor, "t"],
    coords: Int32[Tensor, "m 4"],
    values: Int32[Tensor, "m"],
    spatial_shape: list[int],
) -> None:
    """Insert the voxels ``coords`` with ``values`` into the table, in place. The key of a voxel is the number of its
    cell, ``((b*X + x)*Y + y)*Z + z``. Raise ``SL211`` as ``hash_insert`` does, and for coordinates outside
    ``spatial_shape`` (cells per axis).

    The table is a pair of tensors, as :func:`init_hashmap` returns them. Voxels with the scene -1 are padding, which is
    not inserted. Of several values for a voxel the lowest, as an unsigned number, is stored.
    """
    _insert_sorted(
        "hash_insert_3d", table_keys, table_values, voxel_keys("hash_insert_3d", coords, spatial_shape), values
    )


@sl.op("sparse3d::hash_insert_3d_index", mutates=_TABLE, requires=(_CAPACITY, *_GRID))
def hash_insert_3d_index(
    table_keys: Int64[Tensor, "t"],
    table_values: Int32[Tensor, "t"],
    coords: Int32[Tensor, "m 4"],
    spatial_shape: list[int],
) -> None:
    """Insert each voxel with its row number as the value into the table, in place. Of equal voxels the first row is
    stored. Raise ``SL211`` as ``hash_insert_3d`` does.

    The table is a pair of tensors, as :func:`init_hashmap` returns them. Voxels with the scene -1 are padding, which is
    not inserted. A voxel that the table already has keeps a lower value.
    """
    keys = voxel_keys("hash_insert_3d_index", coords, spatial_shape)
    rows = torch.arange(coords.shape[0], dtype=torch.int32)
    _insert_sorted("hash_insert_3d_index", table_keys, table_values, keys, rows)


@sl.op("sparse3d::hash_lookup_3d", requires=(_CAPACITY, *_GRID))
def hash_lookup_3d(
    table_keys: Int64[Tensor, "t"],
    table_values: Int32[Tensor, "t"],
    coords: Int32[Tensor, "m 4"],
    spatial_shape: list[int],
) -> Int32[Tensor, "m"]:
    """Return the value of each voxel in the table. It is -1 for a voxel outside the grid and for one that is missing
    from the table. Raise ``SL211`` if the grid has too many cells.

    The table is a pair of tensors, as :func:`init_hashmap` returns them. A grid has too many cells if int64 numbers
    cannot count those of all scenes.
    """
    check_cells("hash_lookup_3d", coords, spatial_shape)
    keys = torch.where(inside_grid(coords, spatial_shape), keys_of(coords, spatial_shape), EMPTY)
    return _look_up_keys(table_keys, table_values, keys)


for _op in (hash_insert, hash_lookup, hash_insert_3d, hash_insert_3d_index, hash_lookup_3d):
    _op.kernel("cpu", sl.cabi(LIBRARY, f"sparse3d_{_op.spec.opname}"))
