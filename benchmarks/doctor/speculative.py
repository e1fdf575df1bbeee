"""gpt-fast: tokens of a draft are accepted up to the first that differs."""

import torch
from torch import nn

torch.manual_seed(0)
target = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))


@torch.compile(backend="eager")
def verify(draft):
    logits = target(draft)
    best = logits.argmax(-1)
    accepted = (best[:-1] == draft[1:]).long().cumprod(0).sum().item()
    return torch.cat([draft[: accepted + 1], best[accepted : accepted + 1]])


with torch.no_grad():
    for _ in range(4):
        verify(torch.randint(5, (6,)))
