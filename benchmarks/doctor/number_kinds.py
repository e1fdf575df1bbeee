"""forum threads: a scale is an integer in some calls and a float in others."""

import torch


@torch.compile(backend="eager")
def guidance(cond, uncond, scale):
    delta = cond - uncond
    out = uncond + scale * delta
    return out / out.std()


torch.manual_seed(0)
for scale in (1, 7.5, 3, 5.5, 2, 7.5):
    guidance(torch.randn(4, 4), torch.randn(4, 4), scale)
