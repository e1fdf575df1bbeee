"""``norm_relu`` in Triton: one program owns some rows of some channels, whose factors it computes once."""

from __future__ import annotations

import triton
import triton.language as tl

from shiplap.plugin_api import launch_program

__all__ = ["NORM_RELU"]


@triton.jit(do_not_specialize=["n"])
def norm_relu_kernel(feats, mean, var, weight, bias, out, n, c, eps, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Write the features normalised by ``mean`` and ``var``, times ``weight`` plus ``bias``, to ``out [n, c]``.
    Negative values become 0, and NaN stays NaN.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < c
    scale = tl.rsqrt(tl.load(var + channel, mask=there, other=1).to(tl.float32) + eps)
    scale *= tl.load(weight + channel, mask=there, other=0).to(tl.float32)
    middle = tl.load(mean + channel, mask=there, other=0).to(tl.float32)
    shift = tl.load(bias + channel, mask=there, other=0).to(tl.float32)
    at, inside = row[:, None] * c + channel[None, :], (row < n)[:, None] & there[None, :]
    x = tl.load(feats + at, mask=inside, other=0).to(tl.float32)
    y = (x - middle[None, :]) * scale[None, :] + shift[None, :]
    tl.store(out + at, tl.where(y <= 0, 0.0, y).to(out.dtype.element_ty), mask=inside)  # NaN is not below


NORM_RELU = launch_program(values={"channels": "min(128, pow2ceil(max(c, 1)))", "rows": "2048 // channels"}).then(
    norm_relu_kernel,
    grid=("cdiv(n, rows)", "cdiv(c, channels)"),
    arguments={"ROWS": "rows", "CHANNELS": "channels"},
    constants={"num_warps": 4},
    when="n * c > 0",
)
