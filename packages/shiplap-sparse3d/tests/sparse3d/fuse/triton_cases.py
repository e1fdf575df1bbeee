"""The Triton templates of sparse3d, interpreted: run alone and within compiled graphs. One JSON line a case.

``triton_cases.py some|every``: a third of the cases in which a template runs alone and none of those whose size only
the data knows, or all of them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap.declare.kernel import KernelTerms
from shiplap.inductor import fusion_choices
from shiplap.kernels.triton.template_kernel import TemplateKernel
from shiplap_sparse3d import ops
from shiplap_sparse3d.cuda import conv as cuda
from shiplap_testing import interpreted  # first: it says that Triton is interpreted
from tests.sparse3d.scenes import scene

TILE = {
    "BLOCK_M": 64,
    "BLOCK_N": 16,
    "BLOCK_K": 16,
    "num_warps": 4,
    "num_stages": 2,
    "SPLITS": 1,
    "BULK": False,
    "MASKED": True,
}
GRID = (4, 4, 3)
EVERY = sys.argv[1] == "every"


def say(name: str, **values: Any) -> None:
    print(json.dumps({"name": name, **values}), flush=True)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def alone(op: sl.Op, args: tuple[Any, ...], **config: Any) -> Tensor:
    """The op's template as a kernel of its own."""
    template = dataclasses.replace(op.templates["cpu"][0], configs=({**TILE, **config},))
    call, kernel = op.bind(args), TemplateKernel(op.spec, KernelTerms(template.name, "cpu", template), template)
    serving = kernel.variant_for_call(call)
    assert not isinstance(serving, str), serving
    return serving.run_call(call)[0]


def kernels_alone() -> None:
    for n, ci, co, groups, dtype, left_out in (
        (40, 20, 24, 1, torch.float32, 1),
        (70, 16, 16, 2, torch.float16, 3),
        (1, 3, 5, 1, torch.float32, 1),
    ):
        x = scene(n, GRID, ci, dtype=torch.float32)
        feats, weight, bias = x.feats.to(dtype), torch.randn(co, 8, ci // groups).to(dtype), torch.randn(co).to(dtype)
        grad = torch.randn(n, co).to(dtype)
        table = ops.subm_table.reference(x.coords, list(GRID), [2] * 3, [1] * 3)
        want = ops.conv.reference(feats.double(), weight.double(), table, bias.double(), groups=groups, reflect=True)
        wide = ops.conv_weight_grad.reference(grad.double(), feats.double(), table, groups=groups)
        plan = sparse3d.Plan(table, n)
        for parts, splits in ((1, 1), (3, 2)):
            if parts == left_out and not EVERY:
                continue
            p = plan.sorted(parts)
            tail = (None, None, None, groups, True, False, False)
            for masked in (True, False) if EVERY else (n == 40,):
                got = alone(
                    ops.conv, (feats, weight, p.table, bias, p.order, p.masks, *tail), SPLITS=splits, MASKED=masked
                )
                say(f"conv {n} {parts} {splits} {masked}", error=error(got, want), tolerance=tolerance(dtype))
            blocks = ops.tap_blocks.reference(p.masks, 8)
            got = alone(
                ops.conv_weight_grad, (grad, feats, p.table, p.order, *blocks, groups, False, False), SPLITS=splits
            )
            say(f"weight gradient {n} {parts} {splits}", error=error(got, wide), tolerance=tolerance(dtype))
        if n == 70 and not EVERY:
            continue
        got = alone(ops.conv, (feats, weight, table, bias, None, None, *tail), MASKED=False)
        say(f"unsorted {n}", error=error(got, want), tolerance=tolerance(dtype))


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2e-3


def compiled(name: str, fn: Callable[..., Any], *args: Tensor) -> None:
    before = len(fusion_choices())
    with torch.no_grad():
        _, wrong, kernels = interpreted.run(fn, *args)
    chosen = [d.chosen.split("(")[0] for d in fusion_choices()[before:]]
    say(name, error=wrong, tolerance=1e-5, kernels=kernels, chosen=chosen)


def graphs() -> None:
    x = scene(40, GRID, 16, dtype=torch.float32)
    weight, bias, rest = torch.randn(16, 8, 16), torch.randn(16), torch.randn(40, 16)
    plan = sparse3d.Plan(ops.subm_table.reference(x.coords, list(GRID), [2] * 3, [1] * 3), 40)
    for parts in (1, 3):
        p = plan.sorted(parts)
        compiled(f"fused {parts}", lambda f, w, b, y: torch.relu(p.conv(f, w, b) * 2 + y), x.feats, weight, bias, rest)  # noqa: B023
    compiled("prologue", lambda f, w: plan.sorted(1).conv(torch.sigmoid(f), w), x.feats, weight)

    # How many voxels it leads to only the data knows, so the proof draws thousands of rows: tiles for so many.
    ops.conv.templates["cpu"] = [dataclasses.replace(ops.conv.templates["cpu"][0], configs=({**TILE, "BLOCK_M": 512},))]

    def down(feats: Tensor, coords: Tensor) -> Tensor:
        return torch.relu(sparse3d.Geometry(coords, (8, 8, 8), 2).strided(2, 2).plan.sorted(1).conv(feats, weight))

    for n in (60, 90) if EVERY else ():
        y = scene(n, (8, 8, 8), 16, dtype=torch.float32)
        for tensor in (y.feats, y.coords):
            torch._dynamo.mark_dynamic(tensor, 0)
        compiled(f"strided {n}", down, y.feats, y.coords)


def planted_bug() -> None:
    """A tap's weights taken from the next tap: the proof refuses the template, or the result is wrong."""
    x = scene(40, GRID, 16, dtype=torch.float32)
    weight = torch.randn(16, 8, 16)
    table = ops.subm_table.reference(x.coords, list(GRID), [2] * 3, [1] * 3)
    p = sparse3d.Plan(table, 40).sorted(1)
    template = ops.conv.templates["cpu"][0]
    wrong = dataclasses.replace(
        template, source=template.source.replace("tap_w = tap0 + tap", "tap_w = (tap0 + tap + 1) % TAPS")
    )
    assert wrong.source != template.source
    ops.conv.templates["cpu"] = [wrong]
    before = len(fusion_choices())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, error_, _ = interpreted.run(lambda f, w: p.conv(f, w) + 1, x.feats, weight)
    verdicts = [v.status for d in fusion_choices()[before:] for v in d.verdicts]
    say("planted", error=error_, tolerance=1e-5, verdicts=verdicts)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    cuda.attach_templates("cpu")
    for op in (ops.conv, ops.conv_weight_grad):
        op.templates["cpu"] = [
            dataclasses.replace(t, configs=(TILE,), default=True) for t in op.templates["cpu"] if t.language == "triton"
        ]
    kernels_alone()
    graphs()
    planted_bug()
