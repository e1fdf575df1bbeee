"""torchdynamo #1883: a sum that decides whether something is added."""

import torch


@torch.compile(backend="eager")
def toy(a, b):
    x = torch.sin(a)
    y = x.sum()
    if y < 0:
        x = x + 55
    return x * b


for sign in (1, -1, 1):
    toy(torch.full((10,), 0.5 * sign), torch.randn(10))
