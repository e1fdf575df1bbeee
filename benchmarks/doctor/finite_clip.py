"""gradients are clipped by their norm, or set to zero if it is not finite."""

import torch


@torch.compile(backend="eager")
def clip(grads, max_norm=1.0):
    norms = torch.stack([g.norm() for g in grads])
    total = norms.norm()
    coef = (max_norm / (total + 1e-6)).clamp(max=1.0)
    if torch.isfinite(total):
        for g in grads:
            g.mul_(coef)
    else:
        for g in grads:
            g.zero_()
    return total


torch.manual_seed(0)
for bad in (False, True, False):
    grads = [torch.randn(3, 3), torch.randn(3)]
    if bad:
        grads[0][0, 0] = float("nan")
    clip(grads)
