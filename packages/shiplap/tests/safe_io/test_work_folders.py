"""The folder of a run is removed at its end, and after a run that was killed as soon as somebody looks."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from shiplap.safe_io import work_folders
from shiplap.safe_io.work_folders import (
    NO_LOCK,
    make_work_folder,
    release_work_folder,
    remove_left_folders,
    work_folder,
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty temporary folder of the system."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed_run(tool: str, *, fork: bool = False) -> tuple[Path, int]:
    """Return the folder of a run that was killed, and the id of a process that it has forked and that goes on, or 0."""
    reading, writing = os.pipe()
    run = os.fork()
    if run == 0:
        path, _ = make_work_folder(tool)
        other = os.fork() if fork else 0
        if fork and other == 0:
            signal.pause()
        os.write(writing, f"{path}\n{other}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        path, forked = pipe.readline().strip(), int(pipe.readline())
    os.waitpid(run, 0)
    return Path(path), forked


def test_a_folder_is_removed_at_the_end(temporary: Path) -> None:
    with work_folder("model") as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "inner").mkdir()
        (folder / "inner" / "file").touch()
        (folder / "inner").chmod(0o500)
    assert list(temporary.iterdir()) == []


def test_what_a_killed_run_left_is_removed_and_nothing_else(temporary: Path) -> None:
    left, _ = killed_run("judge")
    (left / "file").touch()
    mine = [
        temporary / name for name in ("shiplap-run-judge-mine", "shiplap-judge-abcdefgh", "shiplap-run-a-b-12345678")
    ]
    for path in mine:
        path.mkdir()
    link = temporary / "shiplap-run-judge-abcdefgh"
    link.symlink_to(mine[0])
    (temporary / "shiplap-run-judge-12345678").touch()
    with work_folder("wheel") as used:
        assert remove_left_folders("wheel") == (0, [])
        assert left.exists()
        assert remove_left_folders() == (1, [])
        assert used.exists()
    assert not left.exists()
    assert all(path.exists() for path in [*mine, link, temporary / "shiplap-run-judge-12345678"])


def test_a_process_that_the_killed_run_has_forked_keeps_the_folder() -> None:
    left, forked = killed_run("doctor", fork=True)
    try:
        assert remove_left_folders() == (0, [])
    finally:
        os.kill(forked, signal.SIGKILL)
    handle = os.open(left, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # until the process has ended, which is no child of this one
    os.close(handle)
    assert remove_left_folders() == (1, [])
    assert not left.exists()


def test_folders_of_any_depth_are_removed(temporary: Path) -> None:
    left, _ = killed_run("judge")
    here = os.getcwd()
    os.chdir(left)
    for _ in range(sys.getrecursionlimit() + 100):
        os.mkdir("deeper")
        os.chdir("deeper")
    os.chdir(here)
    assert remove_left_folders() == (1, [])


def test_folders_of_another_user_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    left, _ = killed_run("judge")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert remove_left_folders() == (0, [])
    assert left.exists()


def test_a_folder_that_others_could_have_renamed_is_left_alone(temporary: Path) -> None:
    left, _ = killed_run("judge")
    temporary.chmod(0o777)
    assert remove_left_folders() == (0, [])
    temporary.chmod(0o1777)
    assert remove_left_folders() == (1, [])
    assert not left.exists()


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, lock = list[str](), fcntl.flock

    def remove_before(handle: int, operation: int) -> None:
        if not made:
            made.append(os.readlink(f"/proc/self/fd/{handle}"))
            os.rmdir(made[0])
        lock(handle, operation)

    monkeypatch.setattr(work_folders.fcntl, "flock", remove_before)
    with work_folder("judge") as folder:
        assert str(folder) != made[0]
        assert [*temporary.iterdir()] == [folder]


def test_a_folder_that_another_process_removes_now_is_not_used(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, lock = list[int](), fcntl.flock

    def hold_before(handle: int, operation: int) -> None:
        if not held:
            held.append(os.open(f"/proc/self/fd/{handle}", os.O_RDONLY))
            lock(held[0], fcntl.LOCK_EX)
        lock(handle, operation)

    monkeypatch.setattr(work_folders.fcntl, "flock", hold_before)
    with work_folder("judge") as folder:
        assert not os.path.samestat(folder.stat(), os.fstat(held[0]))
    os.close(held[0])


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(work_folders.fcntl, "flock", refuse)
    path, held = make_work_folder("judge")
    assert held == NO_LOCK
    assert remove_left_folders() == (0, [])
    assert os.path.isdir(path)
    release_work_folder(held)


def test_nothing_is_left_if_no_file_can_be_opened(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(work_folders.os, "open", refuse)
    with pytest.raises(OSError, match="Too many"):
        make_work_folder("judge")
    monkeypatch.undo()
    assert list(temporary.iterdir()) == []
