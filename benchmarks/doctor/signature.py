"""pytorch #149968: the keyword arguments of a processor are found by inspect.signature at each call."""

import inspect

import torch


class Processor:
    def __call__(self, x, scale=2.0):
        return x * scale


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.processor = torch.nn.Linear(4, 4), Processor()

    def accepted(self):
        return set(inspect.signature(self.processor.__call__).parameters)

    def forward(self, x, **more):
        given = {k: v for k, v in more.items() if k in self.accepted()}
        return self.processor(self.linear(x), **given)


layer = torch.compile(Layer(), backend="eager")
for _ in range(2):
    layer(torch.randn(2, 4), scale=3.0, unused=1.0)
