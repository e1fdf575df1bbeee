"""DeepSpeed-like report, pytorch #126722: a helper that somebody kept from the compiler."""

import torch


@torch._dynamo.disable(recursive=False)
def rescale(x):
    return x / x.abs().amax(-1, keepdim=True)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.b(rescale(self.a(x)))


layer = torch.compile(Layer(), backend="eager")
for _ in range(2):
    layer(torch.randn(3, 8)).sum().backward()
