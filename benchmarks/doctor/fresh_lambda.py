"""pytorch #107866: a function that is made anew for each call is passed to the compiled one."""

import torch


@torch.compile(backend="eager")
def integrate(f, x, steps=4):
    h = 1.0 / steps
    for _ in range(steps):
        k1 = f(x)
        k2 = f(x + h * k1)
        x = x + h * (k1 + k2) / 2
    return x


def decay(rate):
    return lambda x: -rate * x


torch.manual_seed(0)
for rate in (0.1, 0.2, 0.3, 0.4):
    integrate(decay(rate), torch.randn(4))
