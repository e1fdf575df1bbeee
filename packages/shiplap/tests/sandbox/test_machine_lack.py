"""What the machine has left is read where Linux says it."""

import resource
from pathlib import Path

import pytest

from shiplap.sandbox import machine_lack
from shiplap.sandbox.supervisor import SandboxLauncher


@pytest.mark.parametrize(("row", "left"), [("inactive_file 300", 400), ("anon 300", 100), ("", 100)])
def test_files_in_memory_that_nobody_uses_leave_room_in_a_control_group(
    row: str, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"memory.max": "1000", "memory.current": "900", "memory.stat": f"anon 500\n{row}\n"}.items():
        (tmp_path / name).write_text(text)
    files = (str(tmp_path / "memory.max"), str(tmp_path / "memory.current"))
    monkeypatch.setattr(machine_lack, "CONTROL_GROUP_FILES", (files,))
    assert machine_lack.available_memory() == left


def test_a_launcher_that_starts_while_memory_is_bounded_has_the_usual_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with machine_lack.bounded_memory(), SandboxLauncher() as launcher:
        launcher.preload()
        assert resource.getrlimit(resource.RLIMIT_DATA) != before
        assert resource.prlimit(launcher.pid, resource.RLIMIT_DATA) == before
