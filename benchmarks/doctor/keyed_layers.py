"""pytorch #171598: many instances of one module, each with a number of its own."""

import torch


class Keyed(torch.nn.Module):
    def __init__(self, key):
        super().__init__()
        self.key, self.linear = key, torch.nn.Linear(4, 4)

    def forward(self, x, store):
        store[self.key] = self.linear(x)
        return store[self.key] + self.key


layers = [torch.compile(Keyed(n), backend="eager") for n in range(10)]
x, store = torch.randn(2, 4), torch.zeros(12, 2, 4)
with torch.no_grad():
    for layer in layers:
        layer(x, store)
