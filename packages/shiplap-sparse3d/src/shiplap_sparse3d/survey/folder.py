"""The folder of a survey: the descriptions of its work, its sorted points, and the classes of its tiles.

Every file is written whole or not at all, and holds a digest or sums of its content. A process may be killed at any
time: a part whose file is whole is finished, and all others are made anew. Two processes may make a part at the same
time, since both write the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from filelock import FileLock, Timeout

from shiplap.plugin_api.files import parse_json, read_named, work_in, write_whole
from shiplap_sparse3d.errors import survey_error
from shiplap_sparse3d.survey.field import Tile

_MARK = 1 << 16  # bytes of the largest description
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class SurveyFolder:
    """The paths in the folder of one survey, and its marks."""

    path: Path

    def points_path(self, segment: int) -> Path:
        """Return the path of the points of a segment of the input, sorted by tile."""
        return self.path / "points" / f"{segment}.bin"

    def result_path(self, tile: Tile) -> Path:
        """Return the path of the classes of a tile: a digest, and one byte a point in the order of the input."""
        return self.path / "classes" / f"{tile[0]}_{tile[1]}.bin"

    def claim(self, identity: dict[str, Any]) -> None:
        """Begin or continue the work that ``identity`` describes. Raises SL823 if the folder's description has another
        value for one of its names.
        """
        path, identity = self.path / "survey.json", json.loads(json.dumps(identity))
        known = identity.copy()
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):  # none, or no object of JSON
            known.update(**cast(Any, parse_json(read_named(path, _MARK))))
        if names := [name for name in identity if known[name] != identity[name]]:
            got, expected = (", ".join(f"{name} {of[name]}" for name in names) for of in (known, identity))
            raise survey_error("SL823", self.path, got, expected)
        write_whole(path, json.dumps(known, sort_keys=True).encode())

    @contextlib.contextmanager
    def open_for_work(self) -> Iterator[None]:
        """Make this folder, or check that none of its files leads elsewhere, and raise errors of files as SL602.

        Those in the block count, too, here or on a worker, such as a full disk.

        Raises:
            CommandError: SL602 also for a folder that everybody can write, or that holds a link, a FIFO or a device.
        """
        try:
            work_in(self.path)
            yield
        except OSError as failure:
            got, what = failure.strerror or failure, "the survey cannot be written"
            expected = "a folder that you or your group alone can write, without links, with 25 bytes for each point"
            raise survey_error("SL602", failure.filename or self.path, got, expected, what=what) from None

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold this folder in the block. Raises SL823 while another process holds it.

        The system releases the lock of a killed process.
        """
        try:
            held = FileLock(self.path / "survey.lock", timeout=0).acquire()
        except Timeout:
            what, fix = "another process is at work on this survey", "wait for the other process, or end it"
            expected = "one process for each folder, which may have many workers"
            raise survey_error("SL823", self.path, "a locked folder", expected, fix, what) from None
        with held:
            yield

    def remove_written(self) -> None:
        """Remove the files of a survey, and the folder if nothing else is in it. A user's file stays."""
        for part in ("classes", "points"):
            shutil.rmtree(self.path / part, ignore_errors=True)
        for name in ("survey.json", "survey.lock", "job.bin"):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def write_result(self, tile: Tile, codes: np.ndarray[Any, Any]) -> None:
        """Write the classes of a tile.

        No call waits for the disk, which workers share: the digest detects what a loss of power has damaged.
        """
        write_whole(self.result_path(tile), with_digest(codes.tobytes()), lasting=False)

    def read_result(self, tile: Tile, count: int) -> np.ndarray[Any, Any] | None:
        """Return the ``count`` classes of a tile, or None if they are missing or not those that were written."""
        path = self.result_path(tile)
        content = without_digest(path.read_bytes()) if path.exists() else None
        return None if content is None or len(content) != count else np.frombuffer(content, np.uint8)


def with_digest(content: bytes) -> bytes:
    """Return ``content`` behind its digest."""
    return hashlib.sha256(content).digest() + content


def without_digest(content: bytes) -> bytes | None:
    """Return the content that :func:`with_digest` has protected, or None if it has changed."""
    return content[_DIGEST:] if with_digest(content[_DIGEST:]) == content else None
