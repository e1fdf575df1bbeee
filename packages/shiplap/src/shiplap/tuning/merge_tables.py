"""``shiplap tune --merge``: frozen tables of several machines as one, of which each machine uses its own entries.

The key of an entry names the device, the versions of driver and libraries, and the version of the op. Entries with
different keys are all kept. Two entries with the same key were measured twice on devices of one kind. Of these, the one
with the shorter measured time is kept. A measured entry takes precedence over one that was not measured. Otherwise the
table that was named first decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shiplap.errors import error
from shiplap.tuning.choice import Choice, choice_from_json, show_time
from shiplap.tuning.frozen_table import dump_table, read_frozen_table
from shiplap.tuning.key import Key


@dataclass(frozen=True)
class TableConflict:
    """Different choices in two tables for the same op, device and bucket (class of sizes).

    ``kept`` is the candidate that the merged table has, and ``dropped`` the other one. Their times are in seconds.
    ``kept_in`` and ``dropped_in`` are the tables that chose them.
    """

    op: str
    device: str
    bucket: str
    kept: str
    kept_time: float
    kept_in: str
    dropped: str
    dropped_time: float
    dropped_in: str

    def __str__(self) -> str:
        """Return one line that names the op, the bucket, the device, the kept choice and the dropped one. Each choice
        is shown with its time and its table.
        """
        return (
            f"{self.op}  {self.bucket}  {self.device}: {self.kept} {_show_conflict_time(self.kept_time)} of "
            f"{self.kept_in} is kept, "
            f"{self.dropped} {_show_conflict_time(self.dropped_time)} of {self.dropped_in} is not"
        )


@dataclass(frozen=True)
class Merged:
    """The result of a merge of tables. It holds the paths of the tables, the number of choices for each device by its
    name, the number of choices on which two tables agreed, and the conflicts.
    """

    tables: tuple[str, ...]
    choices: Mapping[str, int]
    repeated: int
    conflicts: tuple[TableConflict, ...]


def merge_frozen_tables(sources: Iterable[str | Path], output: str | Path) -> Merged:
    """Write the choices of all frozen tables in ``sources`` to the file ``output``. A folder in ``sources`` stands for
    the ``.json`` files in it. Of two choices under one key, only one is kept. Return the counts and the conflicts.

    Raises:
        ShiplapError: ``SL602`` for a table that cannot be read, for an empty folder or for an output that cannot be
            written. ``SL609`` for a damaged table. Nothing is written in these cases.
    """
    paths = [path for source in sources for path in _list_tables(Path(source), Path(output))]
    kept: dict[Key, tuple[Choice, Mapping[str, Any], Path]] = {}
    conflicts: list[TableConflict] = []
    repeated = 0
    for path in paths:
        for key, value in read_frozen_table(path):
            mine = (choice_from_json(key, value, "frozen"), value, path)
            other = kept.setdefault(key, mine)
            if other is mine:
                continue
            best, rest = (mine, other) if _replaces_choice(mine[0], other[0]) else (other, mine)
            kept[key] = best
            if best[0].label == rest[0].label:
                repeated += 1
            else:
                conflicts.append(_make_conflict(key, best, rest))
    # Sorted, so that the same entries give the same file.
    entries = sorted(((key, value) for key, (_, value, _) in kept.items()), key=lambda entry: entry[0].fields)
    dump_table(output, entries)
    devices = [key["device_name"] for key, _ in entries]
    counts = {name: devices.count(name) for name in dict.fromkeys(devices)}
    return Merged(tuple(map(str, paths)), counts, repeated, tuple(conflicts))


def _list_tables(source: Path, output: Path) -> list[Path]:
    """Return the paths of the tables that ``source`` stands for. A file stands for itself, and a folder for its
    ``.json`` files, sorted by name. A file in the folder with the name of ``output``, which an earlier merge may have
    written, comes first. Raise ``SL602`` for a folder without tables.
    """
    if not source.is_dir():
        return [source]
    listed = sorted(source.glob("*.json"), key=lambda path: (path.name != output.name, path.name))
    if not listed:
        raise error(
            "SL602",
            where=str(source),
            what="the folder has no tables",
            got="no .json file",
            expected="tables written by 'shiplap freeze'",
        )
    return listed


def _replaces_choice(one: Choice, other: Choice) -> bool:
    """Return whether the choice ``one`` of a later table replaces ``other``, the choice of an earlier table under the
    same key. It does if it was measured, and ``other`` was slower or was not measured.
    """
    return one.time > 0 and (other.time <= 0 or one.time < other.time)


def _make_conflict(
    key: Key, best: tuple[Choice, Mapping[str, Any], Path], rest: tuple[Choice, Mapping[str, Any], Path]
) -> TableConflict:
    """Return the record of two tables that chose differently under ``key``. ``best`` is the kept choice and ``rest``
    the dropped one, each as a tuple (choice, value, path of its table).
    """
    (won, _, here), (lost, _, there) = best, rest
    return TableConflict(
        op=key["op"],
        device=key["device_name"],
        bucket=key["bucket"],
        kept=won.label,
        kept_time=won.time,
        kept_in=str(here),
        dropped=lost.label,
        dropped_time=lost.time,
        dropped_in=str(there),
    )


def _show_conflict_time(seconds: float) -> str:
    """Return the time ``seconds`` of a choice as text in parentheses. For 0, which stands for no measurement, return
    ``(not measured)``.
    """
    return f"({show_time(seconds)})" if seconds else "(not measured)"
