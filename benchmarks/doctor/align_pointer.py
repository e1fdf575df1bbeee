"""pytorch #128071: a tensor is cloned unless its address is a multiple of 16."""

import torch


def aligned(x, bytes=16):
    return x if x.data_ptr() % bytes == 0 else x.clone()


@torch.compile(backend="eager")
def norm(x, weight):
    x = aligned(x)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


for _ in range(2):
    norm(torch.randn(4, 16), torch.ones(16))
