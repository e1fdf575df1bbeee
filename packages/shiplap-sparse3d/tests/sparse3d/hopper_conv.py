"""What the first configs of sparse3d's products need of a Hopper GPU, by Triton's compiler. Run by its test.

``python -m tests.sparse3d.hopper_conv some|every``: some of the dtypes of each product, or every one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from shiplap.dispatch import Op
from shiplap_sparse3d import ops
from shiplap_testing import hopper

ROWS, TAPS, PARTS, CHANNELS = 4096, 27, 3, 256
HALF, FULL, TF32 = "float16", "float32", "float32 on tensor cores"
SOME = (("conv", FULL), ("conv_weight_grad", FULL))  # full precision holds twice as much in registers


def first(op: Op, args: tuple[Any, ...]) -> Any:
    """The kernel that runs without a choice, compiled."""
    (kernel,) = op.kernels["cuda"]
    call = op.bind(args)
    serving = kernel.variant_for_call(call)
    assert not isinstance(serving, str), serving
    serving.jitted.clear()
    serving.compile(call)
    (compiled,) = hopper.compiled(serving)
    return {**hopper.resources(compiled), "config": str(serving.config)}


hopper.pretend()
generator = torch.Generator().manual_seed(0)
table = torch.randint(-1, ROWS, (ROWS, TAPS), generator=generator, dtype=torch.int32)
columns, order, masks = ops.sort_table.run_reference((table, PARTS, 1 << 18))
blocks, counts = ops.tap_blocks.run_reference((masks, TAPS))
for name in (HALF, FULL, TF32):
    feats = torch.zeros(ROWS, CHANNELS, dtype=torch.float16 if name == HALF else torch.float32)
    weight = feats.new_zeros(CHANNELS, TAPS, CHANNELS)
    conv = (feats, weight, columns.t(), None, order, masks, None, None, None, 1, False, False, name == TF32)
    outer = (feats, feats, columns.t(), order, blocks, counts, 1, False, name == TF32)
    for op, args in ((ops.conv, conv), (ops.conv_weight_grad, outer)):
        if sys.argv[1] == "some" and (op.spec.opname, name) not in SOME:
            continue
        print(json.dumps([op.spec.opname, name, first(op, args)]), flush=True)

# So many rows that their number is an int64 of the kernel, as a number is that only the data of a graph knows.
many = (1 << 31) + 64
feats = torch.zeros(ROWS, CHANNELS, dtype=torch.float16)
conv = (
    *(feats, feats.new_zeros(CHANNELS, TAPS, CHANNELS), table[:1].expand(many, TAPS), None),
    *(order[:1, :1].expand(PARTS, many), masks[:, :1].expand(PARTS, many // 64)),
    *(None, None, None, 1, False, False, False),
)
print(json.dumps([ops.conv.spec.opname, HALF, first(ops.conv, conv)]), flush=True)
