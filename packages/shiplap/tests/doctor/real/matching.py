"""Set prediction as in DETR, and neighbours of points: scipy's compiled kernels in the forward of a model."""

import torch
from scipy.optimize import linear_sum_assignment
from scipy.spatial import cKDTree

torch.manual_seed(0)


class Matcher(torch.nn.Module):
    def forward(self, predicted, wanted):
        cost = torch.cdist(predicted, wanted)
        rows, columns = linear_sum_assignment(cost.numpy())
        return (predicted[rows] - wanted[columns]).abs().mean()


class Neighbours(torch.nn.Module):
    def forward(self, points):
        tree = cKDTree(points.numpy())
        _, nearest = tree.query(points.numpy(), k=2)
        return points[torch.from_numpy(nearest[:, 1])] - points


with torch.no_grad():
    torch.compile(Matcher(), backend="eager")(torch.randn(5, 4), torch.randn(5, 4))
    torch.compile(Neighbours(), backend="eager")(torch.randn(20, 3))
