"""pytorch #113118: runs of equal labels are counted, as many as there are."""

import torch


@torch.compile(backend="eager")
def runs(labels):
    kept, counts = torch.unique_consecutive(labels, return_counts=True)
    return (kept * counts).sum() / counts.sum()


runs(torch.tensor([1, 1, 2, 2, 2, 3]))
