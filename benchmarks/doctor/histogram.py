"""pytorch #192343: a histogram of indices has as many entries as the largest index says."""

import torch


@torch.compile(backend="eager")
def share(index):
    counts = torch.bincount(index + 1).float()
    return counts / counts.sum()


share(torch.tensor([0, 3, 2, 3]))
share(torch.tensor([1, 1, 5, 0]))
