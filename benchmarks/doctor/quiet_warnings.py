"""a block of a model silences warnings while it computes a square root."""

import warnings

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        h = self.fc(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scale = (h * h).mean(-1, keepdim=True).add(1e-5).sqrt()
        return h / scale


torch.manual_seed(0)
layer = torch.compile(Layer(), backend="eager")
for _ in range(2):
    layer(torch.randn(3, 6)).sum().backward()
