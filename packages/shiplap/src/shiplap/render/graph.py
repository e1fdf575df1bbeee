"""A small graph as inline SVG: boxes in layers, with a box below the boxes that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shiplap.render.html import render_html

WIDTH, HEIGHT, GAP, RISE = 168, 44, 18, 40  # of a box, and between boxes, in px


@dataclass(frozen=True)
class GraphBox:
    """A node of a graph, drawn as a box. It holds the node's unique name, two lines of text to show, the names of the
    nodes that it reads, and whether it is highlighted.
    """

    name: str
    title: str
    detail: str
    reads: tuple[str, ...]
    marked: bool


def graph_svg(boxes: Sequence[GraphBox]) -> str:
    """Return an ``<svg>`` element, as a string, that draws ``boxes`` in layers with lines to the boxes that they read.
    Each box must come after those that it reads. Names that no box has are ignored. Texts of boxes are escaped.
    """
    layers: dict[str, int] = {}
    for box in boxes:
        # The longest path from an input decides the layer, so that every edge points downwards.
        layers[box.name] = 1 + max((layers[r] for r in box.reads if r in layers), default=-1)
    rows: dict[int, list[str]] = {}
    for name, layer in layers.items():
        rows.setdefault(layer, []).append(name)
    widest = max((len(r) for r in rows.values()), default=0)
    # Every layer is centred within the width of the widest one.
    full = widest * (WIDTH + GAP)
    at = {
        name: (round((full - len(row) * (WIDTH + GAP)) / 2) + i * (WIDTH + GAP) + GAP // 2, layer * (HEIGHT + RISE) + 4)
        for layer, row in rows.items()
        for i, name in enumerate(row)
    }
    edges = [(at[r], at[b.name]) for b in boxes for r in b.reads if r in at]
    return render_html(
        "graph.svg.jinja",
        boxes=[(b, *at[b.name]) for b in boxes],
        edges=edges,
        width=full,
        w=WIDTH,
        h=HEIGHT,
        height=len(rows) * (HEIGHT + RISE),
        rise=RISE,
    )
