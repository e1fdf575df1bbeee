"""The network: a sparse U-Net on voxels, and a head with one output for each point."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from shiplap_sparse3d import SparseConv3d, SparseInverseConv3d, SparseTensor, SubMConv3d
from shiplap_sparse3d.demo.tiles import POINT_FEATURES, VOXEL_FEATURES

__all__ = ["GroundNet"]


class ConvNormLayer(nn.Module):
    """A sparse convolution, followed by a norm and a ReLU.

    The norm is a layer norm over the channels of each voxel. Statistics over all voxels of a tile would be dominated by
    its trees. They lowered the intersection over union in validation by 0.17 (0003-demo.md). The norm has no scale and
    shift, so its backward has no reduction over voxels. Fewer kernels are therefore compiled, and none depends on the
    number of voxels.
    """

    def __init__(self, conv: SubMConv3d | SparseConv3d | SparseInverseConv3d) -> None:
        """Set the layers, which are the sparse convolution ``conv`` and a layer norm without weights. The weights of
        ``conv`` are drawn from a normal distribution.
        """
        super().__init__()
        self.conv, self.norm = conv, nn.LayerNorm(conv.out_channels, elementwise_affine=False)
        # A norm follows, so the scale is free: it only sets how fast Adam turns the weights (validated).
        nn.init.normal_(conv.weight, std=2 / math.sqrt(conv.weight[0].numel()))

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return ``relu(norm(conv(x)))`` as a sparse tensor on the output voxels of ``conv``."""
        x = self.conv(x)
        return x.replace(torch.relu(self.norm(x.feats)))


class GroundNet(nn.Module):
    """A network that computes a logit of being ground for each point.

    Args:
        channels: the width of every level. With one width the layers share their compiled kernels.
        levels: the number of grids, each half as fine as the one before.

    Shape: voxels ``[n, VOXEL_FEATURES]``, points ``[p, POINT_FEATURES]``, inverse ``int64 [p]`` -> ``[p]``.
    """

    def __init__(self, channels: int, levels: int) -> None:
        """Build a U-Net of ``levels`` grids, each half as fine as the one before, with ``channels`` features per voxel
        in all of them. Build the head for single points.
        """
        super().__init__()
        c, steps = channels, range(levels - 1)
        self.of_features = nn.Linear(VOXEL_FEATURES, c, bias=False)
        self.stem = ConvNormLayer(SubMConv3d(c, c, 3, bias=False))
        self.encoder = nn.ModuleList(ConvNormLayer(SubMConv3d(c, c, 3, bias=False)) for _ in range(levels))
        self.down = nn.ModuleList(ConvNormLayer(SparseConv3d(c, c, 2, stride=2, bias=False)) for _ in steps)
        self.up = nn.ModuleList(ConvNormLayer(SparseInverseConv3d(c, c, 2, bias=False)) for _ in steps)
        self.decoder = nn.ModuleList(ConvNormLayer(SubMConv3d(c, c, 3, bias=False)) for _ in steps)
        self.of_voxel = nn.Linear(c, 2 * c, bias=False)
        self.of_point = nn.Linear(POINT_FEATURES, 2 * c, bias=False)  # its last feature is 1
        self.head = nn.ModuleList(nn.Linear(2 * c, 2 * c, bias=False) for _ in range(2))
        self.logit = nn.Linear(2 * c, 1, bias=False)

    def forward(self, voxels: SparseTensor, points: Tensor, inverse: Tensor) -> Tensor:
        """Return a logit of being ground for each point, ``[p]``. It is computed from the point's own features
        ``points`` and from the features that the U-Net computes for its voxel. ``inverse`` holds the row of each
        point's voxel.
        """
        x, skips = self.encoder[0](self.stem(voxels.replace(self.of_features(voxels.feats)))), []
        for down, encode in zip(self.down, self.encoder[1:], strict=True):
            skips.append(x)
            x = encode(down(x))
        for up, decode in zip(self.up, self.decoder, strict=True):
            x = up(x)
            # The inverse convolution leads to the voxels of the skip connection, row by row.
            x = decode(x.replace(x.feats + skips.pop().feats))
        # Each point sees its voxel and its own features, so points in one voxel may differ.
        hidden = torch.relu(self.of_voxel(x.feats)[inverse] + self.of_point(points))
        first, second = self.head
        hidden = torch.relu(first(hidden))
        hidden = hidden + torch.relu(second(hidden))
        return self.logit(hidden).squeeze(1)
