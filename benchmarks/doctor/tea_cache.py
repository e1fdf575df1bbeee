"""cache-dit #76, TeaCache: a block is left out while its input has changed little."""

import numpy as np
import torch
from torch import nn


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(8, 8)
        self.previous, self.residual, self.distance = None, None, 0.0
        self.rescale = np.poly1d([2.0, 0.5, 0.01])

    def forward(self, x):
        if self.previous is None:
            calculate = True
        else:
            change = ((x - self.previous).abs().mean() / self.previous.abs().mean()).item()
            self.distance += float(self.rescale(change))
            calculate = self.distance >= 0.3
        self.previous = x
        if calculate:
            self.distance = 0.0
            y = self.block(x).relu()
            self.residual = y - x
            return y
        return x + self.residual


torch.manual_seed(0)
model = torch.compile(Cached(), backend="eager")
x = torch.randn(2, 8)
with torch.no_grad():
    for _ in range(6):
        model(x)
        x = x * 1.02
