"""The pytest plugin of Shiplap: a test that passes when ``shiplap judge`` accepts a kernel.

It is a package of its own, since pytest imports every plugin that is installed, and importing Shiplap imports torch.
Nothing of either is imported before a test asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from shiplap.judge import JudgeResult
    from shiplap.sandbox.supervisor import SandboxLauncher

__all__: list[str] = []

MARKER = "judge(reference, *candidates, incomplete=False, **options): judge kernels that nobody trusts; see 'judged'"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker ``judge`` with pytest."""
    config.addinivalue_line("markers", MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate one test for each candidate of the marker ``judge``."""
    marker = metafunc.definition.get_closest_marker("judge")
    if "judged" in metafunc.fixturenames and marker is not None and len(marker.args) > 1:
        candidates = marker.args[1:]
        metafunc.parametrize("judged", candidates, indirect=True, ids=[_name(c) for c in candidates])


def _name(candidate: Any) -> str:
    """Return the name of a candidate for the id of its test."""
    return str(getattr(candidate, "__name__", candidate))


@pytest.fixture(scope="session")
def shiplap_launcher() -> Iterator[SandboxLauncher]:
    """Yield the process that starts the processes in which candidates run. It imports torch once for all tests of a
    session.
    """
    from shiplap.sandbox.supervisor import SandboxLauncher

    with SandboxLauncher() as launcher:
        yield launcher


@pytest.fixture
def shiplap_judge(request: pytest.FixtureRequest, shiplap_launcher: SandboxLauncher) -> Callable[..., JudgeResult]:
    """Return a function with the arguments of ``shiplap.judge``, except ``launcher``, that returns its verdict. It uses
    the launcher of the test session. Paths of files are relative to the test's folder if they exist there.
    """
    from shiplap.judge import judge

    folder = request.path.parent

    def judge_here(reference: Any, candidate: Any, **options: Any) -> JudgeResult:
        """Return the verdict on ``candidate``. Paths of files are relative to the test's folder if they exist there."""
        return judge(_beside(folder, reference), _beside(folder, candidate), launcher=shiplap_launcher, **options)

    return judge_here


@pytest.fixture
def judged(request: pytest.FixtureRequest, shiplap_judge: Callable[..., JudgeResult]) -> JudgeResult:
    """Return the verdict on the candidate of the test's marker ``judge``. The test fails unless it is *accepted*.

    Keyword arguments of the marker are options of ``shiplap.judge``. With ``incomplete=True`` a verdict passes that
    found no defect and could not examine everything. Raise ``SL312`` for a test without a reference or a candidate.
    """
    from shiplap.errors import error

    marker = request.node.get_closest_marker("judge")
    if marker is None or len(marker.args) < 2:
        got = "no marker" if marker is None else f"{len(marker.args)} arguments"
        raise error("SL312", where=request.node.nodeid, got=got, expected="a reference and a candidate")
    options = dict(marker.kwargs)
    passing = ("accepted", "incomplete") if options.pop("incomplete", False) else ("accepted",)
    result = shiplap_judge(marker.args[0], request.param, **options)
    if result.verdict not in passing:
        pytest.fail(str(result), pytrace=False)
    return result


def _beside(folder: Path, target: Any) -> Any:
    """Return ``target`` as a path in the test's own folder if it is a file there. Otherwise return it unchanged."""
    if not isinstance(target, str):
        return target
    file, colon, name = target.partition(":")
    there = folder / file
    return f"{there}{colon}{name}" if file.endswith(".py") and there.is_file() else target
