"""pytorch #107824, reduced: forces are the gradient of an energy, taken inside of the compiled function."""

import torch


class Potential(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, positions):
        positions = positions.detach().requires_grad_(True)
        energy = self.net(positions).sum()
        (forces,) = torch.autograd.grad(energy, positions)
        return energy.detach(), -forces


model = torch.compile(Potential(), backend="eager")
for _ in range(2):
    model(torch.randn(5, 3))
