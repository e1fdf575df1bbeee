"""VITS: a segment of each row is cut out at a drawn place."""

import torch
from torch import nn


def rand_slice_segments(x, segment):
    b, _, t = x.size()
    starts = (torch.rand([b]) * (t - segment + 1)).to(dtype=torch.long)
    ret = torch.zeros_like(x[:, :, :segment])
    for i in range(b):
        begin = starts[i]
        ret[i] = x[i, :, begin : begin + segment]
    return ret, starts


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x):
        z = self.conv(x)
        part, starts = rand_slice_segments(z, 5)
        return torch.tanh(part), starts


torch.manual_seed(0)
generator = torch.compile(Generator(), backend="eager")
for _ in range(3):
    generator(torch.randn(2, 4, 16))[0].sum().backward()
