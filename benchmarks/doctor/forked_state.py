"""pytorch #109410: dropout is drawn under a forked state, so that the outer stream goes on unchanged."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        h = self.fc(x)
        with torch.random.fork_rng(devices=[]):
            mask = torch.rand(h.shape) > 0.2
        h = h * mask
        return h + 0.1 * torch.randn(h.shape)


torch.manual_seed(0)
block = torch.compile(Block(), backend="eager")
for _ in range(3):
    block(torch.randn(2, 8)).sum().backward()
