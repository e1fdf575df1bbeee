"""Tacotron2: frames are made until a gate opens or a limit is met, with a warning."""

import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(4, 4)
        self.gate = nn.Linear(4, 1)
        self.limit = 6

    def forward(self, h):
        frame = torch.zeros_like(h)
        frames = []
        while True:
            h = self.cell(frame, h)
            frame = torch.tanh(h)
            frames.append(frame)
            if torch.sigmoid(self.gate(h)) > 0.7:
                break
            elif len(frames) == self.limit:
                print("Warning! Reached max decoder steps")
                break
        return torch.stack(frames)


torch.manual_seed(0)
decoder = torch.compile(Decoder(), backend="eager")
with torch.no_grad():
    for _ in range(2):
        decoder(torch.randn(1, 4))
