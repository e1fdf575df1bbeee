"""LAS, LAZ and COPC files, read in chunks, and written with new classes.

Every failure of a reader becomes SL822, and no point is lost silently.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from shiplap.plugin_api import error
from shiplap.plugin_api.files import open_new

if TYPE_CHECKING:
    import laspy
    import numpy as np


CHUNK = 1 << 16  # points in memory at a time
_LEGACY_CODES = 31  # five bits in point formats 0 to 5


@contextmanager
def open_cloud(path: Path) -> Iterator[laspy.LasReader]:
    """Open the LAS, LAZ or COPC file ``path`` as a context manager that yields its laspy reader, with the header read
    and checked, and closes the reader at the end of the block.

    Raises:
        SurveyError: SL822 for a file that is missing, empty, damaged or of another kind, and for one without points.
        CommandError: SL603 without laspy and lazrs.
    """
    require_packages(path)
    import laspy

    if path.exists() and not path.is_file():  # a FIFO would be waited for
        raise error("SL822", where=str(path), got="no regular file", expected="a LAS, LAZ or COPC file")
    try:
        reader = laspy.open(path)
    except OSError as failure:
        raise error("SL822", where=str(path), got=failure.strerror or failure, expected="a readable file") from None
    # laspy and lazrs have no common base class for errors of damaged files.
    except (laspy.LaspyException, ValueError, struct.error, RuntimeError) as failure:
        raise _unreadable_error(path, failure) from None
    with reader:
        if not reader.header.point_count:
            raise error("SL822", where=str(path), got="0 points", expected="at least one point")
        _check_scales(path, reader.header)
        if reader.header.are_points_compressed:
            _check_chunk_table(path, reader.header)
        yield reader


def _check_chunk_table(path: Path, header: laspy.LasHeader) -> None:
    """Raise SL822 for a LAZ file whose chunk table, the list of its compressed blocks, has more chunks than the bytes
    of the file can hold.

    lazrs reserves memory for the chunks of the table, and ends the process if there is not enough. lazrs reports other
    damage itself. Each chunk begins with a point that is not compressed.
    """
    size, first = path.stat().st_size, header.offset_to_point_data
    with path.open("rb") as file:
        table = _read_number(file, "<q", first, size)
        if table == -1:  # the writer could not go back: the place is in the last bytes
            table = _read_number(file, "<q", size - 8, size)
        count = None if table is None else _read_number(file, "<4xI", table, size)
    # Each chunk begins with a whole point, so the file's size limits the number of chunks.
    most = max(0, size - first) // header.point_format.size + 1
    if count is not None and count > most:
        raise error("SL822", where=str(path), got=f"a table of {count:,} chunks", expected=f"at most {most:,}")


def _read_number(file: IO[bytes], form: str, place: int, size: int) -> int | None:
    """Return the number in the ``struct`` format ``form`` at byte ``place`` of a file of ``size`` bytes, or None if it
    would lie outside of the file.
    """
    wide = struct.calcsize(form)
    if not 0 <= place <= size - wide:
        return None
    file.seek(place)
    return int(struct.unpack(form, file.read(wide))[0])


def _check_scales(path: Path, header: laspy.LasHeader) -> None:
    """Raise SL822 unless the scales and offsets of ``header`` are finite and no scale is 0: a scale of 0 puts all
    points in one place.
    """
    scales, offsets = [float(v) for v in header.scales], [float(v) for v in header.offsets]
    if not all(map(math.isfinite, scales + offsets)) or 0 in scales:
        got = f"scales {scales} and offsets {offsets}"
        raise error("SL822", where=str(path), got=got, expected="finite numbers, and no scale of 0")


def read_chunks(
    reader: laspy.LasReader, path: Path, start: int = 0, stop: int | None = None, size: int = CHUNK
) -> Iterator[laspy.ScaleAwarePointRecord]:
    """Yield the points of the file from number ``start`` up to ``stop`` (exclusive; by default all that follow), in
    records of at most ``size`` points, in the order of the file.

    Raises SL822 where the file ends too early.
    """
    total, done = reader.header.point_count, start
    stop = total if stop is None else stop
    if start:
        with _whole_file(path, start, total):
            reader.seek(start)
    while done < stop:
        with _whole_file(path, done, total):
            points = reader.read_points(min(size, stop - done))
        if not len(points):
            what, expected = "the point cloud is truncated", f"{total:,}, as its header says"
            raise error("SL822", where=str(path), what=what, got=f"{done:,} points", expected=expected)
        done += len(points)
        yield points


@contextmanager
def _whole_file(path: Path, done: int, total: int) -> Iterator[None]:
    """Run the block of a context manager, and turn any exception in it into SL822 for ``path``, which names the point
    at which reading failed: number ``done`` of ``total``.
    """
    try:
        yield
    except Exception as failure:  # lazrs, laspy and NumPy each have their own for a file that breaks off
        raise _unreadable_error(path, failure, f"from point {done:,} of {total:,} on: ") from None


def require_packages(path: Path) -> None:
    """Raise SL603 unless laspy and lazrs are installed. ``path`` is the point cloud that needs them, for the
    message.
    """
    missing = [name for name in ("laspy", "lazrs") if importlib.util.find_spec(name) is None]
    if missing:
        raise error(
            "SL603",
            where=str(path),
            got=f"no {', '.join(missing)}",
            expected="laspy, lazrs",
            fix='install them: pip install "shiplap-sparse3d[demo]"',
        )


def _unreadable_error(path: Path, failure: Exception, before: str = "") -> Exception:
    """Return the error SL822 for a point cloud that cannot be read: its message has ``before`` and then the text of
    ``failure``.
    """
    text = " ".join(str(failure).split())
    return error(
        "SL822",
        where=str(path),
        got=f"{before}{text or type(failure).__name__}",
        expected="a whole LAS, LAZ or COPC file",
    )


def check_codes(path: Path, classes: Iterable[int]) -> None:
    """Raise SL825 if the point format of the file ``path`` cannot hold the largest class code of ``classes``: formats 0
    to 5 hold codes up to 31.
    """
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


def write_cloud(source: Path, target: Path, codes: Iterable[np.ndarray[Any, Any]]) -> None:
    """Write the points of ``source`` to ``target``, with ``codes`` (arrays of class codes that follow each other in the
    order of the points) as their classes. Every other field is copied, and ``target`` appears whole or not at all.
    """
    import laspy

    # Renamed at the end, so that an interruption leaves no half file under the target's name.
    draft = target.with_name(f".{target.name}.part")
    with open_cloud(source) as reader, open_new(draft) as new:
        # A copy, so that the reader's own header keeps its VLRs.
        header, done, compress = copy.deepcopy(reader.header), 0, target.suffix.lower() == ".laz"
        # The octree of a COPC file describes the old order of points.
        header.vlrs[:] = [vlr for vlr in header.vlrs if vlr.user_id != "copc"]
        with laspy.open(new, mode="w", header=header, do_compress=compress, closefd=False) as writer:
            for part in codes:
                for points in read_chunks(reader, source, done, done + len(part)):
                    points["classification"] = part[: len(points)]
                    writer.write_points(points)
                    part, done = part[len(points) :], done + len(points)
            extra = [vlr for vlr in reader.evlrs or [] if vlr.user_id != "copc"]
            if extra:
                writer.write_evlrs(laspy.vlrs.vlrlist.VLRList(extra))
        new.flush()
        # On the disk before it is renamed: after a loss of power the target is never an empty file.
        os.fsync(new.fileno())
    draft.replace(target)
