"""diffusers #10932: blocks that share their code hold a processor object each."""

import torch
from torch import nn


class Processor:
    def __call__(self, attention, x):
        return attention.out(torch.softmax(x @ x.mT, -1) @ x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(8, 8)
        self.processor = Processor()

    def forward(self, x):
        return self.processor(self, x)


blocks = nn.ModuleList(Attention() for _ in range(4))
for block in blocks:
    block.compile(backend="eager")
x = torch.rand(2, 5, 8)
for block in blocks:
    x = block(x)
