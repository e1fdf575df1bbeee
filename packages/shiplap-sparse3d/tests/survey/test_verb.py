"""``shiplap survey`` in a process as a user starts it."""

from __future__ import annotations

import contextlib
import json
import pty
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from shiplap_sparse3d.cli.survey import command
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


def visible_lines(written: str) -> list[str]:
    """The lines that a terminal shows after ``written``, whose cursor moves and erased lines are those of rich."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.startswith("\x1b"):
            row -= int(part[2:-1]) if part.endswith("A") else 0
        else:
            lines[row] = lines[row].ljust(column)[:column] + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]


def test_a_terminal_keeps_the_notes(corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars that are redrawn and removed do not erase a note, also not that of Ctrl-C."""

    def stopped(*arguments: object, progress: Any, **options: object) -> None:
        progress("workers", 0, 0, "dashboard of the workers: [b]")
        progress("read", 1, 2, "points")
        progress("workers", 0, 0, "no workers; waiting for them")
        progress("predict", 1, 2, "tiles")
        raise KeyboardInterrupt

    monkeypatch.setattr("shiplap_sparse3d.survey.survey", stopped)
    monkeypatch.setenv("TERM", "xterm")
    terminal, end = pty.openpty()
    with open(end, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with pytest.raises(typer.Exit) as stop:
            command(corner, tmp_path / "out.laz", f"{MODELS}:model")
    written = b""
    with open(terminal, "rb", 0) as shown, contextlib.suppress(OSError):  # the end of what was written
        while part := shown.read(1 << 16):
            written += part
    assert stop.value.exit_code == 130
    assert b"\x1b[2K" in written
    assert visible_lines(written.decode()) == [
        "dashboard of the workers: [b]",
        "no workers; waiting for them",
        "the survey was stopped; the same command continues it",
    ]
