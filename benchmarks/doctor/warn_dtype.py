"""xformers-like report, pytorch #104097: a warning about a dtype that the layer converts."""

import warnings

import torch


@torch.compile(backend="eager")
def attention(q, k):
    if q.dtype != torch.float64:
        warnings.warn("scores are computed in double precision", stacklevel=2)
    return (q.double() @ k.double().T).softmax(-1).float()


for _ in range(2):
    attention(torch.randn(3, 4), torch.randn(5, 4))
