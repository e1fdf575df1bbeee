"""The shipped Triton templates, rendered, fused and interpreted: one JSON line a case. Run by test_triton.py.

``python triton_cases.py [NAME ...]``: the cases of these names; without any, all.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

import shiplap_dense as dense
from shiplap.inductor import fusion_choices, switches
from shiplap_dense import cuda, ops
from shiplap_testing import interpreted

gelu, relu = torch.nn.functional.gelu, torch.relu
SMALL = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2, "GROUP_M": 8}


def shrink() -> None:
    """The same templates for the interpreter: one small config each, bound for the device that it runs on."""
    cuda.attach_templates("cpu")
    more: dict[str, Any] = {
        "mm_tma": {"PROGRAMS": 4, "FLATTEN": True},
        "grouped_mm": {"GROUPS": 8},
        "grouped_mm_tma": {"PROGRAMS": 4, "GROUPS": 8, "FLATTEN": True},
    }
    for op in (ops.mm, ops.bmm, ops.int8_mm, ops.grouped_mm, ops.conv2d):
        op.kernels.pop("cpu")  # what eager calls run is what compiled ones are compared with: the reference
        triton = [t for t in op.templates["cpu"] if t.language == "triton"]
        op.templates["cpu"] = [dataclasses.replace(t, configs=({**SMALL, **more.get(t.name, {})},)) for t in triton]


def asked(name: str) -> bool:
    return name in (sys.argv[1:] or [name])


def case(name: str, fn: Callable[..., Any], *args: Tensor, dynamic: bool = False) -> None:
    if not asked(name):
        return
    before = len(fusion_choices())
    try:
        _, error, kernels = interpreted.run(fn, *args, dynamic=dynamic)
        made = fusion_choices()[before:]
        verdicts = [(v.status, v.detail) for d in made for v in d.verdicts if v.status not in ("ok", "refused")]
        outcome = {"error": error, "kernels": kernels, "chosen": [d.chosen for d in made], "verdicts": verdicts}
    except Exception as e:
        outcome = {"failed": f"{type(e).__name__}: {e}"[:2000]}
    print(json.dumps({"name": name, **outcome}), flush=True)


def int8(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def last(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


def flip_bias(source: str) -> str:
    """``acc + bias`` becomes ``acc - bias``: a wrong epilogue, as a test of this test."""
    return re.sub(r"(tmp\d+) = acc \+ (tmp\d+)", r"\1 = acc - \2", source)


def matmul_cases() -> None:
    a, b, c = torch.randn(40, 50), torch.randn(50, 36), torch.randn(36)  # two blocks each, the second one cut
    case("bias inside, gelu", lambda a, b, c: gelu(ops.mm(a, b, c)), a, b, c)
    case("raw kept", lambda a, b, c: (lambda y: (y, relu(y + c)))(ops.mm(a, b)), a, b, c)
    case("siblings", lambda a, b, c: (lambda y: (gelu(y + c), relu(y) - 1))(ops.mm(a, b)), a, b, c)
    case("prologue", lambda a, b, c: ops.mm(torch.sigmoid(a), b) + c, a, b, c)
    case("reduction after", lambda a, b, c: ops.mm(a, b).sum(1), a, b, c)
    case("cast", lambda a, b, c: gelu(ops.mm(a, b) + c).half(), a, b, c)
    case("dynamic", lambda a, b, c: gelu(ops.mm(a, b, c)), a, b, c, dynamic=True)
    case("transposed views", lambda a, b, c: gelu(ops.mm(a.t(), b.t(), c)), a.t().contiguous(), b.t().contiguous(), c)
    case("offset views", lambda a, b, c: gelu(ops.mm(a[:, 1:], b[1:], c)), a, b, c)
    case("one row", lambda a, b, c: gelu(ops.mm(a[:1], b, c)), a, b, c)
    case("no rows", lambda a, b, c: gelu(ops.mm(a[:0], b, c)), a, b, c)
    case("twice one buffer", lambda a: relu(ops.mm(a, a.t())), a)
    case("three dims", lambda a, b, c: gelu(dense.matmul(a, b, c)), torch.randn(2, 20, 50), b, c)
    case("seed", lambda a, b: relu(ops.mm(a, b)), torch.randn(64, 96).half(), torch.randn(96, 32).half())
    case("bf16", lambda a, b: relu(ops.mm(a, b)), a.bfloat16(), b.bfloat16())
    with switches(ops.mm, fusion=False):
        case("fusion off", lambda a, b, c: gelu(ops.mm(a, b, c)), a, b, c)
    with switches(ops.mm, templates=False):
        case("templates off", lambda a, b, c: gelu(ops.mm(a, b, c)), a, b, c)
    with switches(ops.mm, only="mm_tma"):
        halves = torch.randn(64, 96).half(), torch.randn(96, 64).half(), torch.randn(64).half()
        case("bulk copies", lambda a, b, c: gelu(ops.mm(a, b, c)), *halves)
    interpreted.MUTATE[0] = flip_bias
    case("planted bug", lambda a, b, c: relu(ops.mm(a, b) + c), a, b, c)
    interpreted.MUTATE[0] = None


def other_cases() -> None:
    a, c = torch.randn(40, 50), torch.randn(36)
    case("bmm", lambda a, b: relu(dense.matmul(a, b)), torch.randn(2, 40, 50), torch.randn(2, 50, 33))
    case("int8", lambda a, w, s, c: gelu(dense.matmul_int8(a, w, s, c)), a, int8(36, 50), torch.rand(36) / 100, c)
    ends = torch.tensor([6, 6, 24, 27, 35], dtype=torch.int32)
    case("grouped", lambda a, b, e: relu(dense.grouped_matmul(a, b, e)), a, torch.randn(5, 50, 36), ends)
    x, w = last(2, 16, 10, 11), last(24, 16, 3, 3)
    case("conv", lambda x, w, c: relu(dense.conv2d(x, w, c, stride=2, padding=1)), x, w, torch.randn(24))
    case("conv dilated", lambda x, w: relu(dense.conv2d(x, w, stride=(1, 2), dilation=2)), x, w)


def training() -> None:
    a, b = torch.randn(40, 30, requires_grad=True), torch.randn(30, 20, requires_grad=True)
    before = len(fusion_choices())
    torch._dynamo.reset()
    torch.compile(lambda a, b: gelu(ops.mm(a, b)).sum(), fullgraph=True)(a, b).backward()
    got, (a.grad, b.grad) = (a.grad, b.grad), (None, None)
    gelu(a @ b).sum().backward()
    error = max(float((g - w).norm() / w.norm()) for g, w in zip(got, (a.grad, b.grad), strict=True))
    chosen = [d.chosen for d in fusion_choices()[before:]]
    print(json.dumps({"name": "training", "error": error, "kernels": [], "chosen": chosen, "verdicts": []}))


if __name__ == "__main__":
    torch.manual_seed(20261121)
    shrink()
    matmul_cases()
    other_cases()
    if asked("training"):
        training()
