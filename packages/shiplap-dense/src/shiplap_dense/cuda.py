"""Templates for CUDA devices, in Triton. The best config for given sizes is measured, not guessed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shiplap_dense import ops

__all__ = ["attach_templates"]

Sizes = Mapping[str, Any]
Dtypes = Mapping[str, torch.dtype]
Config = Mapping[str, Any]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _tile_config(m: int, n: int, k: int, warps: int, stages: int, **more: Any) -> dict[str, Any]:
    """Return the configuration of a Triton template. A tile has ``m`` x ``n`` elements of the result and ``k`` of the
    inner dimension. ``warps`` and ``stages`` are the numbers of warps and of pipeline stages. ``more`` holds further
    values by name.
    """
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages, "GROUP_M": 8, **more}


# A default that is good almost everywhere, then wide tiles for much work, then flat ones for few rows.
TILES = (
    _tile_config(128, 128, 64, 8, 3),
    _tile_config(64, 64, 32, 4, 3),
    _tile_config(128, 128, 32, 8, 3),
    _tile_config(128, 256, 64, 8, 3),
    _tile_config(256, 128, 64, 8, 3),
    _tile_config(128, 128, 64, 4, 4),
    _tile_config(64, 128, 64, 4, 4),
    _tile_config(128, 64, 64, 4, 4),
    _tile_config(64, 64, 64, 4, 4),
    _tile_config(128, 64, 128, 4, 3),
    _tile_config(128, 32, 128, 4, 4),
    _tile_config(128, 32, 64, 4, 6),
    _tile_config(64, 32, 128, 4, 5),
    _tile_config(32, 32, 128, 4, 5),
    _tile_config(32, 64, 128, 4, 4),
)
# Few rows: the weights are read once, so what counts is how many bytes are on their way.
FLAT = (
    _tile_config(16, 32, 128, 2, 5),
    _tile_config(16, 32, 256, 4, 4),
    _tile_config(16, 32, 256, 4, 6),
    _tile_config(16, 16, 256, 2, 5),
    _tile_config(16, 16, 512, 4, 4),
    _tile_config(16, 32, 512, 4, 3),
    _tile_config(16, 64, 128, 4, 6),
    _tile_config(16, 64, 256, 4, 4),
    _tile_config(16, 16, 256, 1, 4),
    _tile_config(16, 32, 128, 4, 8),
)
# Tiles for the bulk copy engine: block sizes, warps, stages, programs per multiprocessor (0: one program a tile).
BULK = (
    (128, 256, 64, 8, 3, 1),
    (256, 128, 64, 8, 3, 1),
    (128, 256, 64, 8, 4, 1),
    (256, 128, 64, 8, 4, 1),
    (128, 128, 64, 4, 3, 2),
    (128, 128, 64, 8, 3, 2),
    (128, 128, 64, 4, 3, 0),
    (128, 128, 128, 8, 3, 1),
    (128, 256, 64, 8, 3, 0),
    (64, 256, 64, 4, 3, 2),
    (128, 192, 64, 8, 3, 1),
)
FLAT_BULK = (
    (16, 32, 256, 4, 5, 0),
    (16, 64, 256, 4, 4, 0),
    (16, 16, 512, 4, 4, 0),
    (64, 32, 128, 4, 5, 0),
    (128, 32, 128, 4, 5, 0),
    (128, 64, 128, 4, 4, 0),
)


def _accepts_float_operands(sizes: Sizes, dtypes: Dtypes, config: Config) -> bool | str:
    """Return True if the templates can compute the call, otherwise the reason why not. No size may be 0. Floating-point
    operands may have at most 32 bits, since products are accumulated in float32.
    """
    if empty := [k for k, v in sizes.items() if type(v) is int and v == 0 and len(k) <= 5 and k != "padding"]:
        return f"{empty[0]} = 0"
    other = [str(d) for d in dtypes.values() if d.is_floating_point and d not in FLOATS]
    return f"{other[0]}: products are accumulated in float32" if other else True


def _fits_tiles(sizes: Sizes, dtypes: Dtypes, config: Config, rows: str = "m", cols: str = "n") -> bool | str:
    """Return True if the tiles of ``config`` suit a result of ``sizes[rows]`` x ``sizes[cols]``, otherwise the reason
    why not. Tiles much larger than the result waste work. Small tiles of a large result load the operands too often.
    ``rows`` and ``cols`` name the sizes that count as rows and columns of the result.
    """
    if (fits := _accepts_float_operands(sizes, dtypes, config)) is not True:
        return fits
    if config["BLOCK_M"] > 64 and config["BLOCK_M"] >= 2 * sizes[rows]:
        return f"BLOCK_M={config['BLOCK_M']} is wasted on {sizes[rows]} rows"
    if config["BLOCK_N"] > 64 and config["BLOCK_N"] >= 2 * sizes[cols]:
        return f"BLOCK_N={config['BLOCK_N']} is wasted on {sizes[cols]} columns"
    # Small tiles load each operand again for every tile that needs it.
    area = config["BLOCK_M"] * config["BLOCK_N"]
    if sizes[rows] * sizes[cols] >= 1 << 24 and area < 128 * 128:  # 1.5 times slower and more (H200, 2026-11-21)
        return f"tiles of {area} elements read the operands too often for so large a result"
    return True


def _product_tile_configs(sizes: Sizes) -> list[dict[str, Any]]:
    """Return the configurations of the matrix product that tuning measures, the default first. For up to 32 rows they
    are the default and the tiles with few rows (``FLAT``). For more rows they are all of ``TILES``.
    """
    return [TILES[0], *(FLAT if sizes["m"] <= 32 else TILES[1:])]


def _processor_count() -> int:
    """Return the number of multiprocessors of the GPU. Return 4 if there is no GPU, as in tests with Triton's
    interpreter.
    """
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 4


def _bulk_tile_configs(sizes: Sizes) -> list[dict[str, Any]]:
    """Return the configurations that tuning measures for the matrix product whose operands are loaded by bulk copies.
    For up to 256 rows, the tiles of the result have few rows.
    """
    processors = _processor_count()
    # Tiles with few rows keep many programs busy where the result has few rows.
    listed = FLAT_BULK if sizes["m"] <= 256 else BULK
    return [
        _tile_config(*tile, PROGRAMS=each * processors, FLATTEN=flat)
        for *tile, each in listed
        # Triton's blocks need sizes that are powers of two.
        if not (tile[1] & (tile[1] - 1))
        for flat in ((True, False) if each else (False,))
    ]


def _accepts_bulk_copy(sizes: Sizes, dtypes: Dtypes, config: Config) -> bool | str:
    """Return True if the bulk copy engine of a Hopper GPU can load the operands and the tiles of ``config`` suit the
    result. Otherwise return the reason why not. The operands must have 16 bits, and their rows must be multiples of 16
    bytes.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        return "needs the bulk copy engine of compute capability 9.0"
    if dtypes["a"].itemsize != 2:
        return f"{dtypes['a']}: made for 16-bit operands"
    if any(sizes[d] % 8 for d in ("n", "k")) or (sizes["m"] % 8 and sizes["m"] > 1):
        return "rows are not multiples of 16 bytes"
    return _fits_tiles(sizes, dtypes, config)


def _product_grid(sizes: Sizes, config: Config, cdiv: Any) -> tuple[Any, Any, Any]:
    """Return the grid of the launch as three numbers. The first one is the number of tiles of the result, since one
    Triton program computes each tile. The others are 1.
    """
    return cdiv(sizes["m"], config["BLOCK_M"]) * cdiv(sizes["n"], config["BLOCK_N"]), 1, 1


def _walking_grid(sizes: Sizes, config: Config, cdiv: Any) -> tuple[Any, Any, Any]:
    """Return the grid of the launch as three numbers. It has ``config["PROGRAMS"]`` Triton programs, each of which
    computes several tiles in turn. If that value is 0, the grid has one program for each tile.
    """
    # Persistent programs walk over the tiles, and start the loads of the next tile early.
    return (config["PROGRAMS"], 1, 1) if config["PROGRAMS"] else _product_grid(sizes, config, cdiv)


def _tap_offsets(sizes: Sizes) -> torch.Tensor:
    """Return the offset (y, x) of the input pixel that each element of the filter window reads, as int32 ``[kh * kw,
    2]``. The offset is counted from ``stride * output pixel``.
    """
    (pad_y, pad_x), (dil_y, dil_x) = sizes["padding"], sizes["dilation"]
    y, x = torch.meshgrid(torch.arange(sizes["kh"]), torch.arange(sizes["kw"]), indexing="ij")
    return torch.stack((y * dil_y - pad_y, x * dil_x - pad_x), -1).reshape(-1, 2).to(torch.int32)


def _group_slots(sizes: Sizes) -> int:
    """Return the length of the kernel's table of the ends of groups, the least power of two above the number of groups.
    The rows behind the last end count as one more group.
    """
    return 1 << int(sizes["g"]).bit_length()  # one more than there are: the rows that belong to none


def _grouped_configs(sizes: Sizes) -> list[dict[str, Any]]:
    """Return the configurations of the grouped product that tuning measures. ``GROUPS`` of each is the length of the
    kernel's table of the ends of groups.
    """
    return [{**tile, "GROUPS": _group_slots(sizes)} for tile in TILES[:9] if tile["BLOCK_M"] <= 128]


def _bulk_grouped_configs(sizes: Sizes) -> list[dict[str, Any]]:
    """Return the configurations that tuning measures for the grouped product whose operands are loaded by bulk copies.
    Each Triton program computes several tiles in turn.
    """
    # Rows, columns and inner size of a tile, warps, stages, and programs for each multiprocessor.
    tiles = (
        (128, 256, 64, 8, 4, 1),
        (128, 256, 64, 8, 3, 1),
        (64, 256, 64, 8, 4, 1),
        (128, 128, 64, 8, 4, 1),
        (128, 128, 64, 4, 3, 2),
        (64, 128, 64, 4, 4, 2),
        (64, 256, 64, 4, 4, 1),
    )
    return [
        _tile_config(*tile, GROUPS=_group_slots(sizes), PROGRAMS=each * _processor_count(), FLATTEN=flat)
        for *tile, each in tiles
        for flat in (True, False)
    ]


def _torch_experts(sizes: Sizes, dtypes: Dtypes, config: Config) -> bool | str:
    """Return True if the kernels behind ``torch.nn.functional.grouped_mm`` accept the call, otherwise the reason why
    not. For other calls that function runs a loop that waits for the device.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        return "torch's kernels are for compute capability 9.0"
    if other := [str(d) for n, d in dtypes.items() if n != "ends" and d != torch.bfloat16]:
        return f"{other[0]}: torch's kernels are for bfloat16"
    if any(sizes[d] % 8 for d in ("n", "k")):
        return "rows are not multiples of 16 bytes"
    return _accepts_float_operands(sizes, dtypes, config)


def torch_grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return ``[m, n]``, the products of rows ``ends[i-1]:ends[i]`` of ``a`` with ``b[i]``, computed by torch. Rows
    past the last end are zeros. Torch would read past ``a`` for an end that is too large, so the ends are limited
    first.
    """
    products = torch.nn.functional.grouped_mm(a, b, offs=ends.clamp(0, a.shape[0]))
    row = torch.arange(a.shape[0], device=a.device)
    return torch.where((row < ends[-1])[:, None], products, 0)


def attach_templates(device: str) -> None:
    """Bind the Triton templates of all dense ops for the device type ``device``. It is ``"cuda"``, or ``"cpu"`` in
    tests with Triton's interpreter.
    """
    ops.mm.template(device, "mm.triton.jinja", configs=_product_tile_configs, grid=_product_grid, supports=_fits_tiles)
    ops.mm.template(
        device, "mm_tma.triton.jinja", configs=_bulk_tile_configs, supports=_accepts_bulk_copy, grid=_walking_grid
    )
    ops.bmm.template(
        device,
        "bmm.triton.jinja",
        configs=TILES,
        supports=_fits_tiles,
        grid=lambda sizes, config, cdiv: (*_product_grid(sizes, config, cdiv)[:1], sizes["batch"], 1),
    )
    ops.int8_mm.template(
        device, "int8_mm.triton.jinja", configs=_product_tile_configs, grid=_product_grid, supports=_fits_tiles
    )
    _attach_grouped(device)
    ops.conv2d.template(
        device,
        "conv2d.triton.jinja",
        configs=TILES,
        tables={"taps": _tap_offsets},
        innermost={"x": "ci", "weight": "ci"},
        supports=_fits_pixel_tiles,
        grid=lambda sizes, config, cdiv: (
            cdiv(sizes["batch"] * sizes["ho"] * sizes["wo"], config["BLOCK_M"]) * cdiv(sizes["co"], config["BLOCK_N"]),
            1,
            1,
        ),
    )


def _attach_grouped(device: str) -> None:
    """Bind the two Triton templates of the grouped product for the device type ``device``. The first loads operands by
    ordinary loads, and the second by bulk copies.
    """
    ops.grouped_mm.template(
        device,
        "grouped_mm.triton.jinja",
        configs=_grouped_configs,
        supports=_fits_tiles,
        grid=lambda sizes, config, cdiv: (
            cdiv(sizes["m"], config["BLOCK_M"]) + sizes["g"] + 1,
            cdiv(sizes["n"], config["BLOCK_N"]),
            1,
        ),
    )
    ops.grouped_mm.template(
        device,
        "grouped_mm_tma.triton.jinja",
        configs=_bulk_grouped_configs,
        innermost={"a": "k"},
        supports=_accepts_bulk_copy,
        grid=_walking_grid,
    )


def _fits_pixel_tiles(sizes: Sizes, dtypes: Dtypes, config: Config) -> bool | str:
    """Return True if the tiles of ``config`` suit the numbers of output pixels and of output channels, otherwise the
    reason why not. ``_fits_tiles`` has the rules.
    """
    pixels = sizes["batch"] * sizes["ho"] * sizes["wo"]
    return _fits_tiles({**sizes, "pixels": pixels}, dtypes, config, rows="pixels", cols="co")


attach_templates("cuda")
ops.grouped_mm.template("cuda", torch_grouped_mm, supports=_torch_experts)
