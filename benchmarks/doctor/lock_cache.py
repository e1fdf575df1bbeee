"""rl #2501-like report: a cache is written under a lock."""

import threading

import torch

lock, cache = threading.Lock(), {}


@torch.compile(backend="eager")
def rotary(x):
    with lock:
        if "cos" not in cache:
            cache["cos"] = torch.arange(x.shape[-1]).cos()
    return x * cache["cos"]


for _ in range(2):
    rotary(torch.randn(3, 8))
