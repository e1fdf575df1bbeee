"""A graph network with pooling (torch_geometric): masks and node counts that depend on values."""

import torch
from torch_geometric.nn import GCNConv, TopKPooling, global_mean_pool

torch.manual_seed(0)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.pool, self.second = GCNConv(8, 8), TopKPooling(8), GCNConv(8, 4)

    def forward(self, x, edges, batch):
        x = self.first(x, edges).relu()
        x, edges, _, batch, _, _ = self.pool(x, edges, None, batch)
        return global_mean_pool(self.second(x, edges), batch)


with torch.no_grad():
    x, edges, batch = torch.randn(10, 8), torch.randint(0, 10, (2, 30)), torch.zeros(10, dtype=torch.long)
    torch.compile(Network(), backend="eager")(x, edges, batch)
