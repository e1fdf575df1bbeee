"""Two processes train together on the device: gradients meet by way of the host, and the model is the CPU's."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from shiplap_backend.project import Project
from shiplap_testing.forked import python
from tests.backend.examples import DISCRETE, built

SCRIPT = Path(__file__).parent / "group.py"


def reports(package: str, store: Path) -> list[dict[str, Any]]:
    """What each of the two processes printed."""

    def run(rank: int) -> dict[str, Any]:
        done = python("-W", "ignore", SCRIPT, package, rank, store)
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return report

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (0, 1)))


def as_on_the_cpu(package: Path, tmp_path: Path) -> None:
    want, got = reports("cpu", tmp_path / "cpu"), reports(str(package), tmp_path / "device")
    for ours, theirs in zip(got, want, strict=True):
        for a, b in zip(ours["trained"], theirs["trained"], strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-4, atol=1e-6)
        assert ours["collectives"] == theirs["collectives"]
    assert got[0]["trained"][0] == got[1]["trained"][0]  # the weights of the two are one


@pytest.mark.slow
def test_two_processes_train_one_model(project: Project, tmp_path: Path) -> None:
    as_on_the_cpu(project.package, tmp_path)


@pytest.mark.long
def test_with_memory_of_its_own(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    as_on_the_cpu(built(request.config, "discrete", DISCRETE).package, tmp_path)
