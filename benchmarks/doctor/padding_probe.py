"""transformers #37944: whether a mask hides anything decides which mask the attention gets."""

import torch


@torch.compile(backend="eager")
def scores(q, k, mask):
    weights = q @ k.mT
    if (mask == 0).any().item():
        weights = weights.masked_fill(mask[:, None, :] == 0, -1e4)
    return weights.softmax(-1)


q, k = torch.rand(2, 6, 8), torch.rand(2, 6, 8)
scores(q, k, torch.ones(2, 6))
scores(q, k, torch.tensor([[1.0] * 6, [1.0] * 4 + [0.0] * 2]))
