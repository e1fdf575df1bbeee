"""timesfm #459: a cache of keys is written at an index that is a tensor."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, size, length):
        super().__init__()
        self.qkv = nn.Linear(size, 3 * size)
        self.register_buffer("keys", torch.zeros(length, size))
        self.register_buffer("values", torch.zeros(length, size))
        self.register_buffer("next_index", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        start = self.next_index[0]
        end = start + x.shape[0]
        self.keys[start:end] = k
        self.values[start:end] = v
        self.next_index += x.shape[0]
        scores = (q @ self.keys.T).softmax(-1)
        return scores @ self.values


torch.manual_seed(0)
layer = torch.compile(Attention(8, 16), backend="eager")
with torch.no_grad():
    for _ in range(4):
        layer(torch.randn(2, 8))
