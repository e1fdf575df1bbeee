"""Templates for the CPU: C++ micro-kernels, vectorised like Inductor's code (``shiplap/cpu/micro.h``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shiplap_dense import ops

__all__: list[str] = []

Sizes = Mapping[str, Any]
FEW = 8  # rows up to which weights are widened in registers
LANES = 8  # of the narrower vectors


def _accepts_float_dtypes(sizes: Sizes, dtypes: Mapping[str, torch.dtype], config: Mapping[str, Any]) -> bool | str:
    """Return True if a CPU template can run a call. Otherwise return the reason why not. A CPU template is C++ source
    that Inductor compiles together with neighbouring operations. The operands must be float32, bfloat16 or int8, and no
    size may be 0.
    """
    # The micro-kernels widen bfloat16 and int8 to float32, and know no other dtypes.
    if odd := sorted({str(d) for d in dtypes.values()} - {"torch.float32", "torch.bfloat16", "torch.int8"}):
        return f"{odd[0]} is neither float32 nor bfloat16"
    if any(isinstance(v, int) and v == 0 for k, v in sizes.items() if k.isidentifier()):
        return "an empty size"
    return True


def _few_rows(sizes: Sizes, dtypes: Mapping[str, torch.dtype], config: Mapping[str, Any]) -> bool | str:
    """Return True if a call has at most ``FEW`` rows, and operands that ``_accepts_float_dtypes`` accepts. Otherwise
    return the reason why not.
    """
    return f"more than {FEW} rows" if sizes["m"] > FEW else _accepts_float_dtypes(sizes, dtypes, config)


def _rows_configs(sizes: Sizes) -> tuple[dict[str, int], ...]:
    """Return the only configuration of the template for few rows, which puts all rows in one block."""
    return ({"BM": min(FEW, max(1, sizes["m"])), "BN": 64, "KC": 1024},)


def _even_blocks(rows: int, limit: int) -> int:
    """Return the height of the equal blocks into which ``rows`` rows are cut. It is a multiple of 12 and at most about
    ``limit``.

    With blocks of one height the threads get equal work.
    """
    # The micro-kernel computes 12 rows at once, so blocks of other heights would waste registers.
    blocks = -(-max(rows, 1) // limit)
    return -(-rows // (12 * blocks)) * 12 or 12


def _panel_configs(sizes: Sizes) -> tuple[dict[str, int], ...]:
    """Return the two configurations of the int8 product that tuning measures. The first has one block of rows for up to
    about 384 rows, and the second has blocks of about half that height. Each block widens the int8 weights again, so
    fewer blocks do less of that work.
    """
    tall, low = _even_blocks(sizes["m"], 384), _even_blocks(sizes["m"], 192)
    return {"BM": tall, "BN": 64, "KC": 256}, {"BM": low, "BN": 128, "KC": 512}


ADJACENT = {"a": "k", "weight": "k"}
ops.int8_mm.template("cpu", "int8_rows.cpp.jinja", configs=_rows_configs, innermost=ADJACENT, supports=_few_rows)
ops.int8_mm.template(
    "cpu", "int8_panels.cpp.jinja", configs=_panel_configs, innermost=ADJACENT, supports=_accepts_float_dtypes
)


def _product_configs(sizes: Sizes) -> tuple[dict[str, int], ...]:
    """Return the two configurations of the matrix product that tuning measures. They differ in the block's number of
    columns and in its share of the inner dimension.
    """
    rows = _even_blocks(sizes["m"], 192)
    return {"BM": rows, "BN": 128, "KC": 256}, {"BM": rows, "BN": 64, "KC": 512}


def _conv_configs(sizes: Sizes) -> tuple[dict[str, int], ...]:
    """Return the two configurations of the convolution that tuning measures, with tall and with low blocks of output
    pixels.
    """
    return {"BM": 96, "BN": 128 if sizes["co"] > 64 else 64, "KC": 256}, {"BM": 48, "BN": 64, "KC": 512}


def _side_by_side(sizes: Sizes, dtypes: Mapping[str, torch.dtype], config: Mapping[str, Any]) -> bool | str:
    """Return True if the convolution has at least ``LANES`` input channels, and operands that ``_accepts_float_dtypes``
    accepts. Otherwise return the reason why not. The channels of a pixel are contiguous in memory and are loaded as
    vectors.
    """
    return (
        f"fewer than {LANES} channels lie side by side"
        if sizes["ci"] < LANES
        else _accepts_float_dtypes(sizes, dtypes, config)
    )


ops.mm.template("cpu", "mm.cpp.jinja", configs=_product_configs, supports=_accepts_float_dtypes)
ops.bmm.template("cpu", "mm.cpp.jinja", configs=_product_configs, supports=_accepts_float_dtypes)
ops.conv2d.template(
    "cpu", "conv2d.cpp.jinja", configs=_conv_configs, innermost={"x": "ci", "weight": "ci"}, supports=_side_by_side
)
