"""A picture of scan, truth and prediction from above, as a PNG."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from torch import Tensor

from shiplap_sparse3d.demo.scan import Scan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_picture"]

_GROUND, _OTHER, _MISSED, _INVENTED = "#c8a165", "#4f7cac", "#111111", "#d62728"
_WIDTH, _LEFT, _RIGHT, _BETWEEN, _TITLE, _FOOT = 10.0, 0.72, 0.12, 0.2, 0.36, 0.56  # inches
_DPI = 100
_MARGIN = 6.0  # metres around the scan
_SQUARE = 0.85  # from this ratio of depth to width on, the panels stand in a row


def draw_picture(scan: Scan, held_out: Tensor, predicted: Tensor, labels: str) -> bytes:
    """Return a picture of the scan from above as a PNG, 1,000 pixels wide. Its three panels show the heights, the true
    classes and the predicted ones, with a line to the left of the held-out points.

    Args:
        scan: all points.
        held_out: ``bool [p]``.
        predicted: ``bool [p]``, ground according to the network.
        labels: where the truth comes from.
    """
    from matplotlib.figure import Figure  # without pyplot: no global state, no display

    truth = scan.ground
    figure = Figure()
    height, right, prediction = _place_panels(figure, scan)
    _draw_heights(height, scan)
    height.set_title("scan, coloured by height", fontsize=11)
    _draw_classes(right, scan, [("ground", _GROUND, truth), ("other", _OTHER, ~truth)], 0.35)
    right.set_title(f"truth: {labels}", fontsize=11)
    groups = [
        ("ground", _GROUND, predicted & truth),
        ("other", _OTHER, ~predicted & ~truth),
        ("missed ground", _MISSED, ~predicted & truth),
        ("invented ground", _INVENTED, predicted & ~truth),
    ]
    _draw_classes(prediction, scan, groups, 1.0)
    prediction.set_title("prediction: sparse U-Net, one pass", fontsize=11)
    border = float(scan.xyz[held_out, 0].min())
    for ax in (height, right, prediction):
        ax.axvline(border, color="black", linewidth=1)
    _name_sides(prediction, border)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def _place_panels(figure: Figure, scan: Scan) -> tuple[Axes, Axes, Axes]:
    """Add three panels to ``figure``, set its size, and return the panels for heights, truth and prediction as
    matplotlib's ``Axes``. The first two are small and stand above the third, which is wide. For a scan that is about as
    deep as wide, the three stand in a row.

    The positions of the panels are computed here. A metre is as long in y as in x, so the sizes are known. The layouts
    of matplotlib cut labels off at a fixed aspect.
    """
    low, high = scan.xyz[:, :2].amin(0) - _MARGIN, scan.xyz[:, :2].amax(0) + _MARGIN
    # Height over width of the scan decides between the two layouts.
    ratio = float((high - low)[1] / (high - low)[0])
    wide = _WIDTH - _LEFT - _RIGHT
    if ratio < _SQUARE:
        small = (wide - _BETWEEN) / 2
        top = _FOOT + wide * ratio + _TITLE + 0.3
        height = top + small * ratio + _TITLE
        places = [(_LEFT, top, small), (_LEFT + small + _BETWEEN, top, small), (_LEFT, _FOOT, wide)]
    else:
        small = (wide - 2 * _BETWEEN) / 3
        height = _FOOT + small * ratio + _TITLE
        places = [(_LEFT + i * (small + _BETWEEN), _FOOT, small) for i in range(3)]
    figure.set_size_inches(_WIDTH, height)
    panels = [figure.add_axes((x / _WIDTH, y / height, w / _WIDTH, w * ratio / height)) for x, y, w in places]
    for ax in panels:
        ax.set(xlim=(float(low[0]), float(high[0])), ylim=(float(low[1]), float(high[1])), aspect="equal")
        ax.tick_params(labelsize="small")
    panels[0].set_ylabel("y [m]")
    panels[1].tick_params(labelleft=False)
    panels[2].set_xlabel("x [m]")
    panels[2].tick_params(labelleft=ratio < _SQUARE)
    if ratio < _SQUARE:
        panels[2].set_ylabel("y [m]")
    return panels[0], panels[1], panels[2]


def _draw_heights(ax: Axes, scan: Scan) -> None:
    """Draw the points of ``scan`` from above into ``ax``, coloured by height, with a colour bar. Colours span the lower
    90 % of the heights. If they spanned the tops of trees as well, walls and slopes would not be visible.
    """
    # Higher points are drawn later, on top of lower ones, as seen from above.
    xyz = scan.xyz[scan.xyz[:, 2].argsort()]
    low, high = (float(xyz[int(len(xyz) * q), 2]) for q in (0.01, 0.9))
    x, y, z = xyz.T.numpy()
    dots = ax.scatter(x, y, c=z, s=0.35, vmin=low, vmax=high, cmap="viridis", linewidths=0)
    bar = ax.inset_axes((0.66, 0.92, 0.31, 0.03))
    ax.figure.colorbar(dots, cax=bar, orientation="horizontal", extend="max", format="{x:.0f} m")
    bar.tick_params(labelsize="x-small")


def _draw_classes(ax: Axes, scan: Scan, groups: list[tuple[str, str, Tensor]], size: float) -> None:
    """Draw the points of each of ``groups`` (name, colour, mask of points) into ``ax`` in the group's colour, with dots
    of area ``size``. Add a legend with the number of points of each group.
    """
    for name, colour, mask in groups:
        x, y, _ = scan.xyz[mask].T.numpy()
        ax.scatter(x, y, color=colour, s=size, linewidths=0, label=f"{name} ({len(x):,})")
    legend = ax.legend(loc="upper right", ncols=2, fontsize=6.5, columnspacing=1, handletextpad=0.2)
    for handle in legend.legend_handles:
        # The dots of the plot are too small for a legend.
        handle.set_sizes([24.0])  # type: ignore[union-attr]


def _name_sides(ax: Axes, border: float) -> None:
    """Write "trained on" to the left and "held out" to the right of the vertical line at x = ``border`` in ``ax``."""
    for text, side, shift in (("trained on", "right", -6), ("held out", "left", 6)):
        arrow = f"← {text}" if side == "right" else f"{text} →"
        ax.annotate(
            arrow,
            (border, 0.03),
            xycoords=("data", "axes fraction"),
            xytext=(shift, 0),
            textcoords="offset points",
            ha=side,
            fontsize="small",
            fontweight="bold",
            bbox={"facecolor": "white", "alpha": 0.85, "linewidth": 0},
        )
