"""The reference of quantisation: symmetric, with one float32 scale for each row. Every kernel gives the same bits.

Let ``a`` be the largest magnitude of a row and ``limit`` the largest magnitude of the format (127 for int8, 448 for
float8_e4m3fn). Then ``scale = max(a / limit, MIN_SCALE)`` and ``q = round_to_nearest_even(clamp(x * (1 / scale)))``.
Dequantisation multiplies by the returned scale, also for rows that ``MIN_SCALE`` limits. A row that holds NaN or an
infinity gets the scale NaN and zeros, so its results are NaN. Other rows keep their results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shiplap.plugin_api import error

__all__ = ["LIMITS", "MIN_SCALE", "quantise_rows", "quantise_weight"]

# The largest number of each dtype.
LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
MIN_SCALE = 2.0**-110  # its inverse is finite, and subnormal elements round to zero, flushed or not


def quantise_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ``x`` ``[m, k]`` quantised to ``dtype`` (int8 or float8_e4m3fn) with one scale for each row, and the
    scales, float32 ``[m]``. A row that is not finite becomes zeros with the scale NaN.
    """
    limit = LIMITS[dtype]
    wide = x.detach().to(torch.float32)
    # ``amax`` refuses rows without elements.
    largest = wide.abs().amax(1) if x.shape[1] else wide.new_zeros(x.shape[0])
    finite = torch.isfinite(largest)
    limits = torch.full_like(largest, limit)  # by a Python number CUDA multiplies with its inverse: other bits
    scale = torch.where(finite, (largest / limits).clamp_min(MIN_SCALE), torch.nan)
    # Multiplied and not divided, so that every kernel rounds in the same way.
    inverse = torch.where(finite, 1 / scale, 0)
    scaled = torch.where(finite[:, None], wide * inverse[:, None], 0).clamp(-limit, limit)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def quantise_weight(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a weight ``[n, k]`` quantised to ``dtype`` with one scale for each row, and the scales, float32 ``[n]``.
    -0.0 becomes 0.0. Raise ``SL211`` if the weight is not finite.
    """
    q, scale = quantise_rows(weight, dtype)
    if (bad := torch.isnan(scale)).any():
        raise error(
            "SL211",
            where="slidesparse.quantise_weight",
            got=f"row {int(bad.nonzero()[0, 0])} holds NaN or an infinity",
            expected="finite weights",
            fix="repair the checkpoint",
        )
    # The bits of -0.0 are not zero, and would count as a value in the packed form.
    return torch.where(q != 0, q, torch.zeros((), dtype=dtype, device=q.device)), scale
