"""pytorch #95425: in training, layers are left out at random."""

import random

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            if self.training and random.random() < 0.2:
                continue
            x = layer(x).relu()
        return x


random.seed(0)
encoder = torch.compile(Encoder(), backend="eager")
for _ in range(3):
    encoder(torch.rand(3, 8))
