"""One device, built once from what a user would write and loaded into the test process.

It is OpenVINO's, or with SHIPLAP_BACKEND_EXAMPLE that of an example runtime: so `test_discrete.py` runs these tests.
The build directory lives in pytest's cache and ninja keeps it right: a session that changed nothing compiles nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shiplap_backend
from shiplap_backend.build import build_extension
from shiplap_backend.project import Project, create_project, generate_project, open_project

EXAMPLE = os.environ.get("SHIPLAP_BACKEND_EXAMPLE")  # the built project of an example runtime
DEVICE = "mine" if EXAMPLE else "openvino"
FULL = os.environ.get("SHIPLAP_BACKEND_FULL") == "1"  # all of the metadata: minutes to compile
BUILT = os.environ.get("SHIPLAP_BACKEND_PROJECT")  # with FULL: the project, built already
OF_OPENVINO, OF_SHARED_MEMORY = "of OpenVINO", "of a device on the host's memory"
TEMPLATES = Path(shiplap_backend.__file__).parent / "templates" / "project"


def _key(ops: str) -> str:
    """What ninja does not see: the files that ``create_project`` writes, and which Python and torch they are for."""
    text = [ops, sys.version, torch.__version__, *(p.read_text() for p in sorted(TEMPLATES.iterdir()))]
    return hashlib.sha256("\0".join(text).encode()).hexdigest()[:12]


@pytest.fixture(scope="session")
def project(request: pytest.FixtureRequest) -> Project:
    """The generated and built project: the subset of OpenVINO's ops that ``tests/backend/ops.yaml`` names."""
    if EXAMPLE:
        return open_project(Path(EXAMPLE))
    pytest.importorskip("openvino")
    if FULL and BUILT:
        return open_project(Path(BUILT))
    ops = "extends: openvino\nops: {}\n" if FULL else (Path(__file__).parent / "ops.yaml").read_text()
    cache = request.config.cache
    assert cache is not None
    root = Path(cache.mkdir(f"backend-{_key(ops)}"))
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of pytest-xdist build one after the other: the first does the work
        where = root / "project"
        made = (
            open_project(where)
            if where.exists()
            else create_project(DEVICE, "openvino", where, units=12 if FULL else 1)
        )
        (where / "ops.yaml").write_text(ops)
        generate_project(made, accept_drift=True)
        build_extension(made, together=not FULL)  # the cores are busy with other tests
    return made


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if "device" in getattr(item, "fixturenames", ()) and str(item.path).startswith(here):
            item.add_marker("device")


@pytest.fixture(scope="session")
def device(project: Project) -> str:
    """The name of the device, registered with torch in this process; there can be one a process."""
    sys.path.insert(0, str(project.root))
    importlib.import_module(f"torch_{DEVICE}").autoload()
    return DEVICE


@pytest.fixture
def subset() -> None:
    """For tests that ask about ops which only the subset leaves to the CPU, or only the subset has."""
    if FULL:
        pytest.skip("of the subset")


@pytest.fixture
def of_openvino() -> None:
    """For tests of what OpenVINO's metadata makes native, or of dtypes and layouts that only OpenVINO takes."""
    if EXAMPLE:
        pytest.skip(OF_OPENVINO)


@pytest.fixture
def of_shared_memory(project: Project) -> None:
    """For tests of one device on the host's memory; `discrete_cases.py` has their counterparts."""
    if project.runtime.discrete:
        pytest.skip(OF_SHARED_MEMORY)


@pytest.fixture
def dev(device: str) -> Any:
    """``torch.<device>``, with nothing counted, fallbacks allowed, no limit and torch's own layout before and after."""
    module = getattr(torch, device)

    def reset() -> None:
        module.fallback_policy("count")
        module.reset_counters()
        module.set_memory_limit(None)

    reset()
    yield module
    reset()
