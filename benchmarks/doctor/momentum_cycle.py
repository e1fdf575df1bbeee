"""pytorch #133898: a schedule changes the first of an optimiser's two betas, which are a pair."""

import torch


class Adam:
    def __init__(self, weight):
        self.weight, self.mean, self.square = weight, torch.zeros_like(weight), torch.zeros_like(weight)
        self.group = {"betas": (0.95, 0.99), "lr": 0.01}

    def step(self, gradient):
        first, second = self.group["betas"]
        self.mean = self.mean * first + gradient * (1 - first)
        self.square = self.square * second + gradient * gradient * (1 - second)
        return self.weight - self.group["lr"] * self.mean / (self.square.sqrt() + 1e-8)


optimizer = Adam(torch.rand(4))
step = torch.compile(optimizer.step, backend="eager")
for first in (0.95, 0.94, 0.92):
    optimizer.group["betas"] = (first, 0.99)
    step(torch.rand(4))
