"""Matrix products of sparse3d on CUDA: Triton templates, and the configs that suit given sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shiplap_sparse3d import ops

__all__ = ["attach_templates"]

Sizes = Mapping[str, Any]
Dtypes = Mapping[str, torch.dtype]
Config = Mapping[str, Any]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SHARED = 227 * 1024  # bytes that a program may have on Hopper


def _tile_config(m: int, n: int, k: int, warps: int, stages: int, **more: Any) -> dict[str, Any]:
    """Return a config, the constants of one compiled form of a Triton template. A tile has ``m`` rows, ``n`` columns
    and ``k`` channels. ``warps`` and ``stages`` are the numbers of warps and of pipeline stages. ``more`` holds further
    constants.
    """
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages, **more}


def _tile_columns(sizes: Sizes, columns: str) -> int:
    """Return the width of a tile for the channels ``sizes[columns]``. It is the number of channels of one group,
    rounded up to a power of two between 16 and 256.
    """
    each = max(1, sizes[columns] // sizes["groups"])
    return min(256, max(16, 1 << (each - 1).bit_length()))


def _tile_depth(sizes: Sizes, channels: int, itemsize: int = 2) -> int:
    """Return how many channels a tile multiplies at a time. It is ``channels`` rounded up to a power of two, but at
    least 16 and at most ``128 // itemsize``. ``sizes`` is not read.
    """
    return min(128 // itemsize, max(16, 1 << (max(1, channels) - 1).bit_length()))


# The first that fits is good almost everywhere (H200, 2026-11-21: docs/design/0008-sparse3d-cuda.md).
_TILES = (
    (128, 256, 64, 8, 3, True),
    (128, 128, 64, 4, 3, True),
    (128, 128, 64, 4, 3, False),
    (128, 64, 64, 4, 2, False),
    (128, 64, 64, 4, 3, False),
    (64, 256, 64, 4, 4, True),
    (64, 128, 64, 4, 3, True),
    (64, 128, 64, 4, 3, False),
    (128, 256, 64, 8, 4, True),
    (64, 64, 64, 4, 3, False),
    (128, 256, 32, 8, 5, True),
    (128, 64, 32, 4, 4, False),
)
# Of float32 in full precision, which tensor cores do not multiply: operands are held in registers, so few at a time.
_FULL = ((64, 128, 16, 4, 3, False), (128, 128, 16, 8, 3, False), (64, 64, 16, 4, 3, False))


def _tile_configs(sizes: Sizes) -> list[dict[str, Any]]:
    """Return the configs of the convolution's Triton template that suit ``sizes``, the likely fastest first. A config
    is a dict of constants, and the tuner takes the fastest. Tiles are as wide as the channels, and for few rows low
    tiles come first.
    """
    wide, deep = _tile_columns(sizes, "co"), _tile_depth(sizes, sizes["cg"])
    # Tiles that are wider than the channels multiply zeros, and much narrower ones read rows twice.
    fitting = [t for t in _TILES if t[1] <= wide and (t[1] >= 128 or 2 * t[1] > wide or wide == 64)]
    fitting = fitting or [(128, wide, deep, 4, 3, False), (64, wide, deep, 4, 3, False), (64, wide, deep, 4, 2, False)]
    if not sizes["tf32"] and deep > 16:
        fitting += [t for t in _FULL if t[1] <= wide]
    if sizes["m"] <= 512:
        # Few rows: low tiles make more programs, which keep the device busy.
        fitting.sort(key=lambda t: t[0])
    return [
        _tile_config(m, n, min(k, deep), warps, stages, BULK=bulk, MASKED=masked, SPLITS=splits)
        for splits in _channel_splits(sizes)
        for masked in (True, False)
        for m, n, k, warps, stages, bulk in fitting
    ]


def _channel_splits(sizes: Sizes) -> tuple[int, ...]:
    """Return the numbers of parts into which the input channels may be cut. With several parts, several programs
    compute one output tile. It is (1, 2, 4) for few tiles with many channels, and (1,) otherwise.
    """
    tiles = sizes.get("parts", 1) * -(-sizes["m"] // 64) * -(-sizes["co"] // 128)
    # An H100 or H200 has 132 multiprocessors: fewer tiles leave some of them idle.
    return (1, 2, 4) if tiles < 132 and sizes["cg"] >= 512 else (1,)


def _accepts_floats(sizes: Sizes, dtypes: Dtypes, config: Config) -> bool | str:
    """Return True if the tile of ``config`` suits floating-point features of these sizes and dtypes. Otherwise return
    the reason why not.
    """
    if odd := [str(d) for d in dtypes.values() if d.is_floating_point and d not in FLOATS]:
        return f"{odd[0]}: products are accumulated in float32"
    if empty := [n for n in ("m", "n", "k", "co", "ci", "cg") if sizes.get(n) == 0]:
        return f"{empty[0]} = 0"
    m, n, k, itemsize = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"], dtypes["feats"].itemsize
    full = _in_full_precision(sizes, dtypes)
    if (dtypes["feats"] == torch.float32 and m * n > 128 * 128) or (full and m * n * k > 128 * 128 * 16):
        return "a tile of float32 that does not fit the registers"
    if config["num_stages"] * (m + n) * k * itemsize > SHARED - 1024:
        return "stages of tiles that do not fit the shared memory"
    return True


def _in_full_precision(sizes: Sizes, dtypes: Dtypes) -> bool:
    """Return whether products are computed in full float32, and not with the 19 bits (TF32) that tensor cores read of a
    number.
    """
    return dtypes["feats"] == torch.float32 and not sizes["tf32"]


def _is_for_full(config: Config) -> bool:
    """Return whether the tile of ``config`` is one of those for float32 in full precision."""
    return (*(config[n] for n in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")), False) in _FULL


def _accepts_product(sizes: Sizes, dtypes: Dtypes, config: Config) -> bool | str:
    """Return True if the convolution's template with ``config`` supports a call with these sizes and dtypes. Otherwise
    return the reason why not.
    """
    if (fits := _accepts_floats(sizes, dtypes, config)) is not True:
        return fits
    # Only sorted tables have masks of the taps that a block hits.
    if config["MASKED"] and "b" not in sizes:
        return "an unsorted table"
    full = _in_full_precision(sizes, dtypes)
    # These shallow tiles are in the list for float32 in full precision only.
    if not full and config["BLOCK_K"] < sizes["cg"] and _is_for_full(config):
        return "a tile for float32 in full precision"
    if not config["BULK"]:
        return True
    if full:
        return "float32 in full precision, whose registers spill behind the bulk copy engine"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        return "needs the bulk copy engine of compute capability 9.0"
    # The bulk copy engine moves whole tiles, and has no mask within a tap.
    if sizes["cg"] % config["BLOCK_K"] or (sizes["co"] * dtypes["weight"].itemsize) % 16:
        return "channels of a tap that are no whole number of tiles"
    return True


def _split_k(sizes: Sizes, config: Config) -> int:
    """Return how many programs add to one output tile. It is the number of parts of the sorted neighbour table (groups
    of columns) times the number of parts of the input channels.
    """
    return int(sizes.get("parts", 1)) * int(config["SPLITS"])


def _tile_grid(sizes: Sizes, config: Config, cdiv: Any) -> tuple[Any, Any, Any]:
    """Return the launch grid of the convolution, with all programs along the first axis. There is one program for each
    tile of rows and columns, each part of the neighbour table (a group of its columns) and each part of the channels.
    ``cdiv`` divides and rounds up.
    """
    tiles_n = sizes["groups"] * cdiv(sizes["co"] // sizes["groups"], config["BLOCK_N"])
    return _split_k(sizes, config) * cdiv(sizes["m"], config["BLOCK_M"]) * tiles_n, 1, 1


def _should_fuse(sizes: Sizes) -> bool:
    """Return whether the rest of the layer (norm, residual, activation) is fused into the convolution. Separate kernels
    are faster for many rows, beyond the cache, with few channels.

    Measured on an H200 in 2026-11 with 4,113,056 rows of 64 channels, batch norm, residual and ReLU: 1.93 ms fused,
    1.79 ms separate.
    """
    return sizes["co"] > 64 or sizes["m"] < 1 << 20


_OUTER = (
    (128, 128, 64, 4, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 32, 4, 4),
    (64, 64, 64, 4, 3),
    (64, 128, 64, 4, 3),
    (128, 64, 64, 4, 3),
    (128, 256, 64, 8, 3),
    (64, 64, 64, 4, 4),
    (32, 32, 64, 4, 3),
    (16, 16, 64, 4, 3),
)


def _outer_tile_configs(sizes: Sizes) -> list[dict[str, Any]]:
    """Return the configs of the weight gradient's Triton template that suit ``sizes``. A config is a dict of constants,
    and the tuner takes the fastest. The largest tile of weights ``[co, ci]`` that is not mostly padding comes first,
    then tiles of similar size. Each tile comes with several splits of the rows.
    """
    high, wide = _tile_columns(sizes, "co"), _tile_columns(sizes, "ci")
    fitting = [
        t for t in _OUTER if t[0] <= high and t[1] <= wide and (t[0] * 4 > min(high, 128) and t[1] * 4 > min(wide, 128))
    ]
    fitting = fitting or [(min(high, 128), min(wide, 128), 64, 4, 3)]
    if not sizes["tf32"]:
        fitting += [t[:5] for t in _FULL if t[0] <= high and t[1] <= wide]
    few = splits_for(sizes["m"], sizes["k"], sizes["co"], sizes["ci"] // sizes["groups"])
    return [
        _tile_config(*t, SPLITS=splits) for splits in dict.fromkeys((few, 2 * few, max(1, few // 2))) for t in fitting
    ]


def _accepts_outer(sizes: Sizes, dtypes: Dtypes, config: Config) -> bool | str:
    """Return True if the weight gradient's template with ``config`` supports a call with these sizes and dtypes.
    Otherwise return the reason why not.
    """
    if (fits := _accepts_floats(sizes, dtypes, config)) is not True:
        return fits
    if dtypes["feats"] == torch.float32 and config["BLOCK_K"] > 32 and config["BLOCK_M"] * config["BLOCK_N"] > 64 * 64:
        return "tiles of float32 that do not fit the shared memory"
    if not _in_full_precision(sizes, dtypes) and _is_for_full(config):
        return "a tile for float32 in full precision"
    return True


def _outer_grid(sizes: Sizes, config: Config, cdiv: Any) -> tuple[Any, Any, Any]:
    """Return the launch grid of the weight gradient, with all programs along the first axis. There is one program for
    each tile of the weights of each kernel cell and group of channels, and for each split of the rows. ``cdiv`` divides
    and rounds up.
    """
    groups = sizes["groups"]
    tiles = cdiv(sizes["co"] // groups, config["BLOCK_M"]) * cdiv(sizes["ci"] // groups, config["BLOCK_N"])
    return sizes["k"] * groups * tiles * config["SPLITS"], 1, 1


def splits_for(rows: int, taps: int, co: int, cg: int) -> int:
    """Return the number of runs of rows into which the weight gradient is cut. A separate program computes each run.
    The number is a power of two that fills some waves of programs.

    Two tiles of 128 x 128 fit a multiprocessor, or four of 64 x 64. From two waves of whole tiles on, cutting costs
    time. The best number of 1 to 64, measured on an H200 on 2026-11-22, was 2, 8, 32 and 64 at 512, 256, 128 and 64
    channels. ``co`` is the number of output channels, and ``cg`` is that of input channels of a group.
    """
    tiles = max(1, taps * -(-co // 128) * -(-cg // 128))
    narrow = 2 if co <= 64 and cg <= 64 else 1
    wanted = min(64, 900 * narrow // tiles, rows // 2048) if tiles < 528 else 1
    return 1 << max(0, wanted.bit_length() - 1) if wanted else 1


def attach_templates(device: str) -> None:
    """Bind the Triton templates of the convolution and of its weight gradient for the device type ``device``. It is
    ``"cuda"``, or ``"cpu"`` in tests with Triton's interpreter.
    """
    ops.conv.template(
        device,
        "cuda/conv.triton.jinja",
        configs=_tile_configs,
        grid=_tile_grid,
        supports=_accepts_product,
        split_k=_split_k,
        fuses=_should_fuse,
    )
    ops.conv_weight_grad.template(
        device,
        "cuda/conv_weight_grad.triton.jinja",
        configs=_outer_tile_configs,
        grid=_outer_grid,
        supports=_accepts_outer,
        split_k=lambda sizes, config: int(config["SPLITS"]),
    )


attach_templates("cuda")
