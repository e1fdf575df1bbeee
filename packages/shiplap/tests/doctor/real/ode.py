"""An adaptive ODE solver (torchdiffeq) inside a compiled model: its step control is Python on tensors."""

import torch
from torchdiffeq import odeint

torch.manual_seed(0)


class Flow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.field = torch.nn.Linear(2, 2)

    def forward(self, y):
        return odeint(lambda t, y: self.field(y), y, torch.tensor([0.0, 1.0]))


with torch.no_grad():
    torch.compile(Flow(), backend="eager")(torch.randn(3, 2))
