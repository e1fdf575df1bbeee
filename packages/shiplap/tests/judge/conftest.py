"""One launcher for the tests of a file: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shiplap.referee.process import Launcher


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as started:
        yield started
