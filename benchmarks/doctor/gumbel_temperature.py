"""wav2vec2 quantiser: a temperature falls with each forward pass."""

import torch
from torch import nn


class Quantiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(6, 4)
        self.codes = nn.Parameter(torch.randn(4, 3))
        self.temperature = 2.0

    def forward(self, x):
        logits = self.proj(x)
        if self.training:
            weights = torch.softmax(logits / self.temperature, -1)
            self.temperature = max(self.temperature * 0.9, 0.5)
        else:
            weights = nn.functional.one_hot(logits.argmax(-1), 4).float()
        return weights @ self.codes


torch.manual_seed(0)
quantiser = torch.compile(Quantiser(), backend="eager")
for _ in range(5):
    quantiser(torch.randn(3, 6)).sum().backward()
