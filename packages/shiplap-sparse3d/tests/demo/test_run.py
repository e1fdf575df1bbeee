"""From scan to report in three steps, what the network is allowed to see, and what is left behind on the way."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shiplap_sparse3d.demo import DemoResult, DemoSettings, evaluate
from shiplap_sparse3d.demo.scan import Scan
from shiplap_sparse3d.demo.score import iou
from shiplap_sparse3d.demo.tiles import FeatureScaling, random_tiles
from shiplap_sparse3d.demo.train import TrainingRecipe

demo = importlib.import_module("shiplap_sparse3d.demo.run")  # the package's attribute `run` is the function

REQUIRED = {
    "graphs",
    "graph_breaks",
    "recompiles",
    "iou",
    "baseline_iou",
    "points_per_s",
    "compiled_ms",
    "eager_ms",
    "audits",
}
SMALL = TrainingRecipe(steps=3, levels=2, channels=4)


class Ran:
    """One short run on ``scan``: its result, folder, progress, and the thread counts before and after."""

    def __init__(self, scan: Scan, folder: Path) -> None:
        self.stages: list[tuple[str, int, int]] = []
        self.folder, self.before = folder / "new" / "report", torch.get_num_threads()
        settings = DemoSettings(quick=True, out=self.folder, audit=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(demo, "QUICK", SMALL)
            patch.setattr(demo, "load_shipped_scan", lambda: scan)
            patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
            self.result: DemoResult = demo.run_demo(
                settings, lambda stage, done, total, note: self.note(stage, done, total)
            )
        self.after = torch.get_num_threads()

    def note(self, stage: str, done: int, total: int) -> None:
        self.stages.append((stage, done, total))


@pytest.fixture(scope="module")
def ran(part: Scan, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(part, tmp_path_factory.mktemp("demo"))


@pytest.mark.long
def test_the_result_on_the_whole_scan(scan: Scan, tmp_path: Path) -> None:
    parsed = Ran(scan, tmp_path).result.json()
    assert (parsed["graphs"], parsed["graph_breaks"], parsed["recompiles"]) == (1, 0, 0)
    assert parsed["baseline_iou"] == pytest.approx(0.221, abs=0.005)
    assert parsed["training_points"] + parsed["held_out_points"] == 93_728


@pytest.mark.long
def test_the_result_has_every_number(ran: Ran, part: Scan, part_held: Tensor) -> None:
    parsed = json.loads(json.dumps(ran.result.json()))
    assert set(parsed) >= REQUIRED
    assert parsed["graph_breaks"] == 0
    assert parsed["graphs"] == 1
    assert parsed["recompiles"] == 0
    assert 0 <= parsed["iou"] <= 1
    assert parsed["baseline_iou"] == pytest.approx(
        iou(evaluate.predict_by_height(part)[part_held], part.ground[part_held])
    )
    assert min(parsed[name] for name in ("points_per_s", "compiled_ms", "eager_ms", "compile_s", "train_s")) > 0
    assert parsed["audits"] == {}
    assert len(parsed["losses"]) == SMALL.steps
    assert (parsed["training_points"], parsed["held_out_points"]) == (int((~part_held).sum()), int(part_held.sum()))


@pytest.mark.long
def test_two_files_and_nothing_else(ran: Ran) -> None:
    assert {p.name for p in ran.folder.iterdir()} == {"demo.html", "demo.png"}
    assert (ran.result.html, ran.result.png) == (str(ran.folder / "demo.html"), str(ran.folder / "demo.png"))
    assert (ran.folder / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_every_stage_ends(ran: Ran) -> None:
    """A bar that starts, stops short and stays there is worse than none."""
    stages = [stage for stage, _ in itertools.groupby(name for name, _, _ in ran.stages)]
    assert stages == ["read", "train", "evaluate", "report"]
    for stage in stages:
        seen = [(done, total) for name, done, total in ran.stages if name == stage]
        assert seen[0][0] == 0  # before the work: the first step compiles
        assert seen[-1][0] == seen[-1][1]


@pytest.mark.long
def test_threads_are_given_back(ran: Ran) -> None:
    assert ran.before == ran.after


# --- what the network is allowed to see


class Stop(Exception):
    """Ends the run where the training would begin."""


def areas_of(patch: pytest.MonkeyPatch, scan: Scan, split: Tensor | None = None) -> list[Scan]:
    """What ``run`` hands to the training if this is the scan."""
    seen: list[Scan] = []

    def fit(areas: list[Scan], *rest: Any) -> None:
        seen.extend(areas)
        raise Stop

    patch.setattr(demo, "load_shipped_scan", lambda: scan)
    patch.setattr(demo, "train_network", fit)
    if split is not None:
        patch.setattr(demo, "held_out_mask", lambda _: split)
    with pytest.raises(Stop):
        demo.run_demo(DemoSettings(quick=True))
    return seen


def drawn(areas: list[Scan]) -> list[Tensor]:
    tiles = itertools.islice(random_tiles(FeatureScaling.of(areas)[1], 2, 0), 3)
    return [
        t for tile in tiles for t in (tile.voxels.feats, tile.voxels.coords, tile.points, tile.inverse, tile.ground)
    ]


def test_no_held_out_point_is_trained_on(monkeypatch: pytest.MonkeyPatch, scan: Scan, held: Tensor) -> None:
    areas = areas_of(monkeypatch, scan)
    assert sum(map(len, areas)) == int((~held).sum())
    assert all(float(area.xyz[:, 0].max()) < float(scan.xyz[held, 0].min()) for area in areas)


def test_tiles_do_not_depend_on_held_out_points(monkeypatch: pytest.MonkeyPatch, part: Scan, part_held: Tensor) -> None:
    """Deleted, or with other heights and labels: the tiles of the training stay as they are, to the bit."""
    expected = drawn(areas_of(monkeypatch, part))
    xyz, ground = part.xyz.clone(), part.ground.clone()
    xyz[part_held, 2], ground[part_held] = -1000, ~ground[part_held]
    assert all(map(torch.equal, drawn(areas_of(monkeypatch, Scan(xyz, ground))), expected))
    rest = part.take(~part_held)
    nothing = torch.zeros(len(rest), dtype=torch.bool)
    assert all(map(torch.equal, drawn(areas_of(monkeypatch, rest, nothing)), expected))


# --- files


def test_threads_are_given_back_after_a_failure(monkeypatch: pytest.MonkeyPatch, scan: Scan) -> None:
    before = torch.get_num_threads()
    areas_of(monkeypatch, scan)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("when", ["write_bytes", "replace"])
def test_an_interrupt_leaves_the_old_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str) -> None:
    page, image = tmp_path / "demo.html", tmp_path / "demo.png"
    page.write_bytes(b"old")
    real = getattr(Path, when)

    def interrupted(self: Path, *args: Any) -> None:
        if when == "write_bytes":
            real(self, b"ha")  # half
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, when, interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo._write_files({image: b"half", page: b"new"})
    assert [p.name for p in tmp_path.iterdir()] == ["demo.html"]
    assert page.read_bytes() == b"old"


def test_files_are_replaced(tmp_path: Path) -> None:
    page = tmp_path / "new" / "demo.html"
    for content in (b"one", b"two"):
        demo._write_files({page: content})
        assert page.read_bytes() == content
    assert list(page.parent.iterdir()) == [page]
