"""Two ways into the command line: in this process, and as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.forked import python

ROOT = Path(__file__).resolve().parents[2]

Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("env", "--json")`` → result with ``exit_code``, ``stdout``, ``stderr``; in this process, from the root."""
    from shiplap.cli import app

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))  # targets extend it
    return lambda *args: CliRunner().invoke(app, [str(a) for a in args])


@pytest.fixture
def process() -> Run:
    """The same in a process of its own: ``returncode``, ``stdout``, ``stderr``."""

    def start(*args: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        return python("-m", "shiplap.cli", *args, cwd=cwd, env={**os.environ, "PYTHONPATH": path})

    return start
