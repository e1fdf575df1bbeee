"""snntorch-like report, pytorch #160757: a surrogate gradient whose slope is passed by keyword."""

import torch


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(membrane, slope):
        return (membrane > 0).float()

    @staticmethod
    def setup_context(ctx, inputs, output):
        membrane, ctx.slope = inputs
        ctx.save_for_backward(membrane)

    @staticmethod
    def backward(ctx, grad):
        (membrane,) = ctx.saved_tensors
        return grad / (1 + ctx.slope * membrane.abs()) ** 2, None


class Neuron(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)

    def forward(self, x):
        return Spike.apply(self.inner(x), slope=25.0)


neuron = torch.compile(Neuron(), backend="eager")
for _ in range(2):
    neuron(torch.randn(4, 6)).sum().backward()
