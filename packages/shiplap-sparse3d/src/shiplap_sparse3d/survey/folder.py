"""The folder of a survey: the descriptions of its work, its sorted points, and the classes of its tiles.

Every file is written whole or not at all, and holds a digest or sums of its content. A process may be killed at any
time: a part whose file is whole is finished, and all others are made anew. Two processes may make a part at the same
time, since both write the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from filelock import FileLock, Timeout

from shiplap.plugin_api.files import parse_json, read_named, work_in, write_whole
from shiplap_sparse3d.errors import require_same, survey_error
from shiplap_sparse3d.survey.field import Tile

_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class SurveyFolder:
    """The folder of one survey at ``path``, with its sorted points, the classes of its tiles, a description of the work
    and a lock.
    """

    path: Path

    def points_path(self, segment: int) -> Path:
        """Return the path of the file for the points of segment ``segment`` of the input, sorted by tile. A segment is
        a run of successive points.
        """
        return self.path / "points" / f"{segment}.bin"

    def result_path(self, tile: Tile) -> Path:
        """Return the path of the file for the classes of ``tile``. It holds a digest and then one byte for each point
        of the tile, in the order of the input.
        """
        return self.path / "classes" / f"{tile[0]}_{tile[1]}.bin"

    def claim(self, identity: dict[str, Any]) -> dict[str, Any]:
        """Begin or continue the work that ``identity`` describes, a mapping of names to settings. The settings are
        stored in the folder. Return all that it has now. Raise ``SL823`` if it has another value for one of the names.
        """
        path, identity = self.path / "survey.json", json.loads(json.dumps(identity))
        known = identity.copy()
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):  # none, or no object of JSON
            known.update(**cast(Any, parse_json(read_named(path, 1 << 16))))
        require_same("SL823", self.path, known, identity)
        write_whole(path, json.dumps(known, sort_keys=True).encode())
        return known

    @contextlib.contextmanager
    def open_for_work(self) -> Iterator[None]:
        """Make this folder, and replace each ``OSError`` in the block of this context manager by ``SL602``. Such an
        error may come from another process that works for the block, as on a full disk.

        Raises:
            CommandError: ``SL602`` also for a folder that everybody can write, or that holds a link, a FIFO or a
                device.
        """
        try:
            work_in(self.path)
            yield
        except OSError as failure:
            got, what = failure.strerror or failure, "the survey cannot be written"
            expected = "a folder that you or your group alone can write, without links, with 25 bytes for each point"
            raise survey_error("SL602", failure.filename or self.path, got, expected, what=what) from None

    def lock(self) -> contextlib.AbstractContextManager[object]:
        """Lock this folder, and return a context manager that releases the lock at the end of its block. Raise
        ``SL823`` if another process holds the lock. The system releases the lock of a process that is killed.
        """
        try:
            return FileLock(self.path / "survey.lock", timeout=0).acquire()
        except Timeout:
            what, fix = "another process is at work on this survey", "wait for the other process, or end it"
            expected = "one process for each folder, which may have many workers"
            raise survey_error("SL823", self.path, "a locked folder", expected, fix, what) from None

    def remove_written(self) -> None:
        """Remove the files that a survey has written, and the folder itself if it is then empty. Other files stay."""
        for part in ("classes", "points"):
            shutil.rmtree(self.path / part, ignore_errors=True)
        for name in ("survey.json", "survey.lock", "job.bin"):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def write_result(self, tile: Tile, codes: np.ndarray[Any, Any]) -> None:
        """Write ``codes``, the class codes of the points of ``tile``, to its file, with a digest.

        The call does not wait until the disk has stored them. The digest shows later whether a loss of power has
        damaged them.
        """
        write_whole(self.result_path(tile), with_digest(codes.tobytes()), lasting=False)

    def read_result(self, tile: Tile, count: int) -> np.ndarray[Any, Any] | None:
        """Return the ``count`` class codes of the points of ``tile``, or None if the file is missing or its content
        does not fit the digest or ``count``.
        """
        with open_or_empty(self.result_path(tile)) as file:
            content = without_digest(file.read())
        return None if content is None or len(content) != count else np.frombuffer(content, np.uint8)


def open_or_empty(path: Path) -> io.BufferedIOBase:
    """Return the file ``path``, opened for reading bytes, or an empty one if it does not exist."""
    return path.open("rb") if path.exists() else io.BytesIO()


def with_digest(content: bytes) -> bytes:
    """Return the SHA-256 digest of ``content``, 32 bytes, followed by ``content``."""
    return hashlib.sha256(content).digest() + content


def without_digest(content: bytes) -> bytes | None:
    """Return ``content`` without the digest that :func:`with_digest` has put in front, or None if the digest does not
    fit.
    """
    return content[_DIGEST:] if with_digest(content[_DIGEST:]) == content else None
