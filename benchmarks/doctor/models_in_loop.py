"""pytorch #167504: models of one class are compiled in a loop, each with another number of layers."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


torch.manual_seed(0)
for depth in (1, 2, 3, 4):
    net = torch.compile(Net(depth), backend="eager")
    for _ in range(2):
        print(round(float(net(torch.randn(3, 6)).sum()), 4))
