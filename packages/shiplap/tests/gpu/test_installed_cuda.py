"""``shiplap audit --installed --device cuda``: functions of a package for GPUs, each wrong in one way."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PACKAGE = """\
import torch
import triton
import triton.language as tl
from torch.autograd import Function
from torch.autograd.function import once_differentiable

CAPABILITY = torch.cuda.get_device_capability()  # the import uses the device


@triton.jit
def double_kernel(x, y, n, BEHIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at + BEHIND, mask=at < n)
    tl.store(y + at, value * 2, mask=at < n)


def launch(x, behind=0):
    y = torch.empty_like(x)
    if x.numel():
        double_kernel[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), behind, 64)
    return y


class Right(Function):
    @staticmethod
    def forward(ctx, x):
        return launch(x.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return launch(grad.contiguous())


class IgnoresStrides(Right):
    @staticmethod
    def forward(ctx, x):
        return launch(x.as_strided((x.numel(),), (1,))).view(x.shape)


class WrongGradient(Right):
    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class FarAway(Right):
    @staticmethod
    def forward(ctx, x):
        return launch(x.contiguous(), 0 if x.shape[0] == 6 else 1 << 40)
"""
SCRIPT = """\
import torch, cuda_functions as f
x = torch.randn(6, 4, device="cuda")
for function in (f.Right, f.IgnoresStrides, f.WrongGradient, f.FarAway):
    function.apply(x)
"""


def test_each_fault_is_found_and_nothing_else(tmp_path):
    (tmp_path / "cuda_functions.py").write_text(PACKAGE)
    (tmp_path / "calls.py").write_text(SCRIPT)
    # In an interpreter of its own: the process from which tests fork theirs has looked for devices, as no fork may.
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from shiplap.cli.app import main; main()", "audit", "--json"),
            *("--installed", "cuda_functions", "--functions", "--device", "cuda", "--record", "calls.py"),
            *("--out", "found", "--jobs", "4", "--seed", "3"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    report = json.loads(done.stdout)
    print(json.dumps(report, indent=1), done.stderr)
    assert (report["device"], report["reached"]) == ("cuda", 4)
    found = {}
    for f in report["findings"]:
        found.setdefault(f["op"].rpartition(":")[2], set()).add(f["check"])
    assert "Right" not in found
    assert "layout" in found["IgnoresStrides"]
    assert "gradient" in found["WrongGradient"]
    assert "crash" in found["FarAway"]
