"""pytorch #124357: a program sets a number of the model before each call."""

import torch
from torch import nn


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = -1
        self.cache = torch.ones(2, 3)

    def forward(self, x):
        return x * self.cache + self.value


model = Shifted()
run = torch.compile(model, backend="eager")
for value in (6, 8, 10):
    model.value = value
    run(torch.rand(2, 3))
