"""Times of functions that take turns, and the bar for whoever waits."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shiplap.plugin_api.timing import progress_bar, show_time, time_in_turn


def test_medians_of_functions_in_turn() -> None:
    order: list[str] = []

    def sleeper(name: str, seconds: float) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            order.append(name)
            time.sleep(seconds)
            return (torch.empty(0),)

        return run

    medians = time_in_turn(
        {"long": sleeper("long", 0.004), "short": sleeper("short", 0.001)}, device="cpu", seconds=0.05
    )
    assert list(medians) == ["long", "short"]
    assert medians["long"] >= 0.004 > medians["short"] >= 0.001
    assert order[-10:] == ["long", "short"] * 5


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
    assert show_time(0.0021) == "2.1 ms"
