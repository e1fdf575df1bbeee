"""ultralytics: anchors are made again when the shape of the features differs from the last one."""

import torch
from torch import nn


class Detect(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 1)
        self.shape = None
        self.anchors = torch.empty(0)

    def forward(self, x):
        shape = x.shape
        x = self.conv(x)
        if self.shape != shape:
            h, w = shape[2:]
            ys, xs = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
            self.anchors = torch.stack((xs, ys)).reshape(2, -1)
            self.shape = shape
        boxes = x.flatten(2)
        return boxes[:, :2] * 8 + self.anchors


torch.manual_seed(0)
head = torch.compile(Detect(), backend="eager")
with torch.no_grad():
    for size in (8, 8, 10, 10, 12, 12):
        head(torch.randn(1, 4, size, size))
