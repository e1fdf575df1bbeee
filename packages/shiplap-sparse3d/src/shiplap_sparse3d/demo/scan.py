"""Points, their ground labels, and the split by area."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["HELD_OUT", "Scan", "held_out_mask"]

HELD_OUT = 0.3  # the share of points with the largest x


@dataclass(frozen=True)
class Scan:
    """The points of one area with their ground labels.

    Attributes:
        xyz: ``float32 [p, 3]``, metres from the minimum of the whole scan.
        ground: ``bool [p]``, whether the survey calls the point ground.
    """

    xyz: Tensor
    ground: Tensor

    def __len__(self) -> int:
        """Return the number of points."""
        return self.xyz.shape[0]

    def take(self, rows: Tensor) -> Scan:
        """Return a new scan with the points selected by ``rows``, a tensor of indices or a boolean mask."""
        return Scan(self.xyz[rows], self.ground[rows])


def held_out_mask(scan: Scan) -> Tensor:
    """Return the mask ``bool [p]`` of the held-out points, which are the 30 % with the largest x. The boundary is a
    straight line, so that no tile of the training area contains a held-out point.
    """
    x = scan.xyz[:, 0].double()
    return x >= torch.quantile(x, 1 - HELD_OUT)
