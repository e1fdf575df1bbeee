"""The samples of the audit for hash maps, curves, grid sampling and post-processing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from shiplap_sparse3d import grid_sample, hashing, postprocess, serialize
from shiplap_sparse3d.samples import _choose_grid, _draw_normal, _draw_table, _draw_voxels

# The coordinates of a row that is no voxel.
PADDING = (-1, -1, -1, -1)


# --- hash maps -------------------------------------------------------------------------------------------------------


def _hash_table(rng: Generator, capacity: int, keys: Tensor, device: Any) -> tuple[Tensor, Tensor]:
    """Return ``(keys, values)`` of a random hash table of ``capacity`` slots on ``device``. It holds a third of
    ``keys``, but fills at most half of its slots.
    """
    table = torch.full((capacity,), -1), torch.full((capacity,), -1, dtype=torch.int32)
    some = keys[torch.randperm(len(keys), generator=rng)[: min(len(keys) // 3, capacity // 2)]]
    # The reference makes the table on the CPU, so that each device gets the same one.
    hashing.hash_insert.reference(*table, some, torch.randperm(len(some), generator=rng).int())
    return table[0].to(device), table[1].to(device)


def _distinct_keys(rng: Generator, capacity: int) -> Tensor:
    """Return ``capacity // 2`` random int64 keys from the whole range, enough to fill half of a hash table of
    ``capacity`` slots. Equal keys are improbable.
    """
    return torch.randint(-(2**63), 2**63 - 1, (capacity // 2,), generator=rng)


def _with_repeats(rng: Generator, keys: Tensor, count: int) -> Tensor:
    """Return ``count`` elements drawn at random from ``keys`` and -1 (padding), each possibly several times."""
    pool = torch.cat([keys, torch.tensor([-1])])
    return pool[torch.randint(0, len(pool), (count,), generator=rng)]


def _draw_values(rng: Generator, count: int, device: Any) -> Tensor:
    """Return ``count`` random int32 values for a hash table, none of them negative."""
    return torch.randint(0, 2**31 - 1, (count,), generator=rng, dtype=torch.int32).to(device)


@hashing.hash_insert.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``hash_insert``, which are the keys and values of a partly filled table, ``sizes["m"]`` keys
    with repeats and padding, and a value for each of these keys.
    """
    keys = _distinct_keys(rng, sizes["t"])
    wanted = _with_repeats(rng, keys, sizes["m"]).to(device)
    return *_hash_table(rng, sizes["t"], keys, device), wanted, _draw_values(rng, sizes["m"], device)


@hashing.hash_lookup.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``hash_lookup``, which are the keys and values of a partly filled table, and ``sizes["m"]``
    keys with repeats and padding. About a third of these keys are in the table.
    """
    keys = _distinct_keys(rng, sizes["t"])
    return *_hash_table(rng, sizes["t"], keys, device), _with_repeats(rng, keys, sizes["m"]).to(device)


def _hash_3d(rng: Generator, sizes: dict[str, Any], device: Any) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return ``(keys, values, voxels, grid)``, random arguments for the ops that look up voxels in hash tables. The
    first two are a partly filled table. About a third of the voxels ``int32 [m, 4]`` are in it. They have repeats and
    padding.
    """
    grid = _choose_grid(sizes["t"])
    coords = _draw_voxels(rng, sizes["t"] // 2, grid, "cpu")
    keys = hashing.voxel_keys("samples", coords, grid)
    pool = torch.cat([coords, torch.tensor([PADDING], dtype=torch.int32)])
    wanted = pool[torch.randint(0, len(pool), (sizes["m"],), generator=rng)].to(device)
    return *_hash_table(rng, sizes["t"], keys, device), wanted, grid


@hashing.hash_insert_3d.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``hash_insert_3d``, which are the keys and values of a partly filled table, voxels with
    repeats and padding, a value for each voxel, and the grid.
    """
    keys, values, coords, grid = _hash_3d(rng, sizes, device)
    return keys, values, coords, _draw_values(rng, sizes["m"], device), grid


@hashing.hash_insert_3d_index.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``hash_insert_3d_index``, which are the keys and values of a partly filled table, voxels with
    repeats and padding, and the grid.
    """
    return _hash_3d(rng, sizes, device)


@hashing.hash_lookup_3d.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``hash_lookup_3d``, which are the keys and values of a partly filled table, voxels with
    repeats and padding, and the grid.
    """
    return _hash_3d(rng, sizes, device)


# --- curves ----------------------------------------------------------------------------------------------------------


def _draw_encodable(rng: Generator, sizes: dict[str, Any], device: Any) -> Tensor:
    """Return random voxels (scene, x, y, z), ``int32 [n, 4]``, that fit codes of a space-filling curve with
    ``sizes["bits"]`` bits per axis. About one in ten is a row of -1 (padding).
    """
    scenes = min(serialize.MAX_BATCH, 2 ** (sizes.get("width", 63) - 3 * sizes["bits"]))
    limits = [scenes, *3 * [2 ** sizes["bits"]]]
    columns = [torch.randint(0, limit, (sizes["n"],), generator=rng) for limit in limits]
    padding = torch.rand(sizes["n"], generator=rng) < 0.1
    return torch.stack(columns, 1).masked_fill(padding[:, None], -1).int().to(device)


def _draw_coords(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of an op that encodes voxels along a space-filling curve (Z-order or Hilbert). They are the
    voxels, the number of bits per axis, the significance of the axes as three numbers, and the width of a code in bits.
    """
    return _draw_encodable(rng, sizes, device), sizes["bits"], list(sizes["axes"]), sizes["width"]


def _draw_codes(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of an op that decodes codes of a space-filling curve (Z-order or Hilbert). They are the codes,
    the number of bits per axis, and the significance of the axes as three numbers.
    """
    codes = serialize.z_order_encode.reference(_draw_encodable(rng, sizes, "cpu"), sizes["bits"])
    return codes.to(device), sizes["bits"], list(sizes["axes"])


for _encode in (serialize.z_order_encode, serialize.hilbert_encode):
    _encode.samples(_draw_coords)
for _decode in (serialize.z_order_decode, serialize.hilbert_decode):
    _decode.samples(_draw_codes)


# --- grid sampling ---------------------------------------------------------------------------------------------------


def _draw_queries(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``nearest_map`` and ``trilinear_map``, which are voxels, points ``[b, l, 3]`` and the grid.
    The points lie in the grid or a little outside. Some are multiples of 0.5, and one is NaN.
    """
    grid = _choose_grid(sizes["n"])
    points = torch.rand(sizes["b"], sizes["l"], 3, generator=rng) * (torch.tensor(grid) + 4) - 2
    # Borders and centres of voxels, where rounding decides.
    snapped = torch.rand(sizes["b"], sizes["l"], 1, generator=rng) < 0.2
    points = torch.where(snapped, (2 * points).round() / 2, points)
    # A NaN has no voxel, and must not become an address.
    points.view(-1, 3)[:1] = float("nan")
    return _draw_voxels(rng, sizes["n"], grid, device), points.to(device), grid


grid_sample.nearest_map.samples(_draw_queries)
grid_sample.trilinear_map.samples(_draw_queries)


def _draw_indices(rng: Generator, sizes: dict[str, Any], rows: int, device: Any) -> tuple[Tensor, Tensor]:
    """Return random indices ``int32 [q, k]`` from -1 to ``rows - 1``, and random weights ``float32 [q, k]`` from 0 to
    1.
    """
    indices = torch.randint(-1, rows, (sizes["q"], sizes["k"]), generator=rng, dtype=torch.int32)
    return indices.to(device), torch.rand(sizes["q"], sizes["k"], generator=rng).to(device)


@grid_sample.indice_weighted_sum.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``indice_weighted_sum``, which are features, indices and weights."""
    return _draw_normal(rng, (sizes["n"], sizes["c"]), dtype, device), *_draw_indices(rng, sizes, sizes["n"], device)


@grid_sample.indice_weighted_sum_grad.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``indice_weighted_sum_grad``, which are a gradient, indices, weights, and the number of rows
    of the features.
    """
    grad = _draw_normal(rng, (sizes["q"], sizes["c"]), dtype, device)
    return grad, *_draw_indices(rng, sizes, sizes["rows"], device), sizes["rows"]


# --- post-processing -------------------------------------------------------------------------------------------------


@postprocess.masked_gemm_signals.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return the argument of ``masked_gemm_signals``, a neighbour table ``[n, v]``."""
    return (_draw_table(rng, sizes["n"], sizes["n"], sizes["v"], device),)


@postprocess.masked_gemm_kernels.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``masked_gemm_kernels``, which are random int32 codes with few bits set, a random order of
    the rows, and the number of rows of a block.
    """
    codes = torch.randint(-(2**31), 2**31 - 1, (sizes["n"],), generator=rng, dtype=torch.int32)
    sparse = codes & torch.randint(-(2**31), 2**31 - 1, (sizes["n"],), generator=rng, dtype=torch.int32)
    return sparse.to(device), torch.randperm(sizes["n"], generator=rng).to(device), sizes["block"]
