"""The memory and the speed of a survey, each survey in a process of its own.

``python benchmarks/survey.py memory``: scans of 25, 50, 100 and 200 million points, made and classified by a network
that is constant, at the same time, with Dask workers. The largest resident memory of the client and of a worker must
not grow: exit status 1 if that of 200 million points is more than 10 % above that of 25 million.

``python benchmarks/survey.py speed``: copies of the packaged scan by one worker of one thread, by one of two threads,
and by two of one thread each, as ``--workers`` sets them on two cores. Each survey has two cores of its own of those
that ``taskset`` leaves, and as many surveys run at a time as there are pairs of cores. Seconds from the start of the
call to the output, and those of the stage that predicts. Starting the processes takes as long for any survey.

``python benchmarks/survey.py gpus --pool FOLDER``: the tiles of one survey by one GPU and by two, and by the pool of
workers that was before Dask, which ``FOLDER`` has as ``oldsurvey``. All surveys of all rounds start at the same time,
and predict one after the other, so that no rate has the start of a process, and none checks its model. Before them
surveys in one process predict all tiles, in groups and one by one, so that no survey that counts compiles kernels. The
first one would do it for all, for seconds at a time also in the middle of its tiles, where numbers of voxels are the
first multiples of 16. The rate is that of the tiles from a quarter of them on, without the last twentieth: then all
kernels are loaded. The record has the seconds of each tenth, too, those of the stages of a tile, and those of the
processor for a tile. Exit status 1 if a class is another than that of the one process. ``--kinds`` names the surveys:
``dask 2 6 0.001 0`` has six threads for each of its two workers, which look at Python's lock each millisecond and
predict groups of so many points (0: each tile alone; then some classes may differ), and ``here 1`` has no cluster. For
``speed`` the kinds are ``"one core"``, ``"one worker"`` and ``"two workers"``.

``python benchmarks/survey.py join RECORD ... --json FILE``: one record of the parts of several, which ran side by side.

``python benchmarks/survey.py pool --pool FOLDER``: write that pool into ``FOLDER``, from the history of the repository.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import _survey_models
import _survey_stages
import numpy as np
import psutil
import torch
from _record import ROOT, record, write

APART = 1_200.0  # feet from one copy to the next: the scan is 1,180 wide
WIDE, DENSITY = 2_000, 2.0  # metres of a made scan along y, points for each square metre
SURVEY = "packages/shiplap-sparse3d/src/shiplap_sparse3d/survey/*"
SOURCES = ["benchmarks/survey.py", "benchmarks/_survey_models.py", "benchmarks/_survey_stages.py", SURVEY]
BEFORE_DASK = "5b466588^"  # the last commit with the pool of workers
PACKAGES = ["laspy", "lazrs", "distributed"]
GPU_KINDS = ("dask 2", "pool 2", "dask 1", "pool 1")


def copies(target: Path, count: int) -> None:
    """Write ``count`` copies of the packaged scan side by side, one after the other in the file."""
    import laspy

    import shiplap_sparse3d.demo

    scan = laspy.read(Path(shiplap_sparse3d.demo.__file__).parent / "data" / "autzen_trim.laz")
    step = round(APART / scan.header.scales[0])
    with laspy.open(target, mode="w", header=scan.header) as writer:
        for _ in range(count):
            writer.write_points(scan.points)
            scan.X += step


def _fill(part: tuple[Path, int, int, int]) -> None:
    """Write some points of a made scan into its file: strips of one metre along y, one after the other."""
    import laspy

    path, first, count, offset = part
    draw, kind = np.random.default_rng(first), laspy.PointFormat(0).dtype()
    rows = np.memmap(path, kind, "r+", offset + first * kind.itemsize, count)
    x = np.arange(first, first + count) / (WIDE * DENSITY)
    y = draw.uniform(0, WIDE, count)
    rows["X"], rows["Y"] = x * 100, y * 100
    rows["Z"] = 800 * np.sin(x / 31) + 600 * np.cos(y / 17) + draw.exponential(150, count)
    rows["intensity"] = draw.integers(0, 4000, count)
    rows["bit_fields"] = 1 | 1 << 3


def made_scan(path: Path, points: int) -> None:
    """Write a LAS file of random points on a wavy ground, flown in strips, by all cores."""
    import laspy

    header = laspy.LasHeader(point_format=0, version="1.2")
    header.scales, header.offsets = np.full(3, 0.01), np.zeros(3)
    with laspy.open(path, mode="w", header=header):
        pass
    offset, size = path.stat().st_size, laspy.PointFormat(0).dtype().itemsize
    with path.open("r+b") as file:
        file.truncate(offset + points * size)
        file.seek(107)
        file.write(np.array([points, points, 0, 0, 0, 0], "<u4").tobytes())
    parts = [(path, first, min(1 << 20, points - first), offset) for first in range(0, points, 1 << 20)]
    with multiprocessing.get_context("fork").Pool(min(16, os.cpu_count() or 1)) as pool:
        pool.map(_fill, parts)


def _wait_at(gate: Path) -> None:
    """Make a file beside the file ``gate``, and wait for that file."""
    if not gate.exists():
        gate.with_name(f"{gate.name} waiting {os.environ.get('RANK', 0)}").touch()
    while not gate.exists():
        time.sleep(0.01)


def run_here(options: argparse.Namespace) -> None:
    """Run one survey in this process, and print what it took: the child of :class:`Run`."""
    library, seconds, start = importlib.import_module(options.library), dict[str, float](), time.perf_counter()
    more: dict[str, Any] = {}
    model = _survey_models.MODELS[options.model](library)
    _survey_stages.watch(options.library)
    if options.library == "oldsurvey":
        model.net.to(options.device.replace("cuda", f"cuda:{os.environ['LOCAL_RANK']}"))
    else:
        more = {"workers": options.count or None, "device": options.device}
        for name in ("cluster", "run") if options.threads else ():
            importlib.import_module(f"{options.library}.{name}").THREADS = options.threads

    if options.gate:  # the checks of all surveys at a time keep the cores from those that compile kernels
        library.SurveyModel.check = lambda model: model.field

    def progress(stage: str, done: int, total: int, note: str) -> None:
        # Before a worker of today's code runs the network, to find out whether it takes batches.
        if options.gate and (
            stage == "predict" if options.library == "oldsurvey" else (stage, done) == ("read", total)
        ):
            _wait_at(Path(options.gate))
        now = time.perf_counter() - start
        seconds.setdefault(f"{stage} began", now)
        if done == total:
            seconds[f"{stage} ended"] = now

    result = library.survey(
        *options.paths, model, tile=options.tile, keep=bool(options.gate), progress=progress, **more
    )
    print(json.dumps({"seconds": time.perf_counter() - start, "tiles": result.tiles, "stages": seconds}))


class Run:
    """One survey in a process of its own, or by the processes of the old pool; it is watched."""

    def __init__(
        self, source: Path, target: Path, model: str, count: int, tile: int | None = None, **more: Any
    ) -> None:
        self.target, self.classes = target, target.with_name(f"{target.name}.survey") / "classes"
        self.library, pool = more.get("library", "shiplap_sparse3d.survey"), more.get("pool")
        self.gate = more.get("gate", target)  # a file: when it is there, the survey predicts
        command = [sys.executable, __file__, "one", source, target, "--model", model, "--library", self.library]
        command += ["--device", more.get("device", "cpu"), *(["--tile", tile] if tile else [])]
        command += ["--gate", more["gate"]] if more.get("gate") else []
        command += ["--threads", more["workers_threads"]] if more.get("workers_threads") else []
        command = ["taskset", "-c", ",".join(map(str, more["cores"])), *command] if "cores" in more else command
        ranks = count if self.library == "oldsurvey" else 1
        self.waiting = [self.gate.with_name(f"{self.gate.name} waiting {rank}") for rank in range(ranks)]
        threads = {"OMP_NUM_THREADS": str(more["threads"])} if more.get("threads") else {}
        self.processes = []
        for rank in range(ranks):
            place = {"PYTHONPATH": os.pathsep.join([str(pool), os.environ.get("PYTHONPATH", "")])} if pool else {}
            place |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)} if pool else threads
            place |= more.get("environment", {})
            arguments = [str(part) for part in (*command, "--count", count)]
            process = subprocess.Popen(
                arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                env={**os.environ, **place},
            )  # fmt: skip
            self.processes.append(process)
        self.memory = dict[int, float]()

    def look(self) -> bool:
        """Note the largest resident memory of each process and how many tiles there are. Return whether it runs."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            for each in (process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))):
                try:
                    status = Path(f"/proc/{each}/status").read_text().split()
                    self.memory[each] = int(status[status.index("VmHWM:") + 1]) / 1e3
                except (OSError, ValueError):  # it has ended
                    continue
        return bool(running)

    def times(self) -> list[float]:
        """Return the times at which each tile was written, in ascending order."""
        return sorted(path.stat().st_mtime_ns / 1e9 for path in self.classes.glob("*.bin"))

    def processor(self) -> dict[int, float]:
        """Return the seconds of processor time so far of each process, by its number."""
        seconds = dict[int, float]()
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                for each in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
                    seconds[each.pid] = sum(each.cpu_times()[:2])
        return seconds

    def end(self) -> dict[str, Any]:
        """Wait for the end, and return what the first process printed, with the memory."""
        while self.look():
            time.sleep(0.5)
        ended = [process.communicate() for process in self.processes]
        if any(process.returncode for process in self.processes):
            raise SystemExit("\n".join(errors for _, errors in ended))
        own = {process.pid for process in self.processes}
        client = max(self.memory[pid] for pid in own)
        workers = max((size for pid, size in self.memory.items() if pid not in own), default=0.0)
        return {**json.loads(ended[0][0]), "client MB": client, "worker MB": workers}

    def stop(self) -> str:
        """Kill all processes with their children, and return what they have said."""
        said = ""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            said += "".join(process.communicate())
        return said


def memory(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run surveys of several sizes at the same time, with workers in proportion to their sizes."""
    cores, sizes = len(os.sched_getaffinity(0)), options.millions
    made = time.monotonic()
    for size in sizes:
        made_scan(folder / f"{size}.las", size * 1_000_000)
    made = time.monotonic() - made
    share = {size: max(1, round((cores - len(sizes)) * size / sum(sizes))) for size in sizes}
    runs = {
        size: Run(folder / f"{size}.las", folder / f"out{size}.las", "constant", share[size], tile=options.tile or 256)
        for size in sizes
    }
    while sum(run.look() for run in runs.values()):
        time.sleep(0.2)
    results = {f"{size} million": {**run.end(), "workers": share[size]} for size, run in runs.items()}
    for name, result in results.items():
        print(name, {key: round(value) for key, value in result.items() if key != "stages"}, flush=True)
    first, last = results[f"{sizes[0]} million"], results[f"{sizes[-1]} million"]
    growth = {key: round(last[key] / first[key] - 1, 4) for key in ("client MB", "worker MB")}
    print("growth", growth, f"scans made in {made:.0f} s")
    return {"surveys": results, "growth": growth, "right": max(growth.values()) < 0.1}


def speed(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the same survey by one core, by one worker with two threads and by two workers, on two cores each."""
    source, runs, cores = folder / "in.laz", list[dict[str, Any]](), sorted(os.sched_getaffinity(0))
    pairs = [cores[at : at + 2] for at in range(0, len(cores) - 1, 2)]
    if options.target:  # one core predicts one copy, in the process of the survey
        copies(source, 1)
        run = Run(source, folder / "first.laz", options.model, 0, options.tile or 64, cores=pairs[0], threads=1).end()
        options.copies = max(
            2, round(options.target / (run["stages"]["predict ended"] - run["stages"]["predict began"]))
        )
    copies(source, options.copies)
    kinds = {"one core": (1, 1), "one worker": (1, None), "two workers": (2, None)}
    kinds = {kind: how for kind, how in kinds.items() if kind in (options.kinds or kinds)}
    waiting = [kind for turn in range(options.rounds) for kind in (kinds if turn % 2 == 0 else reversed(kinds))]
    while waiting:
        some, waiting = waiting[: len(pairs)], waiting[len(pairs) :]
        begun = []
        for kind, pair in zip(some, pairs, strict=False):
            (count, threads), target = kinds[kind], folder / f"{len(runs) + len(begun)}.out.laz"
            begun.append(Run(source, target, options.model, count, options.tile or 64, cores=pair, threads=threads))
        while sum([run.look() for run in begun]):
            time.sleep(2)  # a look reads the state of every process of the machine, on the cores of the surveys
        for kind, run in zip(some, begun, strict=True):
            runs.append({"kind": kind, **run.end()})
            stages = runs[-1]["stages"]
            runs[-1]["predict"] = stages["predict ended"] - stages["predict began"]
            print(kind, {key: round(runs[-1][key], 1) for key in ("seconds", "predict")}, flush=True)
    ratios = dict[str, dict[str, float]]()
    for key in ("seconds", "predict"):
        of = {kind: statistics.median(run[key] for run in runs if run["kind"] == kind) for kind in kinds}
        ratios[key] = {kind: round(of[kind] / of["two workers"], 3) for kind in kinds}
    same = len({path.read_bytes() for path in folder.glob("*.out.laz")}) == 1
    print("times two workers:", ratios, "" if same else "OTHER BYTES")
    return {"copies": options.copies, "model": options.model, "runs": runs, "over two": ratios, "right": same}


def pool(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write the survey package of the commit before Dask into a folder, under the name ``oldsurvey``."""
    target = options.pool / "oldsurvey"
    archive = folder / "old.tar"
    subprocess.run(["git", "archive", "-o", archive, BEFORE_DASK, SURVEY.removesuffix("/*")], check=True, cwd=ROOT)
    with tarfile.open(archive) as old:
        old.extractall(folder, filter="data")
    shutil.copytree(folder / SURVEY.removesuffix("/*"), target)
    for path in target.glob("*.py"):
        text = path.read_text().replace("shiplap_sparse3d.survey", "oldsurvey")
        # It had no digest of a tensor without axes, as a batch norm has.
        path.write_text(text.replace(".contiguous().view(torch.uint8)", ".flatten().contiguous().view(torch.uint8)"))
    return {"right": True}


def keep_record(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write the result so far as a part of the record, of which the other parts stay."""
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        device = torch.cuda.get_device_name() if options.what == "gpus" and torch.cuda.is_available() else ""
        part = record(SOURCES, PACKAGES, device, **result)
        write(options.json, {**record(SOURCES, PACKAGES), **known, options.part or options.what: part})


def _sort_here(options: argparse.Namespace, folder: Path) -> int:
    """Sort the points of ``in.las`` with twelve processes at most into ``sorted``, for surveys of today's code to begin
    with. Return the number of tiles.
    """
    from shiplap_sparse3d import survey
    from shiplap_sparse3d.survey import run, tasks

    model = _survey_models.MODELS[options.model](survey)
    job = run.open_job(folder / "in.las", folder / "sorted", model, (options.tile,))
    job = replace(job, model=replace(model, net=torch.nn.Identity()))  # weights that nobody needs would be sent, too
    processes = min(12, len(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("spawn")
    with job.folder.open_for_work(), context.Pool(processes, torch.set_num_threads, (1,)) as pool:
        return len(job.with_points(pool.map(partial(tasks.sort_segment, job), job.segments, chunksize=3)).tiles)


def _start_all(options: argparse.Namespace, folder: Path) -> dict[str, Run]:
    """Start all surveys of all rounds, and return those that wait before their first tile in time, in the order in
    which they are to predict. The first round is ``dask 2 0``, ``pool 2 0`` and so on, and every second one is turned
    round.

    Two other surveys predict meanwhile, in one process each, and end before they go on: they compile the kernels for
    groups of tiles and for single ones, and write them to the disk, whence all of them load them. The classes of the
    first stay, for a comparison.
    """
    runs, until = dict[str, Run](), time.monotonic() + options.patience
    rounds = [
        (name, turn) for turn in range(options.rounds) for name in (options.kinds or GPU_KINDS)[:: 1 - turn % 2 * 2]
    ]
    rounds += [(name, 0) for name in options.last]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    for kind_name, turn in (("warm 0", 0), ("warm 0 3 0.005 0", 0), *rounds):
        kind, count, *settings = kind_name.split()
        target = folder / f"{(name := f'{kind_name} {turn}')}.las"
        if kind != "pool":
            shutil.copytree(folder / "sorted", target.with_name(f"{target.name}.survey"), copy_function=os.link)
        (notes := folder / f"{name} stages").mkdir()
        more = {"device": options.device, "pool": options.pool if kind == "pool" else None}
        more |= {"library": "oldsurvey"} if kind == "pool" else {}
        more |= {"workers_threads": settings[0]} if settings else {}
        preload = {"DASK_DISTRIBUTED__WORKER__PRELOAD": _survey_stages.__file__, _survey_stages.STAGES: str(notes)}
        more["environment"] = preload | dict(
            zip((_survey_stages.SWITCH, _survey_stages.POINTS), settings[1:], strict=False)
        )
        gate = folder / name
        if kind == "warm":  # each on a GPU of its own, if there are two
            gate.touch()
            more["environment"]["CUDA_VISIBLE_DEVICES"] = gpus.split(",")[-1 if settings else 0]
        count = count if kind in ("dask", "pool") else "0"
        runs[name] = Run(folder / "in.las", target, options.model, int(count), options.tile, gate=gate, **more)
    waiting = set(runs)
    while waiting and time.monotonic() < until:
        time.sleep(0.1)
        for name in [*waiting]:
            ended = [process.poll() is not None for process in runs[name].processes]
            if any(ended) or (name[:4] != "warm" and all(gate.exists() for gate in runs[name].waiting)):
                waiting.remove(name)
                print(name, "ended" if any(ended) else "waits", f"{until - time.monotonic():.0f} s left", flush=True)
    for name in [name for name, run in runs.items() if name in waiting or run.processes[0].poll() is not None]:
        said = runs.pop(name).stop()
        print(name, "is left out" if name[:4] != "warm" or name in waiting else "is done", said[-2000:], flush=True)
    return runs


def _predict_tiles(name: str, run: Run, tiles: int, options: argparse.Namespace) -> dict[str, Any]:
    """Let the survey ``run`` predict for ``options.patience`` seconds at most. Return its rate, the seconds of each
    tenth of its tiles, and for each process the milliseconds of its processor and of the stages for a tile.
    """
    until, used = time.monotonic() + options.patience, list[tuple[float, dict[int, float]]]()
    first, last = round(0.25 * tiles), round(0.95 * tiles) - 1
    run.gate.touch()
    while run.processes[0].poll() is None and (made := len([*run.classes.glob("*.bin")])) < 0.97 * tiles:
        if made >= first:
            used.append((time.time(), run.processor()))
        time.sleep(0.05)
        if time.monotonic() > until:
            break
    said, times = run.stop(), run.times()
    if len(times) < 0.95 * tiles or last <= first:
        print(name, f"has {len(times)} of {tiles} tiles", said[-2000:], flush=True)
        return {}
    seconds = times[last] - times[first]
    result = {"rate": (last - first) / seconds}
    result["tenths"] = [round(times[part * (tiles - 1) // 10] - times[0], 3) for part in range(10)]
    if len(used) > 1:  # the processes that worked, from the one that did most
        (began, before), (ended, after) = used[0], used[-1]
        share = [(after[pid] - before.get(pid, 0.0)) / (ended - began) for pid in after]
        result["cores"] = [round(each, 2) for each in sorted(share, reverse=True) if each > 0.01]
    notes = run.gate.with_name(f"{run.gate.name} stages")
    result["stages"] = [each for each in _survey_stages.summary(notes, times[first], times[last]).values() if each]
    print(name, f"{result['rate']:.2f} tiles a second; tenths after {result['tenths']}", flush=True)
    print("  cores", result.get("cores"), *result["stages"], sep="\n  ", flush=True)
    return result


def gpus(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Predict the tiles of a survey by one and by two GPUs, with Dask and with the old pool, in turn."""
    begun = time.monotonic()
    made_scan(folder / "in.las", round(options.millions[0] * 1e6))
    tiles = _sort_here(options, folder)
    print(f"sorted after {time.monotonic() - begun:.0f} s", flush=True)
    runs_of, until = dict[str, list[dict[str, Any]]](), begun + options.limit
    runs, result, same = _start_all(options, folder), dict[str, Any](), True
    right = {path.name: path.read_bytes() for path in (folder / "warm 0 0.las.survey" / "classes").glob("*.bin")}
    for name, run in runs.items():
        if time.monotonic() > until:
            print(name, "is left out", run.stop()[-2000:], flush=True)
        elif measured := _predict_tiles(name, run, tiles, options):
            if not name.startswith("pool") and len(name.split()) < 6:  # with the groups of the one process
                same &= all(path.read_bytes() == right.get(path.name) for path in run.classes.glob("*.bin"))
            runs_of.setdefault(name.rpartition(" ")[0], []).append(measured)
            result = _compare(options, tiles, runs_of, same and len(right) == tiles)
            keep_record(options, result)
    print({key: value for key, value in result.items() if key != "runs"}, flush=True)
    return result or {"right": False}


def _compare(
    options: argparse.Namespace, tiles: int, runs: dict[str, list[dict[str, Any]]], same: bool
) -> dict[str, Any]:
    """Return the result of :func:`gpus` so far: all runs, and the medians of their rates with the ratios of these."""
    middle = {name: round(statistics.median(run["rate"] for run in of), 2) for name, of in runs.items()}
    result: dict[str, Any] = {"tiles": tiles, "points": round(options.millions[0] * 1e6), "model": options.model}
    result |= {"runs": runs, "medians": middle}
    for label, of, to in (
        ("two over one", "dask 2", "dask 1"),
        ("dask over pool, 1", "dask 1", "pool 1"),
        ("dask over pool, 2", "dask 2", "pool 2"),
    ):
        if of in middle and to in middle:
            result[label] = round(middle[of] / middle[to], 3)
    return result | {"right": same}  # the classes of Dask's tiles are those of one process


def main() -> int:
    """Measure, print a line for each survey, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "speed", "gpus", "pool", "join", "one"))
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument(
        "--millions", type=lambda text: float(text) if "." in text else int(text), nargs="*", default=[25, 50, 100, 200]
    )
    parser.add_argument("--copies", type=int, default=30)
    parser.add_argument("--target", type=float, help="for speed: as many copies as one core predicts in these seconds")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds, after which no survey begins to predict")
    parser.add_argument("--patience", type=float, default=120.0, help="for gpus: seconds for the start of a survey")
    parser.add_argument("--tile", type=int)
    parser.add_argument("--model", choices=_survey_models.MODELS, default="wide", help="memory has its own")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pool", type=Path)
    parser.add_argument("--kinds", nargs="*", help="for gpus and for speed; all of them by default")
    parser.add_argument("--last", nargs="*", default=[], help="for gpus: more kinds, once after all rounds")
    parser.add_argument("--folder", type=Path, help="for scans and outputs, where there is room")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", help="of the record, by default the name of the measurement")
    for name, default in (("--library", "shiplap_sparse3d.survey"), ("--count", "1")):
        parser.add_argument(name, default=default, help=argparse.SUPPRESS)
    parser.add_argument("--gate", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "one":
        options.count = int(options.count)
        run_here(options)
        return 0
    if options.what == "join":
        write(options.json, {key: part for path in options.paths for key, part in json.loads(path.read_text()).items()})
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        result = {"memory": memory, "speed": speed, "gpus": gpus, "pool": pool}[options.what](options, Path(place))
    keep_record(options, result)
    return int(not result["right"])


if __name__ == "__main__":
    sys.exit(main())
