"""Overlaps of boxes and non-maximum suppression on arrays, as ``spconv.utils`` has them.

``box_corners`` are ``[n, 4, 2]``, corners in order around the box; ``standup_iou`` is the overlap of the upright boxes
around them, and pairs at or below its threshold are not looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "non_max_suppression",
    "non_max_suppression_cpu",
    "rbbox_intersection",
    "rbbox_iou",
    "rbbox_iou_loss",
    "rotate_non_max_suppression_cpu",
]

Array = np.ndarray[Any, Any]


def _polygon_area(corners: Array) -> float:
    """Return the area of the polygon with ``corners [n, 2]``. It is positive if the corners go counterclockwise, and
    negative if they go clockwise.
    """
    x, y = corners[:, 0], corners[:, 1]
    return float((x * np.roll(y, -1) - np.roll(x, -1) * y).sum() / 2)


def _clip_polygon(subject: Array, start: Array, end: Array) -> Array:
    """Return the corners ``[m, 2]`` of the part of the convex polygon ``subject [n, 2]`` that lies to the left of the
    line from ``start`` to ``end``. ``m`` is 0 if no part lies there.
    """
    edge = end - start
    # The sign of the cross product tells the side of the line.
    side = edge[0] * (subject[:, 1] - start[1]) - edge[1] * (subject[:, 0] - start[0])
    kept = []
    for i in range(len(subject)):
        j = (i + 1) % len(subject)
        if side[i] >= 0:
            kept.append(subject[i])
        if (side[i] > 0 > side[j]) or (side[i] < 0 < side[j]):
            kept.append(subject[i] + (subject[j] - subject[i]) * (side[i] / (side[i] - side[j])))
    return np.array(kept).reshape(-1, 2)


def _polygon_overlap(a: Array, b: Array) -> tuple[float, float]:
    """Return the area that two convex polygons with corners ``[n, 2]`` share, and the area of their union."""
    a, b = (p.astype(np.float64) for p in (a, b))
    # Clipping keeps the left side of each edge, so corners have to go counterclockwise.
    a, b = (p if _polygon_area(p) >= 0 else p[::-1] for p in (a, b))
    # Sutherland and Hodgman: one polygon is clipped at each edge of the other.
    shared = a
    for i in range(len(b)):
        shared = _clip_polygon(shared, b[i], b[(i + 1) % len(b)])
        if len(shared) < 3:
            return 0.0, _polygon_area(a) + _polygon_area(b)
    area = max(0.0, _polygon_area(shared))
    return area, _polygon_area(a) + _polygon_area(b) - area


def _box_pairs(boxes: Array, others: Array, standup_iou: Array, threshold: float, ratio: bool) -> Array:
    """Return the overlaps ``[n, k]`` of ``boxes [n, 4, 2]`` with ``others [k, 4, 2]``, both given by their corners. If
    ``ratio`` is true, an overlap is the intersection over union, and otherwise the shared area.

    Pairs whose ``standup_iou [n, k]`` is not above ``threshold`` get 0.
    """
    overlaps = np.zeros((len(boxes), len(others)), boxes.dtype)
    for i, j in np.argwhere(standup_iou > threshold):
        shared, union = _polygon_overlap(boxes[i], others[j])
        overlaps[i, j] = shared / union if ratio and union > 0 else (0.0 if ratio else shared)
    return overlaps


def rbbox_iou(box_corners: Array, qbox_corners: Array, standup_iou: Array, standup_thresh: float) -> Array:
    """Return the intersection over union of rotated boxes, ``[n, k]``, which are given by their corners ``[n, 4, 2]``
    and ``[k, 4, 2]``.

    ``standup_iou [n, k]`` is that of the upright boxes around them. Pairs whose ``standup_iou`` is not above
    ``standup_thresh`` get 0.
    """
    return _box_pairs(box_corners, qbox_corners, standup_iou, standup_thresh, True)


def rbbox_intersection(box_corners: Array, qbox_corners: Array, standup_iou: Array, standup_thresh: float) -> Array:
    """Return the area that rotated boxes share, ``[n, k]``. The boxes are given by their corners ``[n, 4, 2]`` and
    ``[k, 4, 2]``.

    ``standup_iou [n, k]`` is the intersection over union of the upright boxes around them. Pairs whose ``standup_iou``
    is not above ``standup_thresh`` get 0.
    """
    return _box_pairs(box_corners, qbox_corners, standup_iou, standup_thresh, False)


def rbbox_iou_loss(box_corners: Array, qbox_corners: Array) -> Array:
    """Return the intersection over union of each box of ``box_corners [n, 4, 2]`` and the box of ``qbox_corners [n, 4,
    2]`` in the same row, ``[n]``. It is an array, without gradients.
    """
    pairs = [_polygon_overlap(a, b) for a, b in zip(box_corners, qbox_corners, strict=True)]
    return np.array([shared / union if union > 0 else 0.0 for shared, union in pairs], box_corners.dtype)


def non_max_suppression_cpu(boxes: Array, order: Array, thresh: float, eps: float = 0.0) -> list[int]:
    """Return the row numbers of the boxes that non-maximum suppression keeps. ``boxes [n, 4]`` (x1, y1, x2, y2) are
    axis-aligned.

    The boxes are considered in ``order``, an array of row numbers. A box is dropped if its intersection over union with
    a kept one is ``thresh`` or more. ``eps`` is added to the lengths of all sides.
    """
    x1, y1, x2, y2 = boxes[:, :4].astype(np.float64).T
    areas, left, kept = (x2 - x1 + eps) * (y2 - y1 + eps), list(order), []
    while left:
        i, rest = left[0], np.array(left[1:], np.int64)
        kept.append(int(i))
        width = np.minimum(x2[i], x2[rest]) - np.maximum(x1[i], x1[rest]) + eps
        height = np.minimum(y2[i], y2[rest]) - np.maximum(y1[i], y1[rest]) + eps
        shared = np.maximum(0, width) * np.maximum(0, height)
        left = list(rest[shared / (areas[i] + areas[rest] - shared) < thresh])
    return kept


def rotate_non_max_suppression_cpu(corners: Array, order: Array, standup_iou: Array, thresh: float) -> list[int]:
    """Return the row numbers of the rotated boxes that non-maximum suppression keeps. ``corners [n, 4, 2]`` are their
    corners.

    The boxes are considered in ``order``, an array of row numbers. A box is dropped if its intersection over union with
    a kept one is ``thresh`` or more. Pairs whose ``standup_iou [n, n]`` is 0 are not compared.
    """
    gone, kept = np.zeros(len(corners), bool), []
    for place, i in enumerate(order):
        if gone[i]:
            continue
        kept.append(int(i))
        for j in order[place + 1 :]:
            if not gone[j] and standup_iou[i, j] > 0:
                shared, union = _polygon_overlap(corners[i], corners[j])
                gone[j] = union > 0 and shared / union >= thresh
    return kept


def non_max_suppression(boxes: Array, keep_out: Array, thresh: float, device_id: int = 0) -> int:
    """Write the row numbers of the boxes that non-maximum suppression keeps into ``keep_out``, and return how many they
    are.

    ``boxes [n, 5]`` (x1, y1, x2, y2, score) are sorted by descending score. A box is dropped if its intersection over
    union with a kept one is ``thresh`` or more. As in spconv 1.x, a box includes the pixels of both borders. The
    computation runs on the CPU, and ``device_id`` is not read.
    """
    # spconv 1.x counts pixels: a box includes both of its borders.
    kept = non_max_suppression_cpu(boxes, np.arange(len(boxes)), thresh, 1.0)
    keep_out[: len(kept)] = kept
    return len(kept)
