"""Combinations of ``torch.distributed`` with our modules, each a *cell* of docs/many-devices.md, on local ranks.

A module of cells has functions under ``@cell("name")`` and ends in ``main()``. ``outcomes("its.module")`` runs all of
them in one group of processes and returns what each cell reported: *equal* with the tolerance that it compared with, or
*refused* with the id of the error. A cell must say the same on every rank. The ranks are processes on the CPU that
speak gloo; ``SHIPLAP_RANKS=nccl`` gives each a GPU.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from shiplap_testing.forked import python
from shiplap_testing.paths import REPOSITORY, searched

__all__ = ["NO_SUCH_CELL", "cell", "device", "main", "outcomes", "table"]

MARK = "outcomes of cells: "
NO_SUCH_CELL = "–"  # what the table says where a combination makes no sense
_cells: dict[str, Callable[[int, int], str]] = {}


def cell(name: str) -> Callable[[Callable[[int, int], str]], Callable[[int, int], str]]:
    """Make ``function(rank, world)`` the cell ``name``. It returns a tolerance as text, or raises."""

    def add(function: Callable[[int, int], str]) -> Callable[[int, int], str]:
        _cells[name] = function
        return function

    return add


def device() -> torch.device:
    """Where the tensors of this rank are."""
    return torch.device("cuda", torch.cuda.current_device()) if _backend() == "nccl" else torch.device("cpu")


def _backend() -> str:
    return os.environ.get("SHIPLAP_RANKS", "gloo")


def main() -> None:
    """Run the cells (or those named on the command line) on this rank, and let rank 0 print what they reported."""
    import torch.distributed as dist

    if _backend() == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store = os.environ.get("SHIPLAP_RANKS_STORE")
    method, rank, world = (
        f"file://{store}" if store else "env://",
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
    )
    dist.init_process_group(_backend(), method, timedelta(seconds=60), world, rank)
    reported = {}
    for name in sys.argv[1:] or list(_cells):
        everyone: list[str] = [""] * world
        dist.all_gather_object(everyone, _say(_cells[name], rank, world))
        reported[name] = everyone[0] if len(set(everyone)) == 1 else f"ranks differ: {everyone}"
    if rank == 0:
        print(MARK + json.dumps(reported), flush=True)
    dist.destroy_process_group()


def _say(function: Callable[[int, int], str], rank: int, world: int) -> str:
    from shiplap.errors import ShiplapError

    torch.manual_seed(0)
    try:
        return f"equal ({function(rank, world)})"
    except ShiplapError as e:
        return f"refused ({e.id})"
    except Exception:
        if rank == 0:
            traceback.print_exc()
        return f"failed: {traceback.format_exc().strip().splitlines()[-1][:300]}"


def outcomes(module: str, *cells: str, world: int = 2, timeout: float = 300) -> dict[str, str]:
    """What the cells of ``module`` say on ``world`` processes that share one group, started once for all of them."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": searched()}
    done = python("-m", "shiplap_testing.ranks", world, int(timeout), module, *cells, env=environment, timeout=timeout)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stderr[-3000:]
    reported: dict[str, str] = json.loads(lines[-1][len(MARK) :])
    for name, outcome in reported.items():
        if not outcome.startswith(("equal", "refused")):
            print(name, outcome, done.stderr[-6000:], sep="\n")
    return reported


def _start(world: int, seconds: int, module: str, cells: list[str]) -> int:
    """Run ``module`` on ``world`` ranks that are forked from here, where torch has been imported; 1 if one failed."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_rank(rank, world, seconds, Path(folder, "store"), [module, *cells]) for rank in range(world)]
        failed = 0
        while ranks:
            pid, status = os.wait()
            ranks.remove(pid)
            failed |= int(status != 0)
            for other in ranks if status else ():  # which would wait for the one that has ended
                os.kill(other, signal.SIGKILL)
        return failed


def _rank(rank: int, world: int, seconds: int, store: Path, arguments: list[str]) -> int:
    """The id of a process that runs the module of ``arguments`` as ``rank``, for so many seconds at most."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(seconds)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ["SHIPLAP_RANKS_STORE"] = str(store)
        torch.set_num_threads(1)
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def table(column: str) -> dict[str, str]:
    """What docs/many-devices.md says in the rows of the table under ``column``: the name of a cell → its outcome."""
    rows: dict[str, str] = {}
    heading: list[str] = []
    for line in (REPOSITORY / "docs" / "many-devices.md").read_text().splitlines():
        values = [value.strip() for value in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not values:
            heading = []
        elif not heading:
            heading = values
        elif column in heading and not set(values[0]) <= {"-", ":"}:
            rows[values[0].strip("`")] = values[heading.index(column)]
    return rows


if __name__ == "__main__":
    sys.exit(_start(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
