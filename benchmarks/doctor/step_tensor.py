"""a sampler gets the number of its steps as a tensor and loops over it."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 4)


@torch.compile(backend="eager")
def sample(x, num_steps):
    dt = 1.0 / num_steps
    for i in range(int(num_steps)):
        t = i * dt
        x = x + dt * torch.tanh(net(x)) * (1 - t)
    return x


with torch.no_grad():
    for steps in (3, 3, 4):
        sample(torch.randn(2, 4), torch.tensor(steps))
