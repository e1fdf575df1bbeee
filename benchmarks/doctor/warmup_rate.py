"""FBGEMM #3287: the rate of a warm-up is another number at each step."""

import torch


@torch.compile(backend="eager")
def update(weight, gradient, group):
    return weight - group["lr"] * gradient / (gradient.square().mean().sqrt() + group["eps"])


weight, gradient = torch.rand(4, 4), torch.rand(4, 4)
for step in range(4):
    weight = update(weight, gradient, {"lr": 0.02 * (step + 1), "eps": 1e-8})
