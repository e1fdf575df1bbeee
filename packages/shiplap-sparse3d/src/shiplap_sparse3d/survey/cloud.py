"""LAS, LAZ and COPC files, read in chunks, and written with new classes.

Every failure of a reader becomes SL822, and no point is lost silently.
"""

from __future__ import annotations

import copy
import math
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shiplap.plugin_api.files import open_new
from shiplap_sparse3d.errors import require_packages, survey_error

if TYPE_CHECKING:
    import laspy


CHUNK = 1 << 16  # points in memory at a time


@contextmanager
def open_cloud(path: Path) -> Iterator[laspy.LasReader]:
    """Open the LAS, LAZ or COPC file ``path`` as a context manager that yields its laspy reader. The header is read and
    checked first. The end of the block closes the reader.

    Raises:
        SurveyError: ``SL822`` for a file that is missing, empty, damaged or of another kind, or without points.
        CommandError: ``SL603`` without laspy and lazrs.
    """
    require_packages(path, "demo", "laspy", "lazrs")
    import laspy

    if path.exists() and not path.is_file():  # a FIFO would be waited for
        raise survey_error("SL822", path, "no regular file", "a LAS, LAZ or COPC file")
    with _reading(path):
        reader = laspy.open(path)
    with reader:
        _check_header(path, reader.header)
        yield reader


@contextmanager
def _reading(path: Path, before: str = "") -> Iterator[None]:
    """Run the block of a context manager, and replace any exception in it by ``SL822`` for ``path``. The message has
    ``before`` and then the text of the exception.
    """
    try:
        yield
    except Exception as failure:  # lazrs, laspy and NumPy each have their own for a file that breaks off
        text = getattr(failure, "strerror", None) or " ".join(str(failure).split()) or type(failure).__name__
        raise survey_error("SL822", path, before + text, "a whole LAS, LAZ or COPC file") from None


def _check_header(path: Path, header: laspy.LasHeader) -> None:
    """Raise ``SL822`` for a file without points, for scales or offsets that are not finite, and for a scale of 0. Raise
    it also for a LAZ file with more chunks than its size allows.

    A scale of 0 puts all points in one place. lazrs reserves memory for all chunks, and ends the process if there is
    not enough. It reports other damage itself.
    """
    numbers = [float(v) for v in (*header.scales, *header.offsets)]
    if not header.point_count:
        raise survey_error("SL822", path, "0 points", "at least one point")
    if not all(map(math.isfinite, numbers)) or 0 in numbers[:3]:
        raise survey_error("SL822", path, f"scales and offsets {numbers}", "finite numbers, and no scale of 0")
    if not header.are_points_compressed:
        return
    with _reading(path):  # struct's error for a place outside of the file
        content, first = cast(Any, np.memmap(path, "u1", "r")), header.offset_to_point_data
        (table,) = struct.unpack_from("<q", content, first)
        # -1 if the writer could not go back: the place is in the last bytes.
        (count,) = struct.unpack_from("<4xI", content, *struct.unpack("<q", content[-8:]) if table == -1 else (table,))
    # Each chunk begins with a whole point, so the file's size limits the number of chunks.
    if count > (most := max(0, len(content) - first) // header.point_format.size + 1):
        raise survey_error("SL822", path, f"a table of {count:,} chunks", f"at most {most:,}")


def read_chunks(
    reader: laspy.LasReader, path: Path, start: int = 0, stop: int | None = None
) -> Iterator[laspy.ScaleAwarePointRecord]:
    """Yield the points of the file from number ``start`` up to, and without, ``stop``, in the order of the file. Each
    yielded record has at most 65,536 points. If ``stop`` is None, all following points are yielded. Raise ``SL822``
    if the file ends too early. ``path`` names it in the error.
    """
    total, done = reader.header.point_count, start
    stop = total if stop is None else stop
    while done < stop:
        with _reading(path, f"from point {done:,} of {total:,} on: "):
            if done == start and start:
                reader.seek(start)
            points = reader.read_points(min(CHUNK, stop - done))
        if not len(points):
            expected, what = f"{total:,}, as its header says", "the point cloud is truncated"
            raise survey_error("SL822", path, f"{done:,} points", expected, what=what)
        done += len(points)
        yield points


def check_codes(path: Path, header: laspy.LasHeader, classes: Iterable[int]) -> None:
    """Raise ``SL825`` if the point format in the header of the file ``path`` cannot hold the largest code of
    ``classes``. Formats 0 to 5 hold codes up to 31.
    """
    number, largest = header.point_format.id, max(classes)
    if number <= 5 and largest > 31:  # five bits
        where, got = f"the classes of the model and {path}", f"class {largest} for point format {number}"
        raise survey_error("SL825", where, got, "at most 31, or an input of point format 6 or above")


def write_cloud(source: Path, target: Path, codes: Iterable[np.ndarray[Any, Any]]) -> None:
    """Write the points of ``source`` to ``target`` with new classes. ``codes`` yields arrays of class codes, which
    follow each other in the order of the points. All other fields are copied. The file ``target`` appears when it is
    complete, and an interrupted call leaves its former content.
    """
    import laspy

    # Renamed at the end, so that an interruption leaves no half file under the target's name.
    draft = target.with_name(f".{target.name}.part")
    with open_cloud(source) as reader, open_new(draft) as new:
        header, done, compress = copy.deepcopy(reader.header), 0, target.suffix.lower() == ".laz"
        # The octree of a COPC file describes the old order of points.
        header.vlrs[:] = [vlr for vlr in header.vlrs if vlr.user_id != "copc"]
        with laspy.open(new, mode="w", header=header, do_compress=compress, closefd=False) as writer:
            for part in codes:
                for points in read_chunks(reader, source, done, done + len(part)):
                    points["classification"] = part[: len(points)]
                    writer.write_points(points)
                    part, done = part[len(points) :], done + len(points)
            if extra := [vlr for vlr in reader.evlrs or [] if vlr.user_id != "copc"]:
                writer.write_evlrs(laspy.vlrs.vlrlist.VLRList(extra))
        new.flush()
        os.fsync(new.fileno())
    draft.replace(target)
