"""A model that trains on the device ``mine``, with the numbers of the CPU."""

import sys

import torch
from torch import nn

sys.path.insert(0, "torch-mine")
import torch_mine

torch_mine.autoload()


def losses(device: str) -> list[float]:
    """The loss of each of 20 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    # before `.to`: the parameters stay the same objects
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to(device)
    x = torch.rand(64, 2)
    y = x.prod(1, keepdim=True).to(device)
    x = x.to(device)
    steps = []
    for _ in range(20):
        loss = ((model(x) - y) * 1.5).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        steps.append(loss.item())
    return steps


ours, cpus = losses("mine"), losses("cpu")
torch.testing.assert_close(ours, cpus, rtol=1e-4, atol=1e-6)
assert ours[-1] < ours[0] / 2
print(f"the loss fell from {ours[0]:.3f} to {ours[-1]:.3f}, as on the CPU")
for op, calls in torch.mine.counters().items():
    print(f"{op:36} {calls['native']:4} native  {calls['fallback'] or ''}")
