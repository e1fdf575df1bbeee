"""fp8 recipes: a scale is computed anew every few steps from a history of maxima."""

import torch
from torch import nn


class Fp8Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("history", torch.zeros(4))
        self.register_buffer("scale", torch.ones(()))
        self.steps = 0

    def forward(self, x):
        self.history = torch.roll(self.history, 1)
        self.history[0] = x.detach().abs().max()
        if self.steps % 2 == 0:
            amax = self.history.max().item()
            self.scale.fill_(448.0 / max(amax, 1e-12))
        self.steps += 1
        q = (x * self.scale).round() / self.scale
        return self.fc(q)


torch.manual_seed(0)
layer = torch.compile(Fp8Linear(), backend="eager")
for _ in range(5):
    layer(torch.randn(3, 6)).sum().backward()
