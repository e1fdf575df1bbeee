"""What cannot work is refused before any work, with an id, what was got, what was expected and a fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from shiplap.cli.app import app

for name in ("laspy", "lazrs", "matplotlib"):
    pytest.importorskip(name)


@pytest.fixture(autouse=True)
def _no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*args: Any) -> None:
        raise AssertionError("the training started")

    monkeypatch.setattr("shiplap_sparse3d.demo.run_demo", started)


def refused(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["demo", *map(str, arguments)])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    for field in ("where", "got", "expected", "fix"):
        assert f"\n  {field}" in done.stderr
    return done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_no_cuda(tmp_path: Path, device: str) -> None:
    text = refused("--device", device, "-o", tmp_path / "report")
    assert "SL605: the device is not available" in text
    assert f"--device {device}" in text
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("device", ["meta", "nowhere", "", "mps"])
def test_other_devices(tmp_path: Path, device: str) -> None:
    text = refused("--device", device, "-o", tmp_path / "report")
    assert "SL605: the demo does not run on this device" in text
    assert "expected cpu or cuda" in text
    assert "fix      run 'shiplap demo --device cpu'" in text


def test_output_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "SL602: the directory cannot be written" in refused("-o", output)


def test_output_is_on_a_read_only_file_system() -> None:
    assert "SL602: the directory cannot be written" in refused("-o", "/proc/shiplap-report")
