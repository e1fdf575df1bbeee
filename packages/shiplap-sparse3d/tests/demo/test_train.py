"""The loop: the seed decides, losses fall, and the rows of a tile are all that is counted."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from shiplap_sparse3d.demo.scan import Scan
from shiplap_sparse3d.demo.train import TrainingRecipe, choose_backend, train_network

RECIPE = TrainingRecipe(steps=30, levels=2, channels=8)
POINTS = 2000


def slope() -> Scan:
    """Half of the points lie on the ground, half five metres above it."""
    draw = torch.Generator().manual_seed(0)
    xyz = torch.rand(POINTS, 3, generator=draw) * torch.tensor([80.0, 80.0, 0.2])
    ground = torch.rand(POINTS, generator=draw) < 0.5
    xyz[~ground, 2] += 5
    return Scan(xyz, ground)


def test_the_seed_decides() -> None:
    recipe = replace(RECIPE, steps=6)
    runs = [train_network([slope()], recipe, seed, lambda *_: None, compiled=False) for seed in (0, 0, 1)]
    first, same, other = (torch.tensor(run.losses) for run in runs)
    torch.testing.assert_close(first, same, rtol=1e-3, atol=1e-4)  # products on several threads differ in the last bit
    assert (first - other).abs().max() > 1e-2


def test_losses_fall() -> None:
    seen: list[tuple[int, int]] = []
    run = train_network(
        [slope()], RECIPE, 0, lambda stage, done, total, note: seen.append((done, total)), compiled=False
    )
    assert run.losses[-1] < 0.7 * run.losses[0]
    assert seen[: RECIPE.steps + 1] == [(i, RECIPE.steps) for i in range(RECIPE.steps + 1)]
    assert 500 <= run.points[0] <= run.points[1] <= POINTS
    assert 0 < run.first_step < run.seconds


@pytest.mark.long
def test_a_cpu_without_a_compiler_has_a_backend_that_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/compiler")
    assert [choose_backend(torch.device(name)) for name in ("cpu", "cuda")] == ["aot_eager", "inductor"]
    run = train_network([slope()], replace(RECIPE, steps=2), 0, lambda *_: None)
    plain = train_network([slope()], replace(RECIPE, steps=2), 0, lambda *_: None, compiled=False)
    torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(plain.losses), rtol=1e-3, atol=1e-4)
    monkeypatch.setenv("CXX", sys.executable)
    assert choose_backend(torch.device("cpu")) == "inductor"
