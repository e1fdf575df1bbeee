"""vLLM-like report: a layer reads its settings from a thread local."""

import threading

import torch
from torch import nn

_local = threading.local()


def get_context():
    return getattr(_local, "context", {"scale": 1.0})


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        scale = get_context()["scale"]
        return self.fc(x) * scale


torch.manual_seed(0)
layer = torch.compile(Layer(), backend="eager")
with torch.no_grad():
    for scale in (0.5, 0.5, 2.0):
        _local.context = {"scale": scale}
        layer(torch.randn(2, 4))
