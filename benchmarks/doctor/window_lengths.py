"""transformers #45816: lengths of windows become a list by which tokens are split and attended to."""

import torch


@torch.compile(backend="eager")
def windows(tokens, lengths):
    parts = torch.split(tokens, lengths.tolist())
    return torch.cat([torch.softmax(p @ p.mT, -1) @ p for p in parts])


tokens = torch.rand(12, 8)
windows(tokens, torch.tensor([4, 3, 5]))
windows(tokens, torch.tensor([2, 6, 4]))
