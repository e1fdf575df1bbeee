"""jac #7926: a guard that raises when a mask is not what it has to be."""

import torch


@torch.compile(backend="eager")
def attend(x, mask):
    x = torch.relu(x)
    if not mask.all():
        raise ValueError("mask must be all true")
    return torch.sin(x) * 2.0


for _ in range(2):
    attend(torch.randn(4, 4), torch.ones(4, dtype=torch.bool))
