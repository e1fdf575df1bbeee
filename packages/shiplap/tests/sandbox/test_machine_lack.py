"""What the machine has left is read where Linux says it."""

from pathlib import Path

import pytest

from shiplap.sandbox import machine_lack


@pytest.mark.parametrize(("row", "left"), [("inactive_file 300", 400), ("anon 300", 100), ("", 100)])
def test_files_in_memory_that_nobody_uses_leave_room_in_a_control_group(
    row: str, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in {"memory.max": "1000", "memory.current": "900", "memory.stat": f"anon 500\n{row}\n"}.items():
        (tmp_path / name).write_text(text)
    files = (str(tmp_path / "memory.max"), str(tmp_path / "memory.current"))
    monkeypatch.setattr(machine_lack, "CONTROL_GROUP_FILES", (files,))
    assert machine_lack.available_memory() == left
