"""Scan, truth and prediction from above, as a PNG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from torch import Tensor

from shiplap.demo.scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["picture"]

_GROUND, _OTHER, _MISSED, _INVENTED = "#c8a165", "#4f7cac", "#111111", "#d62728"


def picture(scan: Scan, held_out: Tensor, predicted: Tensor) -> bytes:
    """PNG of three panels; everything right of the line is held out.

    Args:
        scan: all points.
        held_out: ``bool [p]``.
        predicted: ``bool [p]``, ground according to the network.
    """
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    truth = scan.ground
    figure = Figure(figsize=(10, 15), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True, sharey=True)
    _heights(axes[0], scan)
    axes[0].set_title("scan: height")
    _classes(axes[1], scan, [("ground", _GROUND, truth), ("other", _OTHER, ~truth)])
    axes[1].set_title("truth: cloth simulation, iterative")
    groups = [
        ("ground", _GROUND, predicted & truth), ("other", _OTHER, ~predicted & ~truth),
        ("missed ground", _MISSED, ~predicted & truth), ("invented ground", _INVENTED, predicted & ~truth),
    ]  # fmt: skip
    _classes(axes[2], scan, groups)
    axes[2].set_title("prediction: sparse U-Net, one pass")
    border = float(scan.xyz[held_out, 0].min())
    for ax in axes:
        ax.axvline(border, color="black", linewidth=1)
        ax.set_aspect("equal")
        ax.set_ylabel("y [m]")
    axes[2].set_xlabel("x [m]  (held out: right of the line)")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def _heights(ax: Axes, scan: Scan) -> None:
    """Colours span the terrain: with the tree tops in it, the river bank would not be seen."""
    xyz = scan.xyz[scan.xyz[:, 2].argsort()]
    low, high = (float(xyz[int(len(xyz) * q), 2]) for q in (0.01, 0.9))
    x, y, z = xyz.T.numpy()
    ax.scatter(x, y, c=z, s=0.4, vmin=low, vmax=high, cmap="viridis", linewidths=0)


def _classes(ax: Axes, scan: Scan, groups: list[tuple[str, str, Tensor]]) -> None:
    for name, colour, mask in groups:
        x, y, _ = scan.xyz[mask].T.numpy()
        ax.scatter(x, y, color=colour, s=0.4, linewidths=0, label=f"{name} ({len(x):,})")
    ax.legend(loc="upper right", markerscale=12, fontsize="small")
