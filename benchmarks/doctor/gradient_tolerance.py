"""pytorch LBFGS-like step: nothing is done if the gradient is flat enough."""

import torch


@torch.compile(backend="eager")
def step(x, grad, previous, lr=0.5, tolerance=1e-3):
    flat = grad.flatten()
    if flat.abs().max() <= tolerance:
        return x
    y = flat - previous.flatten()
    ys = torch.dot(y, flat)
    direction = -flat * (1 + ys.abs()).rsqrt()
    return x + lr * direction.view_as(x)


torch.manual_seed(0)
x, previous = torch.randn(3, 3), torch.zeros(3, 3)
for scale in (1.0, 0.5, 1e-5, 0.2):
    grad = scale * x
    x = step(x, grad, previous)
    previous = grad
