"""pytorch #128134: the same layer runs in half precision under autocast and in single precision without."""

import torch


@torch.compile(backend="eager")
def block(target):
    return torch.nn.functional.gelu(target) + target


for dtype in (torch.float16, torch.float32):
    block(torch.randn(4, 4).to(dtype))
