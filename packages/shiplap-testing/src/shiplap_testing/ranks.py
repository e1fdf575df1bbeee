"""Combinations of ``torch.distributed`` with our modules, each a *cell* of docs/many-devices.md, on local ranks.

A module of cells has functions under ``@cell("name")`` and ends in ``main()``. ``outcomes("its.module")`` runs all of
them in one group of processes and returns what each cell reported: *equal* with the tolerance that it compared with, or
*refused* with the id of the error. A cell must say the same on every rank. The ranks are processes on the CPU that
speak gloo; ``SHIPLAP_RANKS=nccl`` gives each a GPU, and ``SHIPLAP_RANKS=shared`` lets all of them use the first GPU and
speak gloo, since NCCL takes one rank a GPU. They are forked from one process that has imported all they need:
``torchrun`` would let each of them, and itself, import torch once more. ``torchrun -m its.module`` does the same.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from importlib import import_module

import torch

from shiplap_testing.forked import child, python
from shiplap_testing.paths import REPOSITORY, searched
from shiplap_testing.through_host import through_host

MARK = "outcomes of cells: "
NO_SUCH_CELL = "–"  # what the table says where a combination makes no sense
_cells: dict[str, Callable[[int, int], str]] = {}
_long: set[str] = set()


def cell(name: str, *, long: bool = False) -> Callable[[Callable[[int, int], str]], Callable[[int, int], str]]:
    """Return a decorator that registers ``function(rank, world)`` as the cell ``name``, and returns the function. A
    cell tests one feature of ``torch.distributed`` with our modules, and is one row of a table in docs/many-devices.md.

    The function returns a tolerance as a string, or raises an exception. If ``long`` is true, the cell runs only if it
    is named. Otherwise it also runs if no cell is named.
    """

    def add(function: Callable[[int, int], str]) -> Callable[[int, int], str]:
        """Register ``function`` as the cell ``name``, and return it. If ``long`` is true, the cell runs only if it is
        named. ``name`` and ``long`` are arguments of ``cell``.
        """
        _cells[name] = function
        _long.update({name} if long else ())
        return function

    return add


def device() -> torch.device:
    """Return the device of the tensors of this rank. It is the CPU if ranks communicate by gloo on the CPU, and
    otherwise the current GPU.
    """
    return torch.device("cpu") if _kind() == "gloo" else torch.device("cuda", torch.cuda.current_device())


def _kind() -> str:
    """Return how the ranks of this process group communicate, from the environment variable ``SHIPLAP_RANKS``. It is
    ``gloo`` (on the CPU, the default), ``nccl`` (a GPU for each rank) or ``shared`` (one GPU for all ranks).
    """
    return os.environ.get("SHIPLAP_RANKS", "gloo")


# Said for each device: of "gloo" a mesh of GPUs makes a group of NCCL, and what NCCL alone does not take is on the CPU
# while it is saved meanwhile (async_save), or between uses (CPUOffloadPolicy).
BACKENDS = {"shared": "cpu:gloo,cuda:gloo", "nccl": "cpu:gloo,cuda:nccl"}


def main() -> None:
    """Run the cells (registered test functions) that the command line names on this rank. If it names none, run all but
    those registered as long. Rank 0 prints the outcomes.
    """
    import torch.distributed as dist

    faulthandler.enable()  # of a rank that dies of a signal, this is all that is seen
    if _kind() != "gloo":
        torch.cuda.set_device(0 if _kind() == "shared" else int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKENDS.get(_kind(), _kind()), timeout=timedelta(seconds=60))
    with through_host() if _kind() == "shared" else nullcontext():
        _report(sys.argv[1:] or [name for name in _cells if name not in _long])
    dist.destroy_process_group()


def _report(names: list[str]) -> None:
    """Run the cells ``names`` (registered test functions) in order on this rank, and gather the outcomes of all ranks.
    Rank 0 prints them as JSON.
    """
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    reported = {}
    for name in names:
        everyone: list[str] = [""] * world
        mine = _cell_outcome(_cells[name], rank, world)
        print(f"rank {rank}, {name}: {mine}", file=sys.stderr, flush=True)  # all that is seen if they lose each other
        dist.all_gather_object(everyone, mine)
        reported[name] = everyone[0] if len(set(everyone)) == 1 else f"ranks differ: {everyone}"
    if rank == 0:
        print(MARK + json.dumps(reported), flush=True)


def _cell_outcome(function: Callable[[int, int], str], rank: int, world: int) -> str:
    """Call the cell ``function`` as rank ``rank`` of ``world`` ranks, and return its outcome as a string.

    The string is ``equal (tolerance)`` if the function returns, ``refused (id)`` if it raises one of shiplap's errors,
    and ``failed:`` with the last line of the traceback for any other exception.
    """
    from shiplap.errors import ShiplapError

    # Each cell begins with the same numbers on every rank.
    torch.manual_seed(0)
    try:
        return f"equal ({function(rank, world)})"
    except ShiplapError as e:
        return f"refused ({e.id})"
    except Exception:
        if rank == 0:
            traceback.print_exc()
        return f"failed: {traceback.format_exc().strip().splitlines()[-1][:300]}"


def outcomes(module: str, *cells: str, world: int = 2, timeout: float = 300, kind: str = "") -> dict[str, str]:
    """Run the cells ``cells`` of the module ``module`` on ``world`` processes in one group, and return a mapping from
    their names to their outcomes, which are strings.

    If ``cells`` is empty, all cells but the long ones are run. ``kind`` says how the processes communicate. If it is
    empty, :func:`_kind` determines it. ``timeout`` is in seconds. Raise ``AssertionError`` if no outcome is printed.
    """
    kind = kind or _kind()
    environment = {**os.environ, "PYTHONPATH": searched(), "SHIPLAP_RANKS": kind}
    if kind == "gloo":
        program = "from shiplap_testing.ranks import launch; launch()"
        done = python("-c", program, world, timeout, module, *cells, env=environment, timeout=timeout + 60)
    else:  # a process in which CUDA may be in use must not be forked
        command = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m", module, *cells]
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env=environment,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stderr[-3000:]
    reported: dict[str, str] = json.loads(lines[-1][len(MARK) :])
    for name, outcome in reported.items():
        if not outcome.startswith(("equal", "refused")):
            print(name, outcome, done.stderr[-6000:], sep="\n")
    return reported


def launch() -> None:
    """Fork the ranks and run the cells in them, as the program that :func:`outcomes` starts. The arguments of the
    command line are the number of ranks, the seconds that they may take, the module and the names of the cells.
    """
    world, limit, (module, *cells) = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    import_module(module)
    sys.argv = [module, *cells]
    together(world, main, limit)


def together(world: int, run: Callable[[], None], limit: float = 300) -> None:
    """Fork ``world`` ranks from this process, with the environment variables that ``torchrun`` sets, and wait until
    each has called ``run``. This process must not have started threads.

    Raise ``SystemExit`` if a rank fails or if they take more than ``limit`` seconds. Before that, the other ranks are
    killed.
    """
    with socket.socket() as free:
        # Port 0 stands for any port that is free.
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
    }
    ready = multiprocessing.get_context("fork").Barrier(world)  # none leaves while another may still talk to it

    def wait() -> None:
        """Call ``run`` (argument of ``together``), then wait until all other ranks have called it. Another rank may
        still communicate with this one.
        """
        run()
        ready.wait(limit)

    running = {child(partial(_as_rank, rank, wait, limit)) for rank in range(world)}
    end, status = time.monotonic() + limit, 0
    while running:
        pid, ended = os.waitpid(-1, os.WNOHANG)
        running -= {pid}
        if pid and ended:
            status = status or abs(os.waitstatus_to_exitcode(ended))
        if status or time.monotonic() > end:
            for other in running:
                # The others would wait for the rank that failed.
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            raise SystemExit(status or f"{len(running)} of {world} ranks took more than {limit:.0f} s")
        time.sleep(0 if pid else 0.02)


def _as_rank(rank: int, run: Callable[[], None], limit: float) -> None:
    """Call ``run`` in this process as rank ``rank``, with one thread. If it is still running after nine tenths of
    ``limit`` seconds, print the traceback of each thread and continue.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(limit * 0.9)  # where it waits, should it wait for ever
    run()


def table(column: str) -> dict[str, str]:
    """Return the outcomes in the column ``column`` of the tables in docs/many-devices.md, as a mapping from the name of
    the row to a string.
    """
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
