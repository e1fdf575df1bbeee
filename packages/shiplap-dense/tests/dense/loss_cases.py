"""The Triton pass of the linear cross entropy in Triton's interpreter: one JSON line a case. Run by test_losses.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import shiplap as sl
import shiplap_dense as dense
from shiplap_dense import loss_rows, losses
from tests.dense.test_losses import OPTIONS, by_torch, drawn, gradients

loss_rows.WIDEST_BLOCK = 8  # several blocks a row


def main() -> None:
    losses.attach_kernels("cpu", losses._pass_by_triton)
    for name, options in OPTIONS.items():
        for dtype in (torch.float32, torch.bfloat16) if name == "all" else (torch.float32,):
            hidden, weight, target, bias = drawn(10, 13, dtype=dtype)
            target[::5] = options.get("ignore_index", -100)
            leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
            made = dense.linear_cross_entropy(hidden, weight, target, bias, **options)
            wanted = by_torch(hidden, weight, target, bias, **options)
            pairs = zip((made, *gradients(made, leaves)), (wanted, *gradients(wanted, leaves)), strict=True)
            errors = [float((g.double() - w.double()).norm() / w.double().norm()) for g, w in pairs]
            print(json.dumps({"name": f"{name} {dtype}", "error": max(errors)}), flush=True)
    hidden, weight, target, _ = drawn(6, 13)
    weight[3] = -torch.inf
    low = dense.linear_cross_entropy(hidden.abs(), weight, target.where(target != 3, 4), reduction="none")
    wanted = by_torch(hidden.abs(), weight, target.where(target != 3, 4), None, reduction="none")
    print(json.dumps({"name": "minus infinity", "error": float((low - wanted).abs().max())}))
    hidden, weight, target, _ = drawn(6, 13)
    target[2] = 13
    losses_of_rows = dense.linear_cross_entropy(hidden, weight, target, reduction="none")
    try:
        dense.linear_cross_entropy(hidden, weight, target)
    except sl.ShiplapError as e:
        print(json.dumps({"name": "no class", "id": e.id, "nan": losses_of_rows.isnan().tolist()}))
    values = torch.arange(5.0)
    loss_rows.scale_unless_one(values, torch.tensor(2.0))
    loss_rows.scale_unless_one(values, torch.tensor(1.0))
    print(json.dumps({"name": "scaled", "values": values.tolist()}))


if __name__ == "__main__":
    main()
