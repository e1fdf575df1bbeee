"""timm Mixup: an image is mixed with another one, by NumPy's numbers."""

import numpy as np
import torch
from torch import nn

net = nn.Conv2d(3, 2, 3)


def rand_bbox(shape, lam):
    h, w = shape[-2:]
    ratio = np.sqrt(1 - lam)
    ch, cw = int(h * ratio), int(w * ratio)
    cy, cx = np.random.randint(h), np.random.randint(w)
    yl, yh = np.clip(cy - ch // 2, 0, h), np.clip(cy + ch // 2, 0, h)
    xl, xh = np.clip(cx - cw // 2, 0, w), np.clip(cx + cw // 2, 0, w)
    return yl, yh, xl, xh


@torch.compile(backend="eager")
def train_step(x):
    lam = np.random.beta(1.0, 1.0)
    if np.random.rand() < 0.5:
        yl, yh, xl, xh = rand_bbox(x.shape, lam)
        x = x.clone()
        x[:, :, yl:yh, xl:xh] = x.flip(0)[:, :, yl:yh, xl:xh]
    else:
        x = x * lam + x.flip(0) * (1.0 - lam)
    return net(x).mean()


torch.manual_seed(0)
np.random.seed(0)
for _ in range(4):
    train_step(torch.rand(2, 3, 16, 16)).backward()
