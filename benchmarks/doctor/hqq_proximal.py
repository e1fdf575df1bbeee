"""hqq #116: weights are quantised by iterations that stop when the error no longer falls."""

import torch


def shrink(x, beta, p=0.7):
    return torch.sign(x) * torch.relu(x.abs() - (1.0 / beta) * x.abs().clamp_min(1e-8) ** (p - 1))


@torch.compile(backend="eager")
def optimize(weight, scale, zero, iterations=12, beta=10.0):
    best = 1e4
    for _ in range(iterations):
        quantised = torch.round(weight * scale + zero).clamp(0, 15)
        restored = (quantised - zero) / scale
        error = shrink(weight - restored, beta)
        zero = torch.mean(quantised - (weight - error) * scale, dim=-1, keepdim=True)
        current = float((weight - restored).abs().mean())
        if current < best:
            best = current
        else:
            break
    return scale, zero


torch.manual_seed(0)
for _ in range(2):
    w = torch.randn(8, 16)
    optimize(w, 15 / (w.amax(1, keepdim=True) - w.amin(1, keepdim=True)), torch.full((8, 1), 7.0))
