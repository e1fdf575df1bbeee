"""Projects of the example runtimes, built once for all tests that use them."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
import torch

from shiplap_backend.build import build_extension
from shiplap_backend.project import Project, create_project, generate_project, open_project

EXAMPLE = Path(__file__).parents[4] / "examples" / "runtime-tinyc"
DISCRETE = EXAMPLE / "discrete"


def built(config: pytest.Config, name: str, example: Path) -> Project:
    """The project of an example, generated and built in the cache of pytest.

    Other processes wait for the one that builds.
    """
    cache = config.cache
    assert cache is not None
    root = Path(cache.mkdir(f"backend-{name}-{torch.__version__}"))
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        where = root / "torch-mine"
        project = open_project(where) if where.exists() else create_project("mine", str(example), where, units=1)
        generate_project(project, accept_drift=True)
        build_extension(project)
    return project
