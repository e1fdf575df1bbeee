"""A launch that would take Triton's interpreter minutes is refused before it begins, where an audit asks for that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shiplap.kernels.triton import interpreter_budget
from shiplap.kernels.triton.interpreter_budget import (
    WARMUP_LAUNCHES,
    LaunchTooLong,
    limit_launch_time,
    measure_launch_time,
)
from shiplap_testing.forked import interpreted as run_interpreted

HERE = Path(__file__).resolve().parent


@pytest.fixture
def clock(monkeypatch):
    """Each program takes a second."""
    now = [0.0]
    monkeypatch.setattr(interpreter_budget.time, "thread_time", lambda: now[0])
    monkeypatch.setattr(interpreter_budget, "_seconds_per_program", {})

    def launch(programs, seconds=1.0):
        with measure_launch_time("kernel", (programs, 1)):
            now[0] += programs * seconds

    return launch


def test_a_launch_is_refused_by_what_earlier_ones_took(clock):
    with limit_launch_time(10.0):
        for _ in range(WARMUP_LAUNCHES):
            clock(4)
        with pytest.raises(LaunchTooLong, match=r"would run 11 programs for about 11 s: audit on a GPU"):
            clock(11)
        clock(9)
    clock(1000)  # nobody asked for a limit


def test_the_first_launch_prepares_the_kernel_and_does_not_count_alone(clock):
    with limit_launch_time(10.0):
        clock(1, seconds=60.0)
        for _ in range(WARMUP_LAUNCHES):
            clock(20, seconds=0.1)
        clock(50, seconds=0.1)


@pytest.mark.long
def test_an_audit_sets_samples_aside_that_the_interpreter_cannot_run():
    done = run_interpreted("-W", "ignore", HERE / "interpreted_audit.py")
    assert done.returncode == 0, done.stderr[-3000:]
    verdicts = json.loads(done.stdout)
    assert verdicts["kernels"][0] == "ok", verdicts
    assert "Triton's interpreter would run" in verdicts["kernels"][1]
    assert verdicts["numerics"][0] == "incomplete", "a sample that takes too long is no proof that the kernel hangs"
    assert "audit on a GPU for this sample" in verdicts["numerics"][1]
