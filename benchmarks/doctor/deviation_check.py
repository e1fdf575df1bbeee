"""vision #9314: normalisation refuses a deviation of zero, and looks at the values for that."""

import torch


@torch.compile(backend="eager")
def normalize(image, mean, deviation):
    if (deviation == 0).any():
        raise ValueError("a deviation is zero, which leads to a division by zero")
    return (image - mean[:, None, None]) / deviation[:, None, None]


normalize(torch.rand(3, 8, 8), torch.full((3,), 0.5), torch.full((3,), 0.2))
