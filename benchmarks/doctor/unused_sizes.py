"""pytorch #131893: an argument that only one branch reads comes in another size each time."""

import torch


@torch.compile(backend="eager", dynamic=False)
def scaled(x, other, use: bool):
    return x * other.sum() if use else x * 2


for size in (4, 6, 9):
    scaled(torch.rand(3), torch.rand(size), True)
