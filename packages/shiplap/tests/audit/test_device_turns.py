"""Audits that share a device: a sample that must be alone overlaps no other, in threads and in processes."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shiplap.audit import CHECKS, device_turns
from shiplap.audit.checks import load_check
from shiplap.audit.device_turns import device_turn, lock_folder, take_turn


def _samples(folder: str, log: str, name: str, alone: bool) -> None:
    """Run ten samples, and log the begin and the end of each."""
    for _ in range(10):
        with take_turn(Path(folder), "cuda:0", alone=alone):
            for mark in ("begins", "ends"):
                with open(log, "a") as file:
                    file.write(f"{name} {'alone' if alone else 'shared'} {mark}\n")
                os.sched_yield()


def _overlaps(log: Path) -> list[str]:
    """Return the lines at which a sample that must be alone was not."""
    running: dict[str, str] = {}
    faults = []
    for line in log.read_text().splitlines():
        name, kind, mark = line.split()
        if mark == "begins":
            running[name] = kind
            faults += [line] if len(running) > 1 and "alone" in running.values() else []
        else:
            del running[name]
    return faults


def test_threads_take_turns(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(_samples, str(tmp_path), str(log), f"t{n}", n == 0) for n in range(4)]
        for job in jobs:
            job.result(timeout=60)
    assert len(log.read_text().splitlines()) == 80
    assert _overlaps(log) == []


def test_processes_take_turns(tmp_path: Path) -> None:
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=_samples, args=(str(tmp_path), str(log), f"p{n}", n == 0)) for n in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    assert _overlaps(log) == []


def test_captures_and_looks_at_the_process_are_alone() -> None:
    assert {name for name in CHECKS if load_check(name).alone} == {"process", "cuda_graph", "cudagraph_trees"}


def test_a_sample_on_the_cpu_takes_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_turns, "take_turn", None)
    with device_turn("cpu", alone=True):
        pass
    assert lock_folder().stat().st_mode & 0o077 == 0
