"""transformers #37332: tokens that a mask keeps are packed, attended to and put back."""

import torch
from torch import nn


def get_unpad_data(mask):
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    longest = lengths.max().item()
    cumulated = nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return indices, cumulated, longest


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, mask):
        b, n, d = x.shape
        indices, cumulated, longest = get_unpad_data(mask)
        q, k, v = self.qkv(x.reshape(b * n, d)[indices]).chunk(3, -1)
        row = torch.searchsorted(cumulated, torch.arange(q.shape[0], dtype=torch.int32), right=True)
        scores = (q @ k.T / longest).masked_fill(row[:, None] != row, float("-inf"))
        out = x.new_zeros(b * n, d)
        out[indices] = scores.softmax(-1) @ v
        return out.view(b, n, d)


torch.manual_seed(0)
attention = torch.compile(Attention(), backend="eager")
for length in (3, 4, 5):
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, length:] = 0
    attention(torch.randn(2, 6, 8), mask).sum().backward()
