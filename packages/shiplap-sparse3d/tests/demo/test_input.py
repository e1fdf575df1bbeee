"""Anybody's scan: what is read of it, which files are refused, and the rules that the network has to beat."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shiplap import ShiplapError
from shiplap_sparse3d.demo import DemoSettings
from shiplap_sparse3d.demo.read import read_scan
from shiplap_sparse3d.demo.rules import RADII, best_rules, lowest_within, over_cell
from shiplap_sparse3d.demo.scan import Scan, held_out_mask
from shiplap_sparse3d.demo.train import TrainingRecipe

laspy = pytest.importorskip("laspy")
pytest.importorskip("lazrs")

COUNT = 20_000


def hill(folder: Path, count: int = COUNT, **change: Any) -> Path:
    """A slope of 0.2 with trees 3 m and more above it: half of the points, class 5; the ground is class 2."""
    draw = np.random.default_rng(0)
    x, y = draw.uniform(0, 200, count), draw.uniform(0, 100, count)
    trees = draw.random(count) < 0.5
    las = laspy.create(point_format=6, file_version="1.4")
    las.header.scales, las.header.offsets = [0.001] * 3, [500_000.0, 5_000_000.0, 0.0]
    las.x, las.y = x + 500_000, y + 5_000_000
    las.z = 0.2 * x + np.where(trees, draw.uniform(3, 20, count), 0)
    las.return_number[:] = las.number_of_returns[:] = 1
    las.classification[:] = np.where(trees, 5, 2)
    for name, value in change.items():
        las[name][:] = value
    las.write(folder / "hill.laz")
    return folder / "hill.laz"


def test_points_and_classes(tmp_path: Path) -> None:
    scan = read_scan(hill(tmp_path), (2,), 1.0)
    assert len(scan) == COUNT
    assert scan.xyz.amin(0).tolist() == [0, 0, 0]
    assert 199 < float(scan.xyz[:, 0].max()) < 200
    assert 0.4 < float(scan.ground.float().mean()) < 0.6
    feet = read_scan(tmp_path / "hill.laz", (5, 9), 0.3048)
    assert torch.equal(feet.ground, ~scan.ground)
    assert torch.allclose(feet.xyz, scan.xyz * 0.3048, atol=1e-4)


def test_noise_and_early_returns_are_left_out(tmp_path: Path) -> None:
    number, code = np.ones(COUNT, np.uint8), np.where(np.arange(COUNT) % 2, 2, 5)
    number[:3000], code[3000:4000] = 2, 7
    path = hill(tmp_path, number_of_returns=number, classification=code)
    assert len(read_scan(path, (2,), 1.0)) == COUNT - 4000


@pytest.mark.parametrize(
    ("change", "classes", "metres", "got"),
    [
        ({"classification": 0}, (2,), 1.0, "class 0: 20,000"),
        ({"classification": 2}, (2,), 1.0, "class 2: 20,000"),
        ({}, (9,), 1.0, "class 2: "),
        ({"number_of_returns": 2}, (2,), 1.0, "no points"),
        ({}, (2,), 0.001, "an area 0.2 m wide"),
        ({"classification": np.r_[np.full(50, 2), np.full(COUNT - 50, 1)]}, (2,), 1.0, "points of ground"),
        (
            {"classification": np.r_[np.full(2000, 2), np.full(1000, 1), np.full(COUNT - 3000, 7)]},
            (2,),
            1.0,
            "3,000 last",
        ),
    ],
)
def test_scans_that_teach_nothing(
    change: dict[str, Any], classes: tuple[int, ...], metres: float, got: str, tmp_path: Path
) -> None:
    with pytest.raises(ShiplapError, match="SL826") as caught:
        read_scan(hill(tmp_path, **change), classes, metres)
    assert got in caught.value.got


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "scan.laz").write_text("no scan")
    with pytest.raises(ShiplapError, match="SL822"):
        read_scan(tmp_path / "scan.laz", (2,), 1.0)


def test_height_over_cell_by_hand() -> None:
    xyz = torch.tensor([[-0.5, 0, 5], [0.5, 0, 7], [1.5, 1.5, 6], [2.5, 0, 1]])
    assert over_cell(xyz, 2.0).tolist() == [0, 1, 0, 0]


def by_hand(xyz: Tensor, radius: float) -> Tensor:
    """Height above the lowest point of all 2 m cells whose centres are within ``radius``."""
    cell = ((xyz[:, :2] - xyz[:, :2].amin(0)) / 2).long()
    disjoint = (cell[:, None] - cell).square().sum(2)
    near = disjoint <= max(1, round(radius / 2)) ** 2
    return xyz[:, 2] - torch.where(near, xyz[:, 2], torch.inf).amin(1)


@pytest.mark.parametrize("extent", [(60.0, 40.0, 12.0), (150.0, 1.0, 5.0), (1.0, 130.0, 5.0)])
def test_lowest_within_by_brute_force(extent: tuple[float, float, float]) -> None:
    xyz = torch.rand(500, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor(extent)
    expected = torch.stack([by_hand(xyz, r) for r in RADII], 1)
    assert torch.equal(lowest_within(xyz, RADII), expected)
    assert bool((expected >= 0).all())


def test_a_wider_look_never_finds_less_depth(training: Scan) -> None:
    depth = lowest_within(training.xyz, RADII)
    assert bool((depth.diff(dim=1) >= 0).all())


def test_the_best_rules_on_a_slope(tmp_path: Path) -> None:
    """Over a slope of 0.2 the rule of slopes separates nearly all, and knows no held-out label."""
    scan = read_scan(hill(tmp_path), (2,), 1.0)
    held = held_out_mask(scan)
    cell, slope = best_rules(scan, held)
    assert (cell.name, slope.name) == ("height over cell", "slope")
    assert slope.iou > 0.95
    assert slope.iou >= cell.iou - 0.02
    falsified = Scan(scan.xyz, torch.where(held, ~scan.ground, scan.ground))
    other = best_rules(falsified, held)
    assert [rule.text for rule in other] == [cell.text, slope.text]
    assert other[1].iou < 0.1


def test_from_a_scan_to_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report speaks of the file, and of a rule that is better than a network of three steps."""
    pytest.importorskip("matplotlib")
    demo = importlib.import_module("shiplap_sparse3d.demo.run")
    monkeypatch.setattr(demo, "QUICK", TrainingRecipe(steps=3, levels=2, channels=4))
    monkeypatch.setattr(torch, "compile", lambda net, **_: net)  # test_run.py compiles
    settings = DemoSettings(quick=True, out=tmp_path / "report", audit=False, input=hill(tmp_path, 5000))
    result = demo.run_demo(settings)
    assert result.scan == str(tmp_path / "hill.laz")
    assert [rule.name for rule in result.rules] == ["height over cell", "slope"]
    assert result.training_points + result.held_out_points == 5000
    page = Path(result.html).read_text()
    assert "hill.laz" in page
    assert "Liberty" not in page
    assert "Geological" not in page
    assert ("Better than the network" in page) == any(rule.iou > result.iou for rule in result.rules)
