"""The preparation of CUDA graph captures: plans, handles and loaded modules must exist before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["prepare_captures"]


def prepare_captures(
    run: Callable[[Tensor], Any],
    rows: Iterable[int],
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> None:
    """Call ``run`` (a layer or a model) on zeros ``[m, k]`` for each ``m`` of ``rows``, and wait for the device.

    These calls make the plans of products that a later CUDA graph capture with the same number of rows needs. A capture
    with another number of rows raises an error that names the missing plan. ``dtype`` and ``device`` are those of the
    zeros.
    """
    device = torch.device(device)
    with torch.no_grad():
        for m in sorted(set(rows), reverse=True):  # the largest first: smaller ones reuse its memory
            run(torch.zeros(m, k, dtype=dtype, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
