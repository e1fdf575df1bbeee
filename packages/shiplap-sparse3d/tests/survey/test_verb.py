"""``shiplap survey`` in a process as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.survey.conftest import classes_of

MODELS = Path(__file__).parent / "models.py"


def test_json_says_what_was_done(run: Any, corner: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.laz"
    result = run("survey", corner, out, "--model", f"{MODELS}:model", "--tile", 48, "--json")
    assert result.exit_code == 0, result.stderr
    parsed = json.loads(result.stdout)
    assert (parsed["halo"], parsed["tile"], parsed["output"]) == (16, 48, str(out))
    assert parsed["field"]["before"] == [14, 14, 14]
    assert parsed["seen"]["after"][:2] == [14, 14]
    assert parsed["points"] == len(classes_of(out))
    assert parsed["predicted"] == parsed["tiles"] > 1
    shown = run("survey", corner, tmp_path / "again.laz", "--model", f"{MODELS}:build", "--tile", 48)
    assert "the network sees 14" in shown.stdout
    assert np.array_equal(classes_of(tmp_path / "again.laz"), classes_of(out))


def test_errors_come_before_the_work(run: Any, corner: Path, tmp_path: Path) -> None:
    def answer(*arguments: object, source: object = corner, out: object = tmp_path / "out.laz") -> str:
        result = run("survey", source, out, *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        return str(result.stderr)

    model = f"{MODELS}:model"
    assert "SL821" in answer("--model", model, "--tile", 18)
    assert "16 or more" in answer("--model", model, "--halo", 8)
    assert "SL825" in answer("--model", f"{MODELS}:modle")
    assert "SL825" in answer("--model", f"{MODELS}:VOXEL")
    assert "KeyError: 'weights'" in answer("--model", f"{MODELS}:lost")
    assert "SL501" in answer("--model", "nowhere.py:model")
    assert "SL822" in answer("--model", model, source=MODELS)
    assert "SL602" in answer("--model", model, out=tmp_path / "none" / "out.laz")
    assert "SL605" in answer("--model", model, "--device", "nowhere")
    assert list(tmp_path.iterdir()) == []
