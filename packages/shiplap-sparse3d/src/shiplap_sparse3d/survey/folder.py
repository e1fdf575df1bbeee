"""The folder of a survey: its identity, sorted points, results of tiles, and a mark for each finished part.

Every mark is a file that is written whole or not at all, after the files that it stands for. A process may be killed at
any time: a part with a mark is finished, and all others are made anew. Two processes may make a part at the same time,
since both write the same bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shiplap import ShiplapError
from shiplap.plugin_api import error
from shiplap.plugin_api.files import parse_json, read_named, work_in, write_whole

Tile = tuple[int, int]

_MARK = 1 << 24  # bytes of the largest mark, that of a segment

POINT = np.dtype(
    [("index", "<i8"), ("raw", "<i4", 3), ("intensity", "<u2"), ("return_number", "u1"), ("number_of_returns", "u1")]
)
"""A sorted point: its number in the file, its stored coordinates, and what features are made of."""


@dataclass(frozen=True)
class SurveyFolder:
    """The paths in the folder of one survey, and its marks."""

    path: Path

    def points_path(self, segment: int) -> Path:
        """Return the path of the file with the points of ``segment`` (a number), sorted by tile."""
        return self.path / "points" / f"{segment}.bin"

    def sorted_mark_path(self, segment: int) -> Path:
        """Return the path of the JSON mark that is there when the points of ``segment`` (a number) are sorted."""
        return self.path / "sorted" / f"{segment}.json"

    def result_path(self, tile: Tile) -> Path:
        """Return the path of the file with the predicted classes of ``tile``: one byte a point, in the order of the
        input.
        """
        return self.path / "classes" / f"{tile[0]}_{tile[1]}.bin"

    def done_mark_path(self, tile: Tile) -> Path:
        """Return the path of the JSON mark that is there when the classes of ``tile`` are written."""
        return self.path / "done" / f"{tile[0]}_{tile[1]}.json"

    @property
    def identity(self) -> Path:
        """Return the path of the JSON file that describes the survey: its input, sizes and model."""
        return self.path / "survey.json"

    @property
    def points_identity(self) -> Path:
        """Return the path of the JSON file that describes the sorted points: the input, the voxel and the tiles."""
        return self.path / "points.json"

    @property
    def labels(self) -> Path:
        """Return the path of the file with the classes to learn from: one byte a point, in the order of the input."""
        return self.path / "labels.bin"

    def claim(self, path: Path, identity: dict[str, Any]) -> None:
        """Begin the work that ``identity`` describes by writing it to ``path``, or continue that work if ``path`` has
        the same content. Raises SL823 if ``path`` describes other work.
        """
        known = read_mark(path)
        if known is None:
            write_mark(path, identity)
        elif known != identity:
            names = [name for name in identity if known.get(name) != identity[name]]
            raise error(
                "SL823",
                where=str(self.path),
                got=", ".join(f"{name} {known.get(name)}" for name in names) or "other entries",
                expected=", ".join(f"{name} {identity[name]}" for name in names),
            )

    def make_directory(self) -> None:
        """Make the folder if needed, and raise SL602 unless it is safe to write and remove files in it.

        Raises:
            CommandError: SL602 for a folder that everybody can write, or that holds a link, a FIFO or a device.
        """
        try:
            work_in(self.path)
        except OSError as failure:
            raise error(
                "SL602",
                where=str(failure.filename or self.path),
                what="the survey folder cannot be used",
                got=failure.strerror or failure,
                expected="a folder that you or your group alone can write, with files and folders in it",
                fix="pass another folder, or remove what 'where' names",
            ) from None

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the exclusive lock of this folder during the block of a context manager. Raises SL823 while another
        process holds it, and SL602 for a folder that cannot be used.

        The system releases the lock of a killed process.
        """
        self.make_directory()
        with (self.path / "survey.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # a file system without locks has another error: SL602
                raise error(
                    "SL823",
                    where=str(self.path),
                    what="another process is at work on this survey",
                    got="a locked folder",
                    expected="one process for each folder, which may have many workers",
                    fix="wait for the other process, or end it",
                ) from None
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile, such as a data loader's, shares it

    def remove_written(self) -> None:
        """Remove the files that a survey has written, and the folder if nothing else is in it. Files of the user stay.

        Marks go before the files that they stand for: after an interruption the rest is made again.
        """
        for part in ("done", "sorted", "classes", "points"):
            shutil.rmtree(self.path / part, ignore_errors=True)
        for path in (self.identity, self.points_identity, self.path / "survey.lock"):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def write_result(self, tile: Tile, codes: np.ndarray[Any, Any]) -> None:
        """Write the class codes of ``tile`` to its file, and then its mark, which holds the SHA-256 of that file.

        No call waits for the disk, which workers share: the digest detects what a loss of power has damaged.
        """
        content = codes.astype(np.uint8, copy=False).tobytes()
        write_whole(self.result_path(tile), content, lasting=False)
        write_mark(self.done_mark_path(tile), {"sha256": hashlib.sha256(content).hexdigest()}, lasting=False)

    def read_result(self, tile: Tile, count: int) -> np.ndarray[Any, Any]:
        """Return the ``count`` class codes of ``tile``, ``uint8 [count]``, in the order of the input.

        Raises SL824 if the classes are missing or not those of the mark, which is then removed.
        """
        mark, path = read_mark(self.done_mark_path(tile)), self.result_path(tile)
        content = path.read_bytes() if path.exists() else b""
        if mark and mark.get("sha256") == hashlib.sha256(content).hexdigest() and len(content) == count:
            return np.frombuffer(content, np.uint8)
        self.done_mark_path(tile).unlink(missing_ok=True)
        raise error("SL824", where=str(path), got="other classes, or none", expected="the classes that were written")

    def has_result(self, tile: Tile, count: int) -> bool:
        """Return whether ``tile`` has a mark and a file of ``count`` classes with the mark's digest. A mark whose
        classes differ is removed, so that the tile is predicted again.
        """
        if not self.done_mark_path(tile).exists():
            return False
        try:
            self.read_result(tile, count)
        except ShiplapError:
            return False
        return True


def write_mark(path: Path, content: dict[str, Any], *, lasting: bool = True) -> None:
    """Write ``content`` as JSON to ``path``, whole or not at all. ``lasting``: wait until the disk has it."""
    import json

    write_whole(path, json.dumps(content, sort_keys=True).encode(), lasting=lasting)


def read_mark(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in the file ``path``, or None if the file is missing or holds anything else."""
    try:
        content = parse_json(read_named(path, _MARK))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None
