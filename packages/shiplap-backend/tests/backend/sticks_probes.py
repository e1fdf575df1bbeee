"""The probes of the runtime sticks against the CPU in float16: prints each that differs, and the number of those equal.

python sticks_probes.py PROJECT
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as f

PROBES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "scaled": lambda x, y: torch.add(x, y, alpha=2.5),
    "subtract": lambda x, y: x - y * 1.5,
    "divide": lambda x, y: x / (y.abs() + 1),
    "extrema": lambda x, y: torch.maximum(x, y) - torch.minimum(x, y),
    "compare": lambda x, y: (x > y) | (x == x.round()),
    "broadcast": lambda x, y: x[:1] + y[:, :1],
    "transposed": lambda x, y: x.t() + y.t(),
    "a slice": lambda x, y: x[:, 3:36] * y[:, 3:36],
    "exp and log": lambda x, y: (x.exp() + 1).log(),
    "roots": lambda x, y: x.abs().sqrt() + (y.abs() + 1).rsqrt(),
    "gates": lambda x, y: torch.tanh(x) * torch.sigmoid(y),
    "relu": lambda x, y: x.relu() + f.gelu(y) + f.silu(x),
    "matmul": lambda x, y: x @ y.t(),
    "batches": lambda x, y: torch.bmm(x[None].expand(3, -1, -1), y.t()[None].expand(3, -1, -1)),
    "linear": lambda x, y: f.linear(x, y, y[:, 0].contiguous()),
    "sum": lambda x, y: x.sum(1) + y.sum(1),
    "sum of dims": lambda x, y: (x[None] * y).sum((0, 2), keepdim=True),
    "mean": lambda x, y: x.mean(0),
    "amax": lambda x, y: x.amax(1) + y.amax(1),
    "softmax": lambda x, y: x.softmax(1) + y.softmax(0),
    "layer norm": lambda x, y: f.layer_norm(x, (40,), y[0], y[1]),
    "a number": lambda x, y: x.sum() * 0.01,
    "gradients": lambda x, y: gradient(x, y),
}
TRAINED = "a model that trains"
SIZES = (7, 40)  # the last dim is no multiple of a stick


def gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().clone().requires_grad_()
    loss = (f.linear(leaf.tanh(), y).relu().softmax(-1) * x[:, :7].sigmoid()).sum()
    return torch.autograd.grad(loss, leaf)[0]


def trained(device: str) -> torch.Tensor:
    """Return the parameters of a small model after some steps."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.LayerNorm(24), nn.Linear(24, 5)).half()
    model, x = copy.deepcopy(start).to(device), torch.randn(9, 40).half().to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimiser.zero_grad()
        model(x).softmax(-1)[:, 0].sum().backward()
        optimiser.step()
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])


def main(project: str) -> None:
    sys.path.insert(0, project)
    package = importlib.import_module("torch_mine")
    package.autoload()
    torch.manual_seed(0)
    x, y = torch.randn(SIZES).half(), torch.randn(SIZES).half()
    equal = 0
    for name in (*PROBES, TRAINED):
        try:
            if name == TRAINED:
                ours, theirs = trained("mine"), trained("cpu")
            else:
                ours, theirs = PROBES[name](x.to("mine"), y.to("mine")).cpu(), PROBES[name](x, y)
            torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=5e-3)
            equal += 1
        except Exception as e:
            print(name, type(e).__name__, str(e).splitlines()[:3])
    native = sum(calls["native"] for calls in torch.mine.counters().values())
    fallback = {op: calls["fallback"] for op, calls in torch.mine.counters().items() if calls["fallback"]}
    print("fallback", fallback)
    print(equal, "of", len(PROBES) + 1, "equal,", native > 0)


if __name__ == "__main__":
    main(sys.argv[1])
