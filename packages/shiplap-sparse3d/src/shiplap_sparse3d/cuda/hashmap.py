"""``hash_insert*`` and ``hash_lookup*`` in Triton: the tables of hashing.py, built by all threads at once.

A slot goes to the lowest key that passes it: ``atomic_min`` stores the key and returns the one that moves on. Values in
slots only fall, so a key at its place has lower keys in all slots from its home on, whatever the other threads do.
Therefore the keys end where the reference puts them. Values follow in a pass of their own, since keys move until then.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.plugin_api import triton_launcher
from shiplap_sparse3d.cuda import status
from shiplap_sparse3d.cuda.hash import is_inside, load_coords, report_row
from shiplap_sparse3d.cuda.lookup import OUTSIDE, TWICE, batches_below
from shiplap_sparse3d.hashing import init_hashmap

__all__ = ["index_voxels", "insert_keys", "insert_voxels", "look_up_keys", "look_up_voxels", "slot_of"]

FULL = "row {row} finds no room: more distinct keys than the table has slots"
TOO_FAR = "coords row {row} has a batch index with which spatial_shape has 2^63 cells or more"
BLOCK = 256

# The key of a free slot, and the value of a key that is missing.
EMPTY = tl.constexpr(0xFFFFFFFFFFFFFFFF)
NO_VALUE = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _first_slot_of_key(key, capacity):
    """Return the first slot at which each key of a hash map is searched, as ``hashing.home_slot`` computes it on the
    CPU.
    """
    mixed = (key ^ (key >> 33)) * 0xFF51AFD7ED558CCD
    mixed = (mixed ^ (mixed >> 33)) * 0xC4CEB9FE1A85EC53
    mixed = mixed ^ (mixed >> 33)
    return (((mixed >> 32) * capacity.to(tl.uint64)) >> 32).to(tl.int64)


@triton.jit
def _load_keys(keys, row, n):
    """Return the keys of the rows ``row`` as unsigned numbers. Rows from number ``n`` on have the empty key."""
    return tl.load(keys + row, mask=row < n, other=-1).to(tl.uint64)


@triton.jit
def slot_of(table, key, capacity):
    """Return the slot of the hash map ``table`` that holds each key (of any shape), as int64. It is -1 for a key that
    is missing.
    """
    slot, active = _first_slot_of_key(key, capacity), key != EMPTY
    result = tl.where(active, -1, -1).to(tl.int64)
    step = 0
    while (tl.max(active.to(tl.int32)) > 0) & (step < capacity):
        # Slots hold the lowest key that passed, so a higher key here means that the key is absent.
        held = tl.load(table + slot, mask=active, other=-1).to(tl.uint64)
        result = tl.where(active & (held == key), slot, result)
        active = active & (held < key)
        slot = tl.where(slot + 1 == capacity, 0, slot + 1)
        step += 1
    return result


@triton.jit(do_not_specialize=["n", "capacity", "code"])
def keys_kernel(table, keys, status, n, capacity, code, BLOCK: tl.constexpr):
    """Insert ``keys`` into the slots of the hash map ``table``. Rows for which the table is full are reported in the
    word ``status``, from which the host raises ``SL211`` later.

    The search for a slot never passes a free slot. If the last free slot is taken meanwhile, the key that is still to
    be placed is already in the table. The search then finds it after at most another round.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = _load_keys(keys, row, n)
    slots = table.to(tl.pointer_type(tl.uint64))
    slot, active = _first_slot_of_key(key, capacity), key != EMPTY
    step = 0
    # The bound ends the loop for a full table, which is reported below.
    while (tl.max(active.to(tl.int32), 0) > 0) & (step < 2 * capacity.to(tl.int64)):
        old = tl.atomic_min(slots + slot, key, mask=active, sem="relaxed")
        active = active & (old != EMPTY) & (old != key)
        key = tl.maximum(key, old)  # the lower one stays
        slot = tl.where(slot + 1 == capacity, 0, slot + 1)
        step += 1
    report_row(status, code, row, active)


@triton.jit(do_not_specialize=["n", "capacity"])
def values_kernel(table, table_values, keys, values, n, capacity, BLOCK: tl.constexpr):
    """Set the value of each key in ``table_values`` to the lower one, as an unsigned number, of its present value and
    its new value. If ``values`` is None, the new value is the row number of the key.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = slot_of(table, _load_keys(keys, row, n), capacity)
    if values is None:
        value = row.to(tl.uint32)
    else:
        value = tl.load(values + row, mask=row < n, other=-1).to(tl.uint32)
    tl.atomic_min(table_values.to(tl.pointer_type(tl.uint32)) + slot, value, mask=slot >= 0, sem="relaxed")


@triton.jit(do_not_specialize=["n", "capacity"])
def lookup_kernel(table, table_values, keys, out, n, capacity, BLOCK: tl.constexpr):
    """Write the value of each key of the hash map to ``out [n]``, or -1 for a key that is missing."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = slot_of(table, _load_keys(keys, row, n), capacity)
    tl.store(out + row, tl.load(table_values + slot, mask=slot >= 0, other=-1), mask=row < n)


@triton.jit(do_not_specialize=["n", "capacity", "code"])
def twins_kernel(table, table_values, keys, status, n, capacity, code, BLOCK: tl.constexpr):
    """Report each row whose key an earlier row has, too, in the word ``status``, from which the host raises ``SL211``
    later. The table holds the number of the first row with a key.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slot = slot_of(table, _load_keys(keys, row, n), capacity)
    first = tl.load(table_values + slot, mask=slot >= 0, other=-1)
    report_row(status, code, row, (slot >= 0) & (first != row))


@triton.jit(do_not_specialize=["n", "width", "height", "depth", "batches", "code"])
def voxel_keys_kernel(
    coords, keys, status, n, width, height, depth, batches, code, SEARCH: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the key ``((b*X + x)*Y + y)*Z + z`` of each voxel to ``keys``, or -1 outside the grid. Rows outside the
    grid are reported in the word ``status``. If ``SEARCH`` is true, only rows whose scene has no keys are reported.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b, x, y, z = load_coords(coords, row, row < n)
    good = is_inside(b, x, y, z, width, height, depth, batches)
    report_row(status, code, row, b >= batches if SEARCH else (b != -1) & ~good)
    key = ((b.to(tl.int64) * width + x) * height + y) * depth + z
    tl.store(keys + row, tl.where(good, key, -1), mask=row < n)


_keys = triton_launcher(keys_kernel)
_values = triton_launcher(values_kernel)
_lookup = triton_launcher(lookup_kernel)
_twins = triton_launcher(twins_kernel)
_voxel_keys = triton_launcher(voxel_keys_kernel)


def _row_grid(rows: int) -> tuple[int]:
    """Return the launch grid for ``rows`` rows, with one program for each block of rows."""
    return (-(-rows // BLOCK),)


def insert_keys(op: str, table_keys: Tensor, table_values: Tensor, keys: Tensor, values: Tensor | None) -> None:
    """Insert ``keys`` into the hash map, with ``values`` or, if that is None, with their row numbers. This is
    ``hashing.hash_insert`` on CUDA. ``op`` is the op's name in error messages.
    """
    _launch_insert(op, status.word(keys.device), table_keys, table_values, keys.contiguous(), values)


def insert_voxels(
    op: str, table_keys: Tensor, table_values: Tensor, coords: Tensor, values: Tensor | None, shape: Sequence[int]
) -> None:
    """Insert the voxels ``coords`` of a grid of ``shape`` into the hash map, with ``values`` or, if that is None, with
    their row numbers. This is ``op``, either ``hash_insert_3d`` or ``hash_insert_3d_index``, on CUDA.
    """
    word = status.word(coords.device)  # asked once: what this call meets is for the next one to tell
    keys = _keys_of(coords, shape, word, status.code_of(op, OUTSIDE))
    _launch_insert(op, word, table_keys, table_values, keys, values)


def look_up_keys(table_keys: Tensor, table_values: Tensor, keys: Tensor, out: Tensor) -> None:
    """Write the value of each key to ``out``, or -1 for a key that the hash map lacks. This is ``hashing.hash_lookup``
    on CUDA.
    """
    status.word(keys.device)
    _launch_lookup(table_keys, table_values, keys.contiguous(), out)


def look_up_voxels(table_keys: Tensor, table_values: Tensor, coords: Tensor, shape: Sequence[int], out: Tensor) -> None:
    """Write the value of each voxel of a grid of ``shape`` to ``out``, or -1 for a voxel that the hash map lacks. This
    is ``hashing.hash_lookup_3d`` on CUDA.
    """
    code = status.code_of("hash_lookup_3d", TOO_FAR)
    _launch_lookup(
        table_keys, table_values, _keys_of(coords, shape, status.word(coords.device), code, search=True), out
    )


def index_voxels(op: str, coords: Tensor, shape: Sequence[int], word: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of a new hash map from the voxels ``coords`` of a grid of ``shape`` to their row numbers.
    Rows outside the grid and duplicates are reported in the status word at the address ``word``, from which the host
    raises ``SL211`` later.
    """
    keys, rows = _keys_of(coords, shape, word, status.code_of(op, OUTSIDE)), coords.shape[0]
    table, values = init_hashmap(rows, coords.device)
    if rows:
        capacity = table.shape[0]
        # Three launches, since each needs the results of the one before for all rows.
        _keys[_row_grid(rows)](table, keys, word, rows, capacity, status.code_of(op, FULL), BLOCK=BLOCK)
        _values[_row_grid(rows)](table, values, keys, None, rows, capacity, BLOCK=BLOCK)
        _twins[_row_grid(rows)](table, values, keys, word, rows, capacity, status.code_of(op, TWICE), BLOCK=BLOCK)
    return table, values


def _launch_insert(
    op: str, word: int, table_keys: Tensor, table_values: Tensor, keys: Tensor, values: Tensor | None
) -> None:
    """Launch the kernels that insert ``keys`` into the hash map. Each key gets the lowest, as an unsigned number, of
    its old and new values. A full table is reported in the status word at the address ``word``, from which the host
    raises an error of ``op`` later.
    """
    code, count, capacity = status.code_of(op, FULL), keys.shape[0], table_keys.shape[0]
    if not count:
        # As after an insertion, in which the values of empty slots become -1.
        table_values.masked_fill_(table_keys == -1, -1)
        return
    table, slots = table_keys.contiguous(), table_values.contiguous()
    # Insertion moves old keys too, so old values are offered again from a copy.
    before, values = (table.clone(), slots.clone()), None if values is None else values.contiguous()
    _keys[_row_grid(count)](table, keys, word, count, capacity, code, BLOCK=BLOCK)
    # As an unsigned number -1 is the largest, so every value is lower.
    slots.fill_(-1)
    if capacity:
        _values[_row_grid(capacity)](table, slots, *before, capacity, capacity, BLOCK=BLOCK)
        _values[_row_grid(count)](table, slots, keys, values, count, capacity, BLOCK=BLOCK)
    # The kernels worked on contiguous copies where the caller's tensors were views.
    for given, used in ((table_keys, table), (table_values, slots)):
        if given.data_ptr() != used.data_ptr():
            given.copy_(used)


def _launch_lookup(table_keys: Tensor, table_values: Tensor, keys: Tensor, out: Tensor) -> None:
    """Launch the kernel that writes the value of each of ``keys`` in the hash map to ``out``, or -1 for a key that is
    missing.
    """
    table, values, count = table_keys.contiguous(), table_values.contiguous(), keys.shape[0]
    if count:
        _lookup[_row_grid(count)](table, values, keys, out, count, table.shape[0], BLOCK=BLOCK)


def _keys_of(coords: Tensor, shape: Sequence[int], word: int, code: int, search: bool = False) -> Tensor:
    """Return the hash keys ``int64 [n]`` of the voxels ``coords`` in a grid of ``shape``, with -1 outside the grid.
    Invalid rows are reported with ``code`` in the status word at the address ``word``, from which the host raises an
    error later. If ``search`` is true, only rows of a scene that has no keys are invalid. Otherwise rows outside the
    grid are, unless their scene is -1 (padding).
    """
    rows = coords.shape[0]
    keys = torch.empty(rows, dtype=torch.int64, device=coords.device)
    if rows:
        _voxel_keys[_row_grid(rows)](
            coords.contiguous(), keys, word, rows, *shape, batches_below(shape), code, SEARCH=search, BLOCK=BLOCK
        )
    return keys
