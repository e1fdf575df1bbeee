"""pytorch #139474: crops of another size in each batch, compiled with static sizes."""

import torch


@torch.compile(backend="eager", dynamic=False)
def detail(images):
    up = torch.nn.functional.interpolate(images, scale_factor=2.0)
    return (up - up.mean((2, 3), keepdim=True)).relu()


for size in (16, 20, 24, 28):
    detail(torch.randn(1, 3, size, size))
