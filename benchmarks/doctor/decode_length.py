"""pytorch #132849: each new token brings a longer length as a number."""

import torch


@torch.compile(backend="eager")
def step(q, cache, length: int):
    keys = cache[:, :length]
    return torch.softmax(q @ keys.mT, -1) @ keys


q, cache = torch.rand(2, 1, 8), torch.rand(2, 32, 8)
for length in range(5, 9):
    step(q, cache, length)
