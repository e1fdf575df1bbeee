"""transformers Switch: only experts that got a token run."""

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, count, size):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(size, size) for _ in range(count))
        self.router = nn.Linear(size, count)

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        best, chosen = probs.max(-1)
        mask = nn.functional.one_hot(chosen, len(self.experts))
        out = torch.zeros_like(x)
        used = torch.nonzero(mask.sum(0)).squeeze(-1)
        for idx in used:
            rows = mask[:, idx].bool()
            out[rows] = self.experts[idx](x[rows])
        return out * best[:, None]


torch.manual_seed(0)
moe = torch.compile(Experts(4, 6), backend="eager")
with torch.no_grad():
    for _ in range(3):
        moe(torch.randn(10, 6))
