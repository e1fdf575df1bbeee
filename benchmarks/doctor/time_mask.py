"""transformers wav2vec2: spans of time are masked, drawn with NumPy."""

import numpy as np
import torch
from torch import nn


def mask_indices(shape, prob, length):
    batch, time = shape
    mask = np.zeros(shape, dtype=bool)
    for b in range(batch):
        spans = int(prob * time / length + np.random.rand())
        starts = np.random.choice(time - length + 1, spans, replace=False)
        for s in starts:
            mask[b, s : s + length] = True
    return torch.from_numpy(mask)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Parameter(torch.rand(8))
        self.proj = nn.Linear(8, 8)

    def forward(self, x):
        mask = mask_indices(x.shape[:2], 0.4, 2)
        x = torch.where(mask[..., None], self.embed, x)
        return self.proj(x).relu()


torch.manual_seed(0)
np.random.seed(0)
encoder = torch.compile(Encoder(), backend="eager")
for _ in range(3):
    encoder(torch.randn(2, 12, 8)).sum().backward()
