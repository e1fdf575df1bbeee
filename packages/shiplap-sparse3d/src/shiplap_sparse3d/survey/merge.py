"""The results of the tiles, put back into the order of the input, and the output file."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shiplap.plugin_api import error
from shiplap.plugin_api.files import open_new
from shiplap_sparse3d.survey.cloud import open_cloud, read_chunks
from shiplap_sparse3d.survey.folder import SurveyFolder, Tile

if TYPE_CHECKING:
    import laspy

__all__ = ["check_codes", "gather_classes", "write_cloud"]

_WINDOW = 1 << 20  # points whose classes are in memory at a time
_LEGACY_CODES = 31  # five bits in point formats 0 to 5


def check_codes(path: Path, classes: Iterable[int]) -> None:
    """Raise SL825 if the point format of ``path`` cannot hold one of ``classes``."""
    with open_cloud(path) as reader:
        number = reader.header.point_format.id
    largest = max(classes)
    if number <= 5 and largest > _LEGACY_CODES:
        raise error(
            "SL825",
            where=f"the classes of the model and {path}",
            got=f"class {largest} for point format {number}",
            expected=f"at most {_LEGACY_CODES}, or an input of point format 6 or above",
        )


def gather_classes(folder: SurveyFolder, tiles: list[Tile], total: int, progress: Callable[[int, int], None]) -> None:
    """Write ``classes.bin``. Raises SL824 unless each of ``total`` points has one class."""
    seen = 0
    with folder.classes.open("wb") as file:
        file.truncate(total)
    with folder.classes.open("r+b", buffering=0) as file:
        for done, tile in enumerate(tiles):
            rows = folder.read_result(tile, total)
            _scatter_codes(file.fileno(), rows["index"], rows["code"])
            seen += len(rows)
            progress(done + 1, len(tiles))
    if seen != total:
        raise error("SL824", where=str(folder.path), got=f"{seen:,} classes", expected=f"{total:,}, one for each point")


def _scatter_codes(file: int, index: np.ndarray[Any, Any], code: np.ndarray[Any, Any]) -> None:
    """Write codes at an ascending ``index``, one window of the file at a time."""
    # Neighbouring points are written with one system call, and memory stays small.
    for part in np.split(np.arange(len(index)), np.flatnonzero(np.diff(index // _WINDOW)) + 1):
        if len(part):
            first, last = int(index[part[0]]), int(index[part[-1]])
            window = np.frombuffer(os.pread(file, last - first + 1, first), np.uint8).copy()
            window[index[part] - first] = code[part]
            os.pwrite(file, window.tobytes(), first)


def write_cloud(
    folder: SurveyFolder, source: Path, target: Path, chunk: int, progress: Callable[[int, int], None]
) -> None:
    """Write ``source`` with the new classes as ``target``, whole or not at all. Every other field is copied."""
    import laspy

    # Renamed at the end, so that an interruption leaves no half file under the target's name.
    draft = target.with_name(f".{target.name}.part")
    with open_cloud(source) as reader, folder.classes.open("rb") as classes, open_new(draft) as new:
        header, done, compress = _plain_header(reader), 0, target.suffix.lower() == ".laz"
        with laspy.open(new, mode="w", header=header, do_compress=compress, closefd=False) as writer:
            for points in read_chunks(reader, source, size=chunk):
                points["classification"] = np.fromfile(classes, np.uint8, len(points))
                writer.write_points(points)
                done += len(points)
                progress(done, reader.header.point_count)
            # The octree of a COPC file describes the old order of points.
            extra = [vlr for vlr in reader.evlrs or [] if vlr.user_id != "copc"]
            if extra:
                writer.write_evlrs(laspy.vlrs.vlrlist.VLRList(extra))
        new.flush()
        os.fsync(new.fileno())
    draft.replace(target)


def _plain_header(reader: laspy.LasReader) -> Any:
    """Return the input's header without the octree: the output's points are in plain order."""
    header = copy.deepcopy(reader.header)
    header.vlrs[:] = [vlr for vlr in header.vlrs if vlr.user_id != "copc"]
    return header
