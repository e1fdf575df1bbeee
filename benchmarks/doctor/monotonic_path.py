"""Glow-TTS, VITS: an alignment is found by loops in NumPy."""

import numpy as np
import torch


def maximum_path(value):
    value = value.detach().cpu().numpy().astype(np.float32)
    x, y = value.shape
    path = np.zeros((x, y), dtype=np.float32)
    total = np.full((x, y), -1e9, dtype=np.float32)
    for j in range(y):
        for i in range(max(0, x + j - y), min(x, j + 1)):
            stay = total[i, j - 1] if j > 0 else -1e9
            move = total[i - 1, j - 1] if i > 0 and j > 0 else (0.0 if j == 0 else -1e9)
            total[i, j] = value[i, j] + max(stay, move)
    index = x - 1
    for j in range(y - 1, -1, -1):
        path[index, j] = 1
        if index != 0 and (index == j or total[index, j - 1] < total[index - 1, j - 1]):
            index -= 1
    return torch.from_numpy(path)


@torch.compile(backend="eager")
def align(text, mel):
    scores = -torch.cdist(text, mel)
    path = maximum_path(scores)
    return (path.T @ text - mel).pow(2).mean()


torch.manual_seed(0)
for _ in range(2):
    align(torch.randn(4, 3, requires_grad=True), torch.randn(9, 3)).backward()
