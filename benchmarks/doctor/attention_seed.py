"""pytorch #101154: an attention draws a seed, so that its dropout can be repeated in the backward."""

import sys

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        x = self.project(x)
        self.attention_seed = int(torch.seed() % sys.maxsize)
        torch.manual_seed(self.attention_seed)
        return nn.functional.dropout(x, 0.1, self.training)


torch.compile(Attention().eval(), backend="eager")(torch.rand(3, 8))
