"""pytorch #194166: batch norm over the rows that a mask selects, written back into the whole."""

import torch


class MaskedNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, h, keep):
        chosen = self.norm(h[keep])
        out = torch.zeros_like(h)
        out[keep] = chosen
        return out * 2


norm = torch.compile(MaskedNorm(), backend="eager")
for seed in range(3):
    norm(torch.randn(12, 8), torch.arange(12) % 3 != seed)
