"""What a survey on Dask does when workers and schedulers die, a disk is full and a file is damaged.

Usage: ``python benchmarks/survey_faults.py [--kills 20] [--each 1] [--parts NAME ...] [--jobs 1] [--json FILE]``.
``--jobs`` surveys run at a time, each on two cores of its own of those that ``taskset`` leaves. The parts are

* ``kills``: a local worker is killed by SIGKILL in the middle of each stage, ``--each`` times in a survey;
* ``scheduler``: a scheduler that runs on its own is killed with its workers, and all of them are started again;
* ``lost``: the same, and nothing is started again;
* ``crash``: a network ends its process at each tile;
* ``full``: the folder is on a disk of 1 MB (root only);
* ``damaged``: a byte of a finished tile is changed.

Exit status 1 if a survey does not write the bytes of one process or does not say what is wrong, or if it ends later
than the same survey without faults by more than the time of a tile and 30 s for each fault. A survey whose scheduler is
not started again must end within that time after the kill.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import torch
from _record import record, write
from survey import PACKAGES, SURVEY, copies
from torch import nn

import shiplap_sparse3d as sparse3d
from shiplap_sparse3d.survey import SurveyModel

TILE_SECONDS = 0.3
ALLOWED = TILE_SECONDS + 30
STAGES = ("points", "classes", "write")
CORES: SimpleQueue[list[int]] = SimpleQueue()  # free ones, two for each survey


class Slow(nn.Module):
    """A network that takes its time for each tile; ``SURVEY_CRASH`` makes it end its process."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = sparse3d.SubMConv3d(5, 2, 3)

    def forward(self, x: Any) -> Any:
        if len(x.feats) > 1500 and "SURVEY_WORKER" in os.environ:  # no sample of the proof
            time.sleep(TILE_SECONDS)
            if "SURVEY_CRASH" in os.environ:
                os._exit(1)
        return self.conv(x)


torch.manual_seed(0)
model = SurveyModel(Slow(), voxel=(6.0, 6.0, 6.0), classes=(1, 2))


class Run:
    """``shiplap survey`` in a process of its own."""

    def __init__(self, source: Path, out: Path, *arguments: object, **environment: str) -> None:
        self.out, self.folder = out, out.with_name(f"{out.name}.survey")
        command = [sys.executable, "-m", "shiplap.cli", "survey", source, out, "--model", f"{__file__}:model"]
        command += ["--tile", 32, *arguments]
        self.cores = CORES.get()
        command = ["taskset", "-c", ",".join(map(str, self.cores)), *command]
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "SURVEY_WORKER": "1", **environment},
        )

    def reached(self, stage: str, count: int) -> bool:
        """Wait until ``count`` segments or tiles are done, or the output is being written."""
        while self.process.poll() is None:
            if stage == "write" and (self.out.parent / f".{self.out.name}.part").exists():
                return True
            if stage != "write" and len([*(self.folder / stage).glob("*.bin")]) >= count:
                return True
            time.sleep(0.01)
        return False

    def workers(self) -> list[psutil.Process]:
        """Return the local workers, which are Python's spawned children."""
        found = list[psutil.Process]()
        with contextlib.suppress(psutil.Error):  # one that ends meanwhile
            for child in psutil.Process(self.process.pid).children(recursive=True):
                found += [child] if any("spawn_main" in part for part in child.cmdline()) else []
        return found

    def end(self, seconds: float = 300) -> tuple[int, str, float]:
        """Wait for the end: exit status, messages, and seconds since the start."""
        _, text = self.process.communicate(timeout=seconds)
        CORES.put(self.cores)
        return self.process.returncode, text, time.monotonic() - self.begun


class Cluster:
    """A scheduler and two workers, each in a process of its own."""

    def __init__(self, port: int) -> None:
        self.address = f"tcp://127.0.0.1:{port}"
        script = "from distributed.cli.{0} import main; main()"
        environment = {**os.environ, "SURVEY_WORKER": "1"}
        calls = [
            ("dask_scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"),
            *[("dask_worker", self.address, "--nthreads", "1", "--no-dashboard")] * 2,
        ]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", script.format(name), *arguments],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for name, *arguments in calls
        ]

    def kill(self) -> None:
        """Kill all, with what they have started."""
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


class Faults:
    """The parts of the test, on one scan."""

    def __init__(self, folder: Path, kills: int, each: int, size: int, seed: int, jobs: int, json: Path | None) -> None:
        self.folder, self.kills, self.each, self.seed, self.writing = folder, kills, each, seed, threading.Lock()
        self.source = folder / "in.laz"
        copies(self.source, size)
        self.results: dict[str, Any] = {}
        self.json = json
        run = Run(self.source, folder / "one.laz", "--keep")
        assert run.end()[0] == 0
        self.done = {stage: len([*(run.folder / stage).glob("*.bin")]) for stage in STAGES}
        self.whole = (folder / "one.laz").read_bytes()
        # As many at a time as later, because surveys delay each other, also on cores of their own.
        plain = [Run(self.source, self.folder / f"plain{job}.laz", "--workers", 2) for job in range(jobs)]
        with ThreadPoolExecutor(jobs) as pool:
            ended = list(pool.map(Run.end, plain))
        for run, (status, text, _) in zip(plain, ended, strict=True):
            assert status == 0, text
            assert run.out.read_bytes() == self.whole
        self.plain = statistics.median(seconds for _, _, seconds in ended)
        print(f"two workers without a fault: {self.plain:.1f} s", flush=True)

    def check(self, name: str, run: Run, *, faults: int, wanted: str = "", killed: float | None = None) -> None:
        """Note whether a run ended in time with the right bytes, or with the error ``wanted``. If nothing was started
        again after a kill at the time ``killed``, the time counts from there.
        """
        status, text, seconds = run.end()
        right = wanted in text and status == 2 if wanted else status == 0 and run.out.read_bytes() == self.whole
        late = seconds - self.plain - faults * ALLOWED
        with self.writing:
            self.results[name] = {"right": right, "seconds": round(seconds, 1), "in time": late < 0, "faults": faults}
            if killed is not None:
                after = run.begun + seconds - killed
                self.results[name] |= {"in time": after < ALLOWED, "seconds after the kill": round(after, 1)}
            print(name, self.results[name], "" if right else text, flush=True)
            if self.json:
                kills = sum(each["faults"] for name, each in self.results.items() if name.startswith("run "))
                sources = ["benchmarks/survey_faults.py", SURVEY]
                write(self.json, record(sources, PACKAGES, kills=kills, plain=round(self.plain, 1), runs=self.results))

    def kill_workers(self, number: int, stages: Sequence[str]) -> None:
        """Kill one of two local workers once for each of ``stages``."""
        run, killed = Run(self.source, self.folder / f"kill{number}.laz", "--workers", 2), 0
        draw = random.Random(f"{self.seed} {number}")
        moments = [(STAGES.index(stage), draw.randint(1, max(1, self.done[stage] * 3 // 4))) for stage in stages]
        for stage, moment in sorted(moments):
            if run.reached(STAGES[stage], moment) and (workers := run.workers()):
                draw.choice(workers).kill()
                killed += 1
        self.check(f"run {number}, killed {killed} times", run, faults=killed)

    def parts(self, names: Sequence[str]) -> Iterator[Callable[[], None]]:
        """Yield the parts ``names``. That of the kills is one for each survey."""
        for name in names:
            if name != "kills":
                yield getattr(self, f"part_{name}")
        stages = STAGES * self.each
        for number, first in enumerate(range(0, self.kills if "kills" in names else 0, len(stages))):
            yield partial(self.kill_workers, number, stages[: self.kills - first])

    def part_scheduler(self) -> None:
        """Kill a scheduler and its workers in the middle, and start them again."""
        port = free_port()
        cluster = Cluster(port)
        run = Run(self.source, self.folder / "scheduler.laz", "--scheduler", cluster.address)
        reached = run.reached("classes", 10)
        cluster.kill()
        time.sleep(2)
        cluster = Cluster(port)
        self.check("scheduler killed and started again", run, faults=2)
        cluster.kill()
        assert reached

    def part_lost(self) -> None:
        """Kill a scheduler and its workers in the middle."""
        cluster = Cluster(free_port())
        run = Run(self.source, self.folder / "lost.laz", "--scheduler", cluster.address)
        run.reached("classes", 10)
        cluster.kill()
        self.check("scheduler killed", run, faults=1, wanted="SL827", killed=time.monotonic())
        self.check("finished without the scheduler", Run(self.source, self.folder / "lost.laz"), faults=0)

    def part_crash(self) -> None:
        """A network that ends its worker."""
        run = Run(self.source, self.folder / "crash.laz", "--workers", 2, SURVEY_CRASH="1")
        self.check("a tile that kills its worker", run, faults=4, wanted="SL828")

    def part_full(self) -> None:
        """A folder on a disk of 1 MB."""
        place = self.folder / "small"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", str(place)], check=True)
        try:
            run = Run(self.source, self.folder / "full.laz", "--workers", 2, "--folder", place / "work")
            self.check("a full disk", run, faults=0, wanted="SL602")
        finally:
            subprocess.run(["umount", str(place)], check=True)

    def part_damaged(self) -> None:
        """A byte of a tile that is done, changed while others are predicted."""
        run = Run(self.source, self.folder / "damaged.laz", "--workers", 2)
        run.reached("classes", 10)
        path = sorted((run.folder / "classes").glob("*.bin"))[0]
        path.write_bytes(path.read_bytes()[:-1] + b"\x07")
        self.check("a damaged tile", run, faults=1, wanted="SL824")
        self.check("finished after the damage", Run(self.source, self.folder / "damaged.laz"), faults=0)


def main() -> int:
    """Run the parts, print a line for each survey."""
    parts = ["kills", *(name.removeprefix("part_") for name in vars(Faults) if name.startswith("part_"))]
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--each", type=int, default=1, help="kills in each stage of a survey")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and workers of the kills")
    parser.add_argument("--copies", type=int, default=6, help="of the packaged scan, 110,000 points each")
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts)
    parser.add_argument("--jobs", type=int, default=1, help="surveys at a time")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    for job in range(options.jobs):
        CORES.put(cores[2 * job : 2 * job + 2] or cores)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        faults = Faults(
            Path(folder), options.kills, options.each, options.copies, options.seed, options.jobs, options.json
        )
        for part in [pool.submit(part) for part in faults.parts(options.parts)]:
            part.result()
    return int(not all(each["right"] and each["in time"] for each in faults.results.values()))


if __name__ == "__main__":
    sys.exit(main())
