"""What Linux says about processes, under ``/proc``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Usage", "below", "resident", "stat_fields", "threads", "usage"]


def stat_fields(pid: int | str) -> list[str]:
    """What follows the name in ``/proc/PID/stat``: state, ppid, pgrp, session, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return []


def below(root: int) -> list[int]:
    """Every living process that ``root`` started, directly or not; parents come before their children."""
    fields = {int(entry): stat for entry in os.listdir("/proc") if entry.isdigit() and (stat := stat_fields(entry))}
    family = [root]
    for pid in family:
        family += [child for child, stat in fields.items() if int(stat[1]) == pid and stat[0] not in "ZX"]
    return family[1:]


def threads(pid: int) -> set[str]:
    """The states of all threads of a process, as letters; empty when it is gone."""
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return set()
    return {stat[0] for name in names if (stat := stat_fields(f"{pid}/task/{name}"))}


def resident(pid: int) -> int:
    """Bytes of memory that are in use."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


@dataclass(frozen=True)
class Usage:
    """Seconds of a process since it started.

    Attributes:
        ran: on a processor, of all its threads.
        waited: of one thread, ready to run and without a processor, since others had them all.
    """

    ran: float = 0.0
    waited: float = 0.0


def usage(pid: int, thread: int) -> Usage:
    """What the scheduler counted for a process and for one thread of it; zeros where the kernel does not count."""
    ran = waited = 0
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return Usage()
    for name in names:
        try:
            on, off, _ = Path(f"/proc/{pid}/task/{name}/schedstat").read_text().split()
        except (OSError, ValueError):
            continue
        ran += int(on)
        waited += int(off) if name == str(thread) else 0
    return Usage(ran * 1e-9, waited * 1e-9)
