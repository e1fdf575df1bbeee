"""Processor time of ``import shiplap`` and of a first declaration with a kernel, after ``import torch``.

    python benchmarks/import_time.py

The goal is 250 ms. With torch 2.13 on two shared cores it was 88 ms with a Python kernel and 99 ms with a C kernel on
2026-11-26. The best of six processes counts, since other programs on the machine make each of them slower.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import time, torch
began = time.process_time()
import shiplap as sl
from jaxtyping import Float
from torch import Tensor

@sl.op("quick::add")
def add(x: Float[Tensor, "n c"], y: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x + y

{kernel}
print((time.process_time() - began) * 1000)
"""
KERNELS = {
    "Python": 'add.kernel("cpu")(lambda x, y: x + y)',
    "C": 'add.kernel("cpu", sl.cabi("quick.so", "quick_add"))',
}


def main() -> None:
    for name, kernel in KERNELS.items():
        command = [sys.executable, "-c", PROGRAM.format(kernel=kernel)]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(6)]
        print(f"{name} kernel: {min(map(float, runs)):.0f} ms, the best of {len(runs)} processes")


if __name__ == "__main__":
    main()
