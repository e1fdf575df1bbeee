"""Times of functions that take turns, and the bar for whoever waits."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shiplap.plugin_api import timing
from shiplap.plugin_api.timing import progress_bar, show_time, time_in_turn
from shiplap.tuning import measure


def test_medians_of_functions_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now = [0]  # ns: on a busy machine a short sleep takes as long as a long one
    monkeypatch.setattr(measure, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(timing, "monotonic", lambda: now[0] * 1e-9)

    def sleeper(name: str, nanoseconds: int) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            order.append(name)
            now[0] += nanoseconds
            return (torch.empty(0),)

        return run

    runs = {"long": sleeper("long", 4_000_000), "short": sleeper("short", 1_000_000)}
    medians = time_in_turn(runs, device="cpu", seconds=0.05)
    assert list(medians) == ["long", "short"]
    assert medians == {"long": pytest.approx(0.004), "short": pytest.approx(0.001)}
    assert order[-20:] == ["long", "short"] * 10


def test_at_least_five_samples_of_each() -> None:
    calls = 0

    def run() -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        time.sleep(0.002)
        return ()

    time_in_turn({"only": run}, device="cpu", seconds=0.0)
    assert calls == 1 + 2 + 5


def test_a_bar_that_nobody_watches_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(False) as messages:
        messages("convert", 1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *(
            (0.0021, "2.1 ms"),
            (1.0, "1 s"),
            (12.345, "12.3 s"),
            (45.6e-6, "45.6 us"),
            (0.0, "0 ns"),
            (7.777e-9, "7.78 ns"),
        ),
        *((0.9997, "1 s"), (999.6e-6, "1 ms"), (999.7e-9, "1 us"), (0.9994, "999 ms"), (999.4e-6, "999 us")),
    ],
)
def test_a_time_has_at_most_three_digits_and_no_exponent(seconds: float, shown: str) -> None:
    assert show_time(seconds) == shown
