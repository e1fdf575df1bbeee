"""Points, their ground labels, and the split by area."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["HELD_OUT", "Scan", "held_out_mask"]

HELD_OUT = 0.3  # the share of points with the largest x


@dataclass(frozen=True)
class Scan:
    """Points of one area.

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
        """Return the points selected by ``rows``, a tensor of indices or a boolean mask."""
        return Scan(self.xyz[rows], self.ground[rows])


def held_out_mask(scan: Scan) -> Tensor:
    """Return the mask ``bool [p]`` of the held-out points, which are the 30 % with the largest x. The cut is straight,
    so no tile lies on both sides.
    """
    x = scan.xyz[:, 0].double()
    return x >= torch.quantile(x, 1 - HELD_OUT)
