"""The scan: 110,000 real points, their ground labels, and the split by area. Provenance: ``data/README.md``."""

from __future__ import annotations

import io
from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor

__all__ = ["HELD_OUT", "Scan", "load", "split"]

HELD_OUT = 0.3  # the share of points with the largest x
_FOOT = 0.3048


@dataclass(frozen=True)
class Scan:
    """Points of one area.

    Attributes:
        xyz: ``float32 [p, 3]``, metres from the minimum of the whole scan.
        ground: ``bool [p]``, labels of the cloth simulation.
    """

    xyz: Tensor
    ground: Tensor

    def __len__(self) -> int:
        return self.xyz.shape[0]

    def take(self, rows: Tensor) -> Scan:
        """The points of ``rows`` (indices or a mask)."""
        return Scan(self.xyz[rows], self.ground[rows])


def load() -> Scan:
    """Read the packaged scan with laspy and lazrs."""
    import laspy
    import numpy as np

    folder = files("shiplap_sparse3d.demo") / "data"
    las = laspy.read(io.BytesIO((folder / "autzen_trim.laz").read_bytes()))
    metres = np.asarray(las.xyz) * _FOOT  # float64: survey coordinates do not fit into float32
    packed = np.load(io.BytesIO((folder / "autzen_ground_csf.npy").read_bytes()))
    ground = np.unpackbits(packed)[: len(metres)].astype(bool)
    return Scan(torch.from_numpy((metres - metres.min(0)).astype(np.float32)), torch.from_numpy(ground))


def split(scan: Scan) -> Tensor:
    """``bool [p]``: held out, the 30 % of points with the largest x. A straight cut: no tile lies on both sides."""
    x = scan.xyz[:, 0].double()
    return x >= torch.quantile(x, 1 - HELD_OUT)
