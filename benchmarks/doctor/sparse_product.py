"""pytorch #130687: a sparse matrix is made of indices and multiplied in the forward pass."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, rows, cols):
        super().__init__()
        self.size = (rows, cols)
        self.weight = nn.Linear(4, 4)

    def forward(self, rows, cols, values, x):
        matrix = torch.sparse_coo_tensor(torch.stack((rows, cols)), values, self.size)
        y = torch.sparse.mm(matrix, x)
        return self.weight(y).relu()


torch.manual_seed(0)
layer = torch.compile(Layer(5, 6), backend="eager")
for _ in range(2):
    layer(torch.randint(5, (7,)), torch.randint(6, (7,)), torch.randn(7), torch.randn(6, 4)).sum().backward()
