"""Notes of when each process of a survey is in which stage of a tile. Dask's workers import this module (a preload).

If the variable ``SURVEY_STAGES`` names a folder, each process writes a line for each stage into a file of its own
there: its name, the thread, the time at which it began, its seconds, and the seconds of processor time of its thread.
"""

from __future__ import annotations

import functools
import importlib
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

STAGES = "SURVEY_STAGES"  # a folder for the notes
SWITCH = "SURVEY_SWITCH"  # seconds between looks at Python's lock, instead of 0.005
POINTS = "SURVEY_POINTS"  # of a group of tiles on a GPU, instead of ``TOGETHER``


def _note(owner: Any, name: str, file: int) -> None:
    """Replace the function ``name`` of a module or class by one that notes its times in ``file``."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def noted(*args: Any, **more: Any) -> Any:
        began, clock, used = time.time(), time.perf_counter(), time.thread_time()
        try:
            return real(*args, **more)
        finally:
            took, used = time.perf_counter() - clock, time.thread_time() - used
            os.write(file, f"{name} {threading.get_ident()} {began:.6f} {took:.6f} {used:.6f}\n".encode())

    setattr(owner, name, noted)


def watch(library: str) -> None:
    """Note the stages of tiles in this process, by the survey of ``library``, if the environment wants it."""
    if os.environ.get(SWITCH):
        sys.setswitchinterval(float(os.environ[SWITCH]))
    if os.environ.get(POINTS):
        importlib.import_module("shiplap_sparse3d.survey.tasks").TOGETHER["cuda"] = int(os.environ[POINTS])
    if not os.environ.get(STAGES):
        return
    flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY
    file = os.open(Path(os.environ[STAGES]) / str(os.getpid()), flags, 0o600)
    if library == "oldsurvey":
        shares, predict = importlib.import_module("oldsurvey.shares"), importlib.import_module("oldsurvey.predict")
        _note(shares, "read_tile", file)
        _note(shares, "prepare_tile", file)
        _note(shares, "run_network", file)
        _note(predict.TileAnswer, "wait_for_result", file)
        return
    from shiplap_sparse3d.geometry import Geometry
    from shiplap_sparse3d.survey import SurveyModel, folder, tasks

    for owner, name in (
        (tasks, "read_points"), (tasks, "points_within"), (tasks, "question_of"), (SurveyModel, "scene"),
        (Geometry, "build"), (SurveyModel, "answer"), (folder.SurveyFolder, "write_result"),
    ):  # fmt: skip
        _note(owner, name, file)


def dask_setup(worker: Any) -> None:
    """Begin to note stages in a Dask worker, which calls this function of its preload."""
    watch("shiplap_sparse3d.survey")


def summary(folder: Path, first: float, last: float) -> dict[str, dict[str, list[float]]]:
    """Return, for each process, milliseconds for a call of each stage that began between the times ``first`` and
    ``last``: of the clock, and of the processor. ``after STAGE`` is the time from its end to the next stage of the same
    thread, that of the clock alone. Last comes the number of calls.
    """
    result = {}
    for path in sorted(folder.iterdir()):
        spans, threads = defaultdict[str, list[tuple[float, float]]](list), defaultdict[str, list[Any]](list)
        for line in path.read_text().splitlines():
            name, thread, *numbers = line.split()
            began, took, used = map(float, numbers)
            threads[thread].append((began, began + took, name))
            if first <= began <= last:
                spans[name].append((took, used))
        for calls in threads.values():
            ended, before = 0.0, ""
            for began, end, name in sorted(calls):
                if began >= ended:  # a stage within another one ends before it
                    if before and first <= ended <= last:
                        spans[f"after {before}"].append((began - ended, 0.0))
                    ended, before = end, name
        result[path.name] = {
            name: [round(1e3 * statistics.mean(part), 2) for part in zip(*of, strict=True)] + [len(of)]
            for name, of in sorted(spans.items())
        }
    return result
