"""The reader of LAS, LAZ and COPC files, in chunks. Every failure becomes SL822, and no point is lost silently."""

from __future__ import annotations

import importlib.util
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from shiplap.plugin_api import error

if TYPE_CHECKING:
    import laspy

__all__ = ["CHUNK", "open_cloud", "read_chunks", "require_packages"]

CHUNK = 1 << 16  # points in memory at a time


@contextmanager
def open_cloud(path: Path) -> Iterator[laspy.LasReader]:
    """Yield a reader of ``path`` whose header has been read.

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
    """Raise SL822 for a LAZ file whose chunk table has more chunks than its bytes can hold.

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
    """Return the number at ``place`` of a file of ``size`` bytes, or None beyond the file."""
    wide = struct.calcsize(form)
    if not 0 <= place <= size - wide:
        return None
    file.seek(place)
    return int(struct.unpack(form, file.read(wide))[0])


def _check_scales(path: Path, header: laspy.LasHeader) -> None:
    """Raise SL822 for scales and offsets without valid coordinates: a scale of 0 puts all points in one place."""
    scales, offsets = [float(v) for v in header.scales], [float(v) for v in header.offsets]
    if not all(map(math.isfinite, scales + offsets)) or 0 in scales:
        got = f"scales {scales} and offsets {offsets}"
        raise error("SL822", where=str(path), got=got, expected="finite numbers, and no scale of 0")


def read_chunks(
    reader: laspy.LasReader, path: Path, start: int = 0, size: int = CHUNK
) -> Iterator[laspy.ScaleAwarePointRecord]:
    """Yield the points from number ``start`` on, ``size`` at a time. Raises SL822 where the file ends too early."""
    total, done = reader.header.point_count, start
    if start:
        reader.seek(start)
    while done < total:
        try:
            points = reader.read_points(min(size, total - done))
        except Exception as failure:  # lazrs, laspy and NumPy each have their own for a file that breaks off
            raise _unreadable_error(path, failure, f"from point {done:,} of {total:,} on: ") from None
        if not len(points):
            raise error(
                "SL822",
                where=str(path),
                what="the point cloud is truncated",
                got=f"{done:,} points",
                expected=f"{total:,}, as its header says",
            )
        done += len(points)
        yield points


def require_packages(path: Path) -> None:
    """Raise SL603 unless laspy, and lazrs for LAZ, are installed."""
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
    text = " ".join(str(failure).split())
    return error(
        "SL822",
        where=str(path),
        got=f"{before}{text or type(failure).__name__}",
        expected="a whole LAS, LAZ or COPC file",
    )
