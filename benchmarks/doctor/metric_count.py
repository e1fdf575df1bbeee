"""torchmetrics: a metric counts its updates and forgets the value that it computed."""

import torch
from torch import nn


class Metric(nn.Module):
    def __init__(self):
        super().__init__()
        self._update_count = 0
        self._computed = None
        self.total = torch.zeros(())

    def forward(self, x, y):
        self._computed = None
        self._update_count += 1
        batch = (x - y).abs().mean()
        self.total = self.total + batch
        return batch

    def compute(self):
        if self._computed is None:
            self._computed = self.total / self._update_count
        return self._computed


torch.manual_seed(0)
metric = Metric()
update = torch.compile(metric, backend="eager")
for _ in range(5):
    update(torch.randn(4), torch.randn(4))
print(round(float(metric.compute()), 4))
