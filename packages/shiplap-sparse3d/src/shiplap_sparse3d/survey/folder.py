"""The folder of a survey: its identity, buckets of points, results of tiles, and a mark for each finished part.

Every mark is a file that is written whole or not at all, after the files that it stands for. A process may be killed at
any time: a part with a mark is finished, and all others are made anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from shiplap.plugin_api import error
from shiplap.plugin_api.files import parse_json, read_named, work_in, write_whole

__all__ = ["POINT", "RESULT", "SurveyFolder", "Tile", "read_mark"]

Tile = tuple[int, int]

_TILE = re.compile(r"(-?\d+)_(-?\d+)(?:\.json)?")  # the name of a file
_MARK = 1 << 24  # bytes of the largest mark, that of the buckets: 800,000 tiles

POINT = np.dtype(
    [("index", "<i8"), ("raw", "<i4", 3), ("intensity", "<u2"), ("return_number", "u1"), ("number_of_returns", "u1")]
)
"""A point in a bucket: its number in the file, its stored coordinates, and what features are made of."""

RESULT = np.dtype([("index", "<i8"), ("code", "u1")])
"""The class of a point."""


@dataclass(frozen=True)
class SurveyFolder:
    """The paths in the folder of one survey, and its marks."""

    path: Path

    def bucket_path(self, tile: Tile) -> Path:
        """Return the path of the points of a tile."""
        return self.path / "points" / f"{tile[0]}_{tile[1]}.bin"

    def result_path(self, tile: Tile) -> Path:
        """Return the path of the classes of the points of a tile."""
        return self.path / "classes" / f"{tile[0]}_{tile[1]}.bin"

    def done_mark_path(self, tile: Tile) -> Path:
        """Return the path of the mark of a tile whose classes are written."""
        return self.path / "done" / f"{tile[0]}_{tile[1]}.json"

    def taken_mark_path(self, tile: Tile) -> Path:
        """Return the path of an empty file: a worker has begun ``tile``.

        The mark of the tile shows whether the worker has finished.
        """
        return self.path / "taken" / f"{tile[0]}_{tile[1]}"

    def begin_tile(self, tile: Tile) -> bool:
        """Begin ``tile``, or return False if a worker has begun it before.

        Of two workers at the same time one succeeds.
        """
        path = self.taken_mark_path(tile)
        path.parent.mkdir(exist_ok=True)
        try:
            # Creating a file exclusively is atomic, also on shared file systems.
            path.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def begun_tiles(self) -> set[Tile]:
        """Return the tiles that workers have begun or done, by two listings of the folder."""
        begun = set[Tile]()
        for part in ("taken", "done"):
            with contextlib.suppress(FileNotFoundError):
                names = map(_TILE.fullmatch, os.listdir(self.path / part))
                begun |= {(int(name[1]), int(name[2])) for name in names if name is not None}
        return begun

    @property
    def identity(self) -> Path:
        """Return the path of the survey's identity."""
        return self.path / "survey.json"

    @property
    def progress(self) -> Path:
        """Return the path of the mark of the points that have been sorted into buckets."""
        return self.path / "buckets.json"

    @property
    def classes(self) -> Path:
        """Return the path of the classes: one byte a point, in the order of the input."""
        return self.path / "classes.bin"

    def claim(self, identity: dict[str, Any]) -> None:
        """Begin or continue the survey that ``identity`` describes. Raises SL823 if the folder is of another one."""
        self.path.mkdir(parents=True, exist_ok=True)
        known = read_mark(self.identity)
        if known is None:
            write_mark(self.identity, identity)
        elif known != identity:
            names = [name for name in identity if known.get(name) != identity[name]]
            raise error(
                "SL823",
                where=str(self.path),
                got=", ".join(f"{name} {known.get(name)}" for name in names) or "other entries",
                expected=", ".join(f"{name} {identity[name]}" for name in names),
            )

    def make_directory(self) -> None:
        """Make the folder, or check that none of its files leads elsewhere: files here are appended to and cut.

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
    def hold_worker(self, rank: int) -> Iterator[None]:
        """Hold worker ``rank`` of this folder in the block. Raises SL823 while another process holds it.

        The system releases the lock of a killed process. Raises SL602 as :meth:`enter` does.
        """
        self.make_directory()
        with (self.path / f"worker{rank}.lock").open("w") as file:
            if not _lock_file(file):
                raise error(
                    "SL823",
                    where=str(self.path),
                    what="another process is at work on this survey",
                    got=f"worker {rank} is running",
                    expected="one process for each rank",
                    fix="wait for it, or give each process a rank of its own (RANK and WORLD_SIZE)",
                )
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile, such as a data loader's, shares it

    def in_use(self) -> bool:
        """Return whether another process, or another call of this one, holds a worker of this folder."""
        return any(not _is_unlocked(path) for path in self.path.glob("worker*.lock"))

    def remove_written(self) -> None:
        """Remove the files of a survey, and the folder if nothing else is in it. A user's file stays.

        The mark of the sorted points is removed first: after an interruption the points are sorted again.
        """
        with contextlib.suppress(OSError):
            self.progress.unlink()
        # Marks go before the files that they stand for.
        for part in ("taken", "done", "classes", "points"):
            shutil.rmtree(self.path / part, ignore_errors=True)
        for path in (self.identity, self.classes, *self.path.glob("worker*.lock")):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def write_result(self, tile: Tile, rows: np.ndarray[Any, Any]) -> None:
        """Write the classes of a tile, and then its mark, which holds their digest.

        No call waits for the disk, which workers share: :meth:`finished` finds files that a loss of power has damaged.
        """
        # The digest in the mark detects classes that a loss of power has damaged.
        content = rows.astype(RESULT, copy=False).tobytes()
        write_whole(self.result_path(tile), content, lasting=False)
        mark = {"points": len(rows), "sha256": hashlib.sha256(content).hexdigest()}
        write_mark(self.done_mark_path(tile), mark, lasting=False)

    def has_result(self, tile: Tile) -> bool:
        """Return whether ``tile`` has a mark and the classes it stands for. A mark of other classes is removed."""
        if not self.done_mark_path(tile).exists():
            return False
        if self._marked(tile) is not None:
            return True
        self.done_mark_path(tile).unlink(missing_ok=True)
        return False

    def _marked(self, tile: Tile) -> bytes | None:
        """Return the classes of a tile as they were written, or None if they are not those of the mark."""
        mark, path = read_mark(self.done_mark_path(tile)), self.result_path(tile)
        content = path.read_bytes() if path.exists() else b""
        whole = mark is not None and mark.get("sha256") == hashlib.sha256(content).hexdigest()
        return content if whole else None

    def read_result(self, tile: Tile, total: int) -> np.ndarray[Any, Any]:
        """Return the classes of a tile of a survey of ``total`` points, by ascending number.

        Raises SL824 if they are missing, not those of the mark or not of points of this survey; the mark is then
        removed.
        """
        content, path = self._marked(tile), self.result_path(tile)
        if content is not None and not len(content) % RESULT.itemsize:
            rows = np.frombuffer(content, RESULT)
            numbers = rows["index"]
            if not len(rows) or (numbers[0] >= 0 and numbers[-1] < total and bool((np.diff(numbers) > 0).all())):
                return rows
        self.done_mark_path(tile).unlink(missing_ok=True)
        got = "other ones, or none" if content is None else f"{len(content)} bytes of them"
        raise error("SL824", where=str(path), got=got, expected="the classes that were written")


def _lock_file(file: IO[Any], seconds: float = 0.2) -> bool:
    """Lock ``file``. Another process that tests the lock holds it for a moment."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > until:
                return False
            # A process in ``in_use`` holds each lock for an instant. A worker must not fail because of it.
            time.sleep(0.01)
        else:
            return True


def _is_unlocked(path: Path) -> bool:
    """Return whether no process holds this lock, or the file is gone."""
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        return _lock_file(file, 0)  # closing it lets it go
    return True


def write_mark(path: Path, content: dict[str, Any], *, lasting: bool = True) -> None:
    """Write a small JSON file whole; ``lasting`` as in :func:`write_whole`."""
    import json

    write_whole(path, json.dumps(content, sort_keys=True).encode(), lasting=lasting)


def read_mark(path: Path) -> dict[str, Any] | None:
    """Return the content of a mark, or None if there is none or if it is no object of JSON."""
    try:
        content = parse_json(read_named(path, _MARK))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None
