"""A folder goes with the process that made it."""

import os

from shiplap_testing import build
from shiplap_testing import folder as folders
from shiplap_testing.folder import _remove, numbered, temporary


def test_a_process_that_was_forked_leaves_the_folder_to_the_one_that_made_it():
    folder = temporary("test")
    pid = os.fork()
    if not pid:
        _remove(folder, os.getppid())
        os._exit(0)
    os.waitpid(pid, 0)
    assert folder.is_dir()
    _remove(folder, os.getpid())
    assert not folder.exists()


def test_runs_one_after_the_other_have_one_folder_and_runs_at_a_time_have_two(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_locks", [])
    first, second = numbered(tmp_path), numbered(tmp_path)
    assert (first.name, second.name) == ("0", "1")
    (first / "left").touch()
    folders._locks.pop(0).close()  # as at the end of the first run, which may be killed
    again = numbered(tmp_path)
    assert again == first
    assert list(again.iterdir()) == []


def test_a_library_lies_where_its_content_says(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "SETTLED", tmp_path / "settled")
    places = []
    for content in (b"one", b"two", b"one"):
        (tmp_path / "liba.so").write_bytes(content)
        places.append(build.settled(tmp_path / "liba.so"))
        assert places[-1].read_bytes() == content
    assert places[0] == places[2] != places[1]
