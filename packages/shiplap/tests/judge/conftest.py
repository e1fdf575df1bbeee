"""One launcher for all tests of a worker: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shiplap.judge import checks, engine
from shiplap.sandbox.supervisor import SandboxLauncher


@pytest.fixture(scope="session")
def launcher() -> Iterator[SandboxLauncher]:
    # It imports no more than those of users: sympy, which torch imports for the first gradient of a process, doubles
    # the time of each look at the interpreter, also in forks that compute no gradient.
    with SandboxLauncher() as started:
        yield started


@pytest.fixture(autouse=True)
def fewer_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls in batches: the 4,096 of a judgement take seconds, and matter to candidates that count calls. The calls
    one by one show leaks, of which only those of much memory are seen after few.
    """
    monkeypatch.setattr(checks, "LATE_CALLS", 128)
    if not request.node.get_closest_marker("long"):
        for module in (checks, engine):
            monkeypatch.setattr(module, "ENDURANCE_CALLS", 40)
