"""The points of the input, sorted by tile: a file for each segment of the input, and a mark of what is in it.

Each segment is sorted by itself, so that workers sort in parallel and memory does not grow with the input.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shiplap.plugin_api.files import write_whole
from shiplap_sparse3d.survey.cloud import open_cloud, read_chunks
from shiplap_sparse3d.survey.folder import POINT, SurveyFolder, read_mark, write_mark
from shiplap_sparse3d.survey.job import LARGEST, SortedSegment, SurveyJob


def check_sum(rows: np.ndarray[Any, Any]) -> int:
    """Return the sum, modulo 2**64, of the 64-bit words ``rows`` of points (``int64 [p, 3]`` or flat), which shows
    whether a disk has kept them.
    """
    return int(rows.sum(dtype=np.int64))  # wraps around


def sort_segment(job: SurveyJob, number: int) -> SortedSegment:
    """Read segment ``number`` of the input, sort its points by tile, write them and then their mark to the folder, and
    return the tiles and extent of the segment.

    Raises:
        SurveyError: SL822 if the input cannot be read.
    """
    first, count = job.segment_range(number)
    rows, tiles = np.empty(count, POINT), np.empty((count, 2), np.int64)
    low, high, done = np.full(3, LARGEST), np.full(3, -LARGEST), 0
    with open_cloud(job.source) as reader:
        for points in read_chunks(reader, job.source, first, first + count):
            part = rows[done : done + len(points)]
            part["index"] = np.arange(first + done, first + done + len(points))
            for axis, name in enumerate("XYZ"):
                part["raw"][:, axis] = points[name]
            for name in ("intensity", "return_number", "number_of_returns"):
                part[name] = points[name]
            cells = job.grid.cells(part["raw"])
            tiles[done : done + len(points)] = (cells[:, :2] - np.array(job.tiling.origin)) // job.tiling.size
            low, high, done = np.minimum(low, cells.min(0)), np.maximum(high, cells.max(0)), done + len(points)
    order = np.lexsort((tiles[:, 1], tiles[:, 0]))  # stable: points of a tile stay in the order of the file
    rows, tiles = rows[order], tiles[order]
    starts = np.concatenate([[0], np.flatnonzero(np.any(np.diff(tiles, axis=0), axis=1)) + 1])
    checks = np.add.reduceat(rows.view("<i8").reshape(-1, 3).sum(1), starts)
    counts = np.diff(starts, append=count)
    made = SortedSegment(np.column_stack([tiles[starts], counts, checks]), low.tolist(), high.tolist())
    write_whole(job.folder.points_path(number), rows.tobytes(), lasting=False)
    # The mark comes last, since it says that the points are complete.
    content = {"tiles": made.tiles.tolist(), "low": made.low, "high": made.high}
    write_mark(job.folder.sorted_mark_path(number), content, lasting=False)
    return made


def read_segment(folder: SurveyFolder, number: int, count: int) -> SortedSegment | None:
    """Return what the mark of segment ``number`` says, or None unless its points, ``count`` in all, are completely
    sorted.

    A mark of another form, as by another version or an editor, counts as none. What a disk has damaged in the points
    themselves is found when they are read.
    """
    mark, path = read_mark(folder.sorted_mark_path(number)) or {}, folder.points_path(number)
    try:
        tiles, low, high = ([*mark[name]] for name in ("tiles", "low", "high"))
        rows = np.array(tiles, dtype=object).reshape(-1, 4)
        # ``type``, since ``isinstance`` would accept the booleans of JSON.
        if not all(type(value) is int for value in (*rows.flat, *low, *high)) or (len(low), len(high)) != (3, 3):
            return None
        rows = rows.astype(np.int64)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    whole = (rows[:, 2] > 0).all() and rows[:, 2].sum() == count and (np.abs(rows[:, :2]) < LARGEST).all()
    return SortedSegment(rows, low, high) if whole and _size_of(path) == count * POINT.itemsize else None


def _size_of(path: Any) -> int:
    """Return the size of the file ``path`` in bytes, or -1 if it does not exist."""
    return path.stat().st_size if path.exists() else -1
