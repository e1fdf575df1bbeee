"""pytorch_geometric #8418: training and evaluation without gradients alternate."""

import torch
from torch import nn


class Gcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, adj):
        x = self.dropout((adj @ self.first(x)).relu())
        return adj @ self.second(x)


torch.manual_seed(0)
gcn = Gcn()
run = torch.compile(gcn, backend="eager")
x, adj = torch.randn(5, 6), torch.rand(5, 5)
for _ in range(3):
    gcn.train()
    run(x, adj).sum().backward()
    gcn.eval()
    with torch.no_grad():
        run(x, adj)
