"""pytorch #107187: a seed is set in the compiled function, so that its noise is repeated."""

import torch


@torch.compile(backend="eager")
def noised(x, sigma):
    torch.manual_seed(1234)
    noise = torch.randn(x.shape)
    y = x + sigma * noise
    return y.tanh()


torch.manual_seed(0)
x = torch.randn(4, 4)
a = noised(x, 0.1)
b = noised(x, 0.1)
print(torch.equal(a, b))
