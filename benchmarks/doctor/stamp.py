"""pytorch #125171: a forward pass notes the time of day of each call."""

from datetime import datetime

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.started = None

    def forward(self, x):
        self.started = datetime.now()
        y = torch.relu(self.linear(x))
        return y.softmax(-1)


model = Model()
run = torch.compile(model, backend="eager")
for _ in range(3):
    run(torch.randn(2, 5))
assert model.started is not None
