"""The kernel of ``norm_relu`` under Triton's interpreter against the reference, in a process of its own."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from shiplap_sparse3d import norms
from shiplap_sparse3d.cuda import norm

SIZES = (50, 7), (33, 128), (19, 200), (300, 16), (1, 1), (0, 5), (5, 0)  # a program has 16 to 2048 rows


def main() -> None:
    norms.norm_relu.kernel("cuda", norm.NORM_RELU, name="interpreted")
    assert norms.norm_relu.kernels["cpu"]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for n, c in SIZES:
            x, mean, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((n, c), (c,), (c,), (c,)))
            var = (torch.rand(c) + 0.5).to(dtype)
            x[:1, :1], x[-1:, -1:] = torch.nan, torch.inf
            args = x, mean, var, weight, bias, 1e-3
            torch.testing.assert_close(norms.norm_relu(*args), norms.norm_relu.reference(*args), equal_nan=True)
    print("norm_relu agrees")


if __name__ == "__main__":
    main()
