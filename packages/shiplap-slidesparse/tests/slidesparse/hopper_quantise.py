"""What quantising and lifting needs of a Hopper GPU as it runs untuned, by Triton's compiler. Run by test_triton.py."""

from __future__ import annotations

import json
from typing import Any

import torch

from shiplap_slidesparse import formats
from shiplap_slidesparse.cuda import activations, default_quantise
from shiplap_testing import hopper

BF16, FP32, FP8, INT8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8
ROWS = 128
CASES = ((BF16, FP8, 8192, 4), (BF16, INT8, 8192, 2), (FP32, INT8, 16384, 8), (BF16, FP8, 28672, 4), (BF16, FP8, 40, 3))


class Compiled:
    """In place of the launcher: what it would launch, compiled."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: found.append(
            activations.quantise_kernel.warmup(*args, grid=grid, **options)
        )  # Triton's own, which returns it


found: list[Any] = []
hopper.pretend()
activations._quantise = Compiled()  # type: ignore[assignment]
for dtype, bits, k, pairs in CASES:
    x = torch.empty(ROWS, k, dtype=dtype, device="meta")
    q = torch.empty(ROWS, formats.lifted_depth(k, pairs), dtype=bits, device="meta")
    activations.launch_quantise(
        x, pairs, q=q, scale=x.new_empty(ROWS, dtype=FP32), **default_quantise({"k": k, "pairs": pairs})
    )
    about = {"fused": found[-1].metadata.enable_fp_fusion, "NaN": "max.NaN.f32" in found[-1].asm["ptx"]}
    print(json.dumps([str(dtype), str(bits), k, pairs, {**hopper.resources(found[-1]), **about}]), flush=True)
