"""Audits that share a device: a sample that must be alone overlaps no other of its process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shiplap.audit import CHECKS, device_turns
from shiplap.audit.checks import load_check
from shiplap.audit.device_turns import device_turn

HOLD_TURN = """
from shiplap.audit.device_turns import device_turn
with device_turn("cuda:0", alone=True):
    print("holds", flush=True)
    input()
"""


def _samples(log: list[tuple[str, bool, str]], name: str, alone: bool) -> None:
    """Run ten samples, and log the begin and the end of each."""
    for _ in range(10):
        with device_turn("cuda:0", alone=alone):
            log.append((name, alone, "begins"))
            time.sleep(0)  # another thread may run
            log.append((name, alone, "ends"))


def _overlaps(log: list[tuple[str, bool, str]]) -> list[str]:
    """Return the names of the samples that began while another ran and one of both had to be alone."""
    running: dict[str, bool] = {}
    faults = []
    for name, alone, mark in log:
        if mark == "begins":
            running[name] = alone
            faults += [name] if len(running) > 1 and any(running.values()) else []
        else:
            del running[name]
    return faults


def test_threads_take_turns() -> None:
    log: list[tuple[str, bool, str]] = []
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(_samples, log, f"t{n}", n < 2) for n in range(4)]
        for job in jobs:
            job.result(timeout=60)
    assert len(log) == 80
    assert _overlaps(log) == []


def test_samples_that_share_run_at_the_same_time() -> None:
    both = threading.Barrier(2)

    def sample() -> None:
        with device_turn("cuda:0", alone=False):
            both.wait(timeout=60)  # raises if the other does not come

    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(sample) for _ in range(2)]:
            job.result(timeout=60)


def test_an_error_ends_the_turn() -> None:
    for alone in (True, False):
        with pytest.raises(KeyError), device_turn("cuda:0", alone=alone):
            raise KeyError
    with device_turn("cuda:0", alone=True):
        pass


def test_a_turn_holds_up_no_other_process() -> None:
    """Many processes audit on one machine, and one of them may take minutes for a sample that is alone."""
    with subprocess.Popen([sys.executable, "-c", HOLD_TURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin
        assert other.stdout
        assert other.stdout.readline() == b"holds\n"
        with device_turn("cuda:0", alone=True):
            assert other.poll() is None
        other.stdin.close()


def test_captures_and_looks_at_the_process_are_alone() -> None:
    assert {name for name in CHECKS if load_check(name).alone} == {"process", "cuda_graph", "cudagraph_trees"}


def test_a_sample_on_the_cpu_takes_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_turns, "_turns", None)
    with device_turn("cpu", alone=True):
        pass
