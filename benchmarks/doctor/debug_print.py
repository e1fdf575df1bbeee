"""pytorch #140394: a print of a norm that was left in a block."""

import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        h = torch.nn.functional.gelu(self.a(x))
        print("hidden", h.shape, h.norm())
        return self.b(h) + x


block = torch.compile(Block(), backend="eager")
for _ in range(3):
    block(torch.randn(2, 8)).sum().backward()
