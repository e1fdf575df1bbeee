"""torchaudio-like report, pytorch #105052: a filter of SciPy between two parts of a network."""

import scipy.signal
import torch


class Smooth(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        h = torch.from_numpy(scipy.signal.medfilt(h.numpy(), (1, 5)))
        return self.b(h)


with torch.no_grad():
    smooth = torch.compile(Smooth(), backend="eager")
    for _ in range(2):
        smooth(torch.randn(3, 32))
