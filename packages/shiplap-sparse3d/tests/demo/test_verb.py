"""``shiplap demo`` shows what the demonstration measured; what it measures is tested in tests/demo."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("laspy")
pytest.importorskip("lazrs")
pytest.importorskip("matplotlib")

from shiplap_sparse3d.demo import DemoResult, DemoSettings
from shiplap_sparse3d.demo.result import AuditVerdicts

RESULT = DemoResult(
    graphs=1,
    graph_breaks=0,
    recompiles=0,
    iou=0.9,
    baseline_iou=0.8,
    points_per_s=1e5,
    compiled_ms=10,
    eager_ms=20,
    audits={"sparse3d::conv": AuditVerdicts(15, 0, 1, ())},
    compile_s=20,
    train_s=30,
    total_s=60,
    training_points=70,
    held_out_points=30,
    tile_points=(1, 2),
    tile_voxels=(1, 2),
    parameters=5,
    losses=(1.0, 0.5),
    environment="here",
    html="shiplap-report/demo.html",
    png="shiplap-report/demo.png",
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[DemoSettings]:
    """Settings that the verb passed on; the run itself takes no time."""
    seen: list[DemoSettings] = []

    def run(settings: DemoSettings, progress: Any) -> DemoResult:
        seen.append(settings)
        progress("train", 1, 2, "loss 0.5")
        print("a chatty library")
        return RESULT

    monkeypatch.setattr("shiplap_sparse3d.demo.run_demo", run)
    return seen


def test_settings_arrive(run: Any, asked: list[DemoSettings], tmp_path: Path) -> None:
    result = run("demo", "--quick", "--seed", 4, "--no-audit", "-o", tmp_path / "new" / "report")
    assert result.exit_code == 0, result.output
    assert asked == [DemoSettings(quick=True, device="cpu", out=tmp_path / "new" / "report", seed=4, audit=False)]
    assert "held-out ground IoU" in result.stdout
    assert "0.900" in result.stdout
    assert "audit of sparse3d::conv" in result.stdout
    assert "15 ok, 1 skip" in result.stdout
    assert "skip: the check does not apply to the op" in " ".join(result.stdout.split())
    assert result.stdout.endswith("report: shiplap-report/demo.html\n")


def test_json_is_all_of_stdout(run: Any, asked: list[DemoSettings], tmp_path: Path) -> None:
    parsed = json.loads(run("demo", "--json", "-o", tmp_path).stdout)
    assert parsed["iou"] == 0.9
    assert parsed["audits"] == {"sparse3d::conv": {"ok": 15, "fail": 0, "skip": 1, "failed": [], "incomplete": 0}}


@pytest.mark.parametrize("bad", [{"graph_breaks": 1}, {"audits": {"a::b": AuditVerdicts(14, 1, 1, ("fresh",))}}])
def test_a_bad_result_leaves_status_1(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bad: dict[str, Any]
) -> None:
    monkeypatch.setattr("shiplap_sparse3d.demo.run_demo", lambda settings, progress: replace(RESULT, **bad))
    result = run("demo", "-o", tmp_path)
    assert result.exit_code == 1
    assert ("1 fail (fresh)" in result.stdout) == ("audits" in bad)


def test_missing_packages(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lazrs" else find(name))
    result = run("demo")
    assert result.exit_code == 2
    assert "SL603: required packages are not installed" in result.stderr
    assert "  got      no lazrs\n" in result.stderr
    assert '  fix      install them: pip install "shiplap-sparse3d[demo]"\n' in result.stderr


@pytest.mark.long
def test_unusable_output(process: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = process("demo", "--output", tmp_path / "file")
    assert (done.returncode, done.stdout) == (2, "")
    assert "SL602: the directory cannot be written" in done.stderr


def test_unavailable_device(run: Any) -> None:
    result = run("demo", "--device", "nowhere")
    assert result.exit_code == 2
    assert "SL605" in result.stderr


def test_a_scan_of_ones_own(run: Any, asked: list[DemoSettings], tmp_path: Path) -> None:
    result = run("demo", "--input", "own.laz", "--classes", "2, 9", "--unit", "0.3048", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert (asked[0].input, asked[0].classes, asked[0].unit) == (Path("own.laz"), (2, 9), 0.3048)


@pytest.mark.parametrize("bad", [("--classes", "ground"), ("--classes", "2,"), ("--classes", "256"), ("--unit", "0")])
def test_arguments_that_mean_nothing(run: Any, asked: list[DemoSettings], tmp_path: Path, bad: tuple[str, str]) -> None:
    result = run("demo", "--input", "own.laz", *bad, "-o", tmp_path)
    assert (result.exit_code, asked) == (2, [])
    assert "SL613" in result.stderr


def test_a_scan_that_is_not_there(process: Any, tmp_path: Path) -> None:
    done = process("demo", "--input", tmp_path / "none.laz", "-o", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "SL822" in done.stderr
