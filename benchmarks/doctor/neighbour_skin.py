"""torchmd-like report: a list of neighbours is built again when an atom has moved too far."""

import torch
from torch import nn


class Potential(nn.Module):
    def __init__(self, cutoff=1.5, skin=0.3):
        super().__init__()
        self.cutoff, self.skin = cutoff, skin
        self.reference = None
        self.pairs = None

    def neighbours(self, x):
        if self.reference is None or (x - self.reference).norm(dim=-1).max() > self.skin / 2:
            self.reference = x.detach().clone()
            distance = torch.cdist(x, x)
            self.pairs = torch.nonzero((distance < self.cutoff + self.skin).triu(1))
        return self.pairs

    def forward(self, x):
        i, j = self.neighbours(x).unbind(1)
        r = (x[i] - x[j]).norm(dim=-1)
        return (1 / r**6).clamp(max=100).sum()


torch.manual_seed(0)
potential = torch.compile(Potential(), backend="eager")
x = torch.rand(8, 3) * 3
with torch.no_grad():
    for shift in (0.0, 0.01, 0.2, 0.2):
        potential(x + shift)
