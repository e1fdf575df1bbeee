"""dion #23: an optimiser's update, compiled once, runs over matrices of all sizes."""

import torch


@torch.compile(backend="eager")
def orthogonalise(update, weight, rate):
    scale = (update.shape[0] / update.shape[1]) ** 0.5
    return weight - rate * scale * update / update.norm()


for rows, columns in ((4, 8), (8, 8), (16, 4), (12, 6), (5, 9)):
    parameter = torch.nn.Parameter(torch.randn(rows, columns))
    orthogonalise(torch.randn(rows, columns), parameter, 0.1).sum().backward()
