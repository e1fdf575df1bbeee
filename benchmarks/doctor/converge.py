"""reports of iterative solvers: a loop runs until its residual is small."""

import torch


@torch.compile(backend="eager")
def solve(a, b):
    x = torch.zeros_like(b)
    residual = b - a @ x
    while residual.norm() > 1e-3:
        x = x + 0.5 * residual
        residual = b - a @ x
    return x


for _ in range(2):
    solve(torch.eye(4) + 0.1 * torch.rand(4, 4), torch.randn(4))
