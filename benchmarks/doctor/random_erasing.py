"""torchvision RandomErasing: a rectangle is drawn until it fits."""

import math

import torch


def params(img, low=0.02, high=0.2):
    _, h, w = img.shape
    for _ in range(10):
        area = h * w * torch.empty(1).uniform_(low, high).item()
        ratio = math.exp(torch.empty(1).uniform_(-1, 1).item())
        eh, ew = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if not (eh < h and ew < w):
            continue
        i = torch.randint(0, h - eh + 1, (1,)).item()
        j = torch.randint(0, w - ew + 1, (1,)).item()
        return i, j, eh, ew
    return 0, 0, h, w


@torch.compile(backend="eager")
def augment(img):
    i, j, h, w = params(img)
    img = img.clone()
    img[:, i : i + h, j : j + w] = 0
    return (img - 0.5) / 0.25


torch.manual_seed(0)
for _ in range(3):
    augment(torch.rand(3, 16, 16))
