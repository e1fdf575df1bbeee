"""Torch's database of modules on the device: forward, gradients, strides and parameters are as on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shiplap_backend.project import Project
from shiplap_testing.forked import python


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("samples", "step", "least"), [(1, 12, 6), pytest.param(2, 1, 200, marks=pytest.mark.long)])
def test_every_module_is_as_on_the_cpu(project: Project, samples: int, step: int, least: int) -> None:
    done = python(Path(__file__).parent / "modules.py", project.package, samples, step)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["wrong"] == []
    assert report["cases"] > least
