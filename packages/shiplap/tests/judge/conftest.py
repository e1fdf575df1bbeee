"""One launcher for all tests of a worker: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shiplap.sandbox.supervisor import SandboxLauncher


@pytest.fixture(scope="session")
def launcher() -> Iterator[SandboxLauncher]:
    with SandboxLauncher() as started:
        yield started
