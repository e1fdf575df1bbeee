"""implicit layers: an iteration ends where two states are close."""

import torch
from torch import nn

torch.manual_seed(0)
cell = nn.Linear(4, 4)
with torch.no_grad():
    cell.weight.mul_(0.3)


@torch.compile(backend="eager")
def solve(x):
    z = torch.zeros_like(x)
    for _ in range(10):
        z_new = torch.tanh(cell(z) + x)
        if torch.allclose(z_new, z, atol=1e-3):
            break
        z = z_new
    return z


with torch.no_grad():
    for _ in range(2):
        solve(torch.randn(2, 4))
