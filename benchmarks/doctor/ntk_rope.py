"""transformers: frequencies are computed anew if a position lies beyond the longest one so far."""

import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, dim, longest):
        super().__init__()
        self.dim, self.longest = dim, longest
        self.original = longest
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim))

    def forward(self, x, position_ids):
        seq_len = torch.max(position_ids) + 1
        if seq_len > self.longest:
            base = 10000 * (seq_len / self.original) ** (self.dim / (self.dim - 2))
            self.inv_freq = 1.0 / base ** (torch.arange(0, self.dim, 2) / self.dim)
            self.longest = seq_len
        freqs = position_ids[..., None].float() * self.inv_freq
        emb = torch.cat((freqs, freqs), -1)
        return x * emb.cos() + x.roll(1, -1) * emb.sin()


torch.manual_seed(0)
rotary = torch.compile(Rotary(8, 16), backend="eager")
for length in (8, 8, 24, 24):
    rotary(torch.randn(1, length, 8), torch.arange(length)[None])
