"""GLiClass #39: class tokens are found by position, and the widest row says how many there are."""

import torch


@torch.compile(backend="eager")
def pick(hidden, ids):
    widest = (ids == 7).sum(-1).max().item()
    rows, columns = torch.where(ids == 7)
    return hidden[rows, columns].sum(0) / widest


hidden = torch.rand(2, 6, 8)
pick(hidden, torch.tensor([[7, 1, 7, 2, 3, 4], [1, 7, 2, 3, 4, 5]]))
