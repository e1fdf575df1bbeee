"""pytorch #165421: masked_select, whose result has as many elements as the mask has ones."""

import torch


@torch.compile(backend="eager")
def bright(image):
    chosen = image.masked_select(image > 0.5)
    return chosen.mean() + chosen.std()


for _ in range(2):
    bright(torch.rand(4, 9))
