"""LAS, LAZ and COPC files, read in chunks: every failure of the reader becomes SL822, and no point is lost silently."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shiplap.extend import error

if TYPE_CHECKING:
    import laspy

__all__ = ["CHUNK", "chunks", "opened", "require_packages"]

CHUNK = 1 << 16  # points in memory at a time


@contextmanager
def opened(path: Path) -> Iterator[laspy.LasReader]:
    """A reader of ``path``, whose header has been read.

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
        raise _unreadable(path, failure) from None
    with reader:
        if not reader.header.point_count:
            raise error("SL822", where=str(path), got="0 points", expected="at least one point")
        yield reader


def chunks(
    reader: laspy.LasReader, path: Path, start: int = 0, size: int = CHUNK
) -> Iterator[laspy.ScaleAwarePointRecord]:
    """The points from number ``start`` on, ``size`` at a time. Raises SL822 where the file ends too early."""
    total, done = reader.header.point_count, start
    if start:
        reader.seek(start)
    while done < total:
        try:
            points = reader.read_points(min(size, total - done))
        except Exception as failure:  # lazrs, laspy and NumPy each have their own for a file that breaks off
            raise _unreadable(path, failure, f"from point {done:,} of {total:,} on: ") from None
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
    """SL603 unless laspy and lazrs, which it needs for LAZ, are installed."""
    missing = [name for name in ("laspy", "lazrs") if importlib.util.find_spec(name) is None]
    if missing:
        raise error(
            "SL603",
            where=str(path),
            got=f"no {', '.join(missing)}",
            expected="laspy, lazrs",
            fix='install them: pip install "shiplap-sparse3d[demo]"',
        )


def _unreadable(path: Path, failure: Exception, before: str = "") -> Exception:
    text = " ".join(str(failure).split())
    return error(
        "SL822",
        where=str(path),
        got=f"{before}{text or type(failure).__name__}",
        expected="a whole LAS, LAZ or COPC file",
    )
