"""Files that Shiplap writes: whatever the umask is it believes them later, and what it removes is its own."""

from __future__ import annotations

import os
import sys

import pytest

from shiplap import safe_io
from shiplap.kernels.native.build import build_once
from shiplap.kernels.native.cache import is_library_present, remove_artefact
from shiplap.tuning.key import Key
from shiplap.tuning.store import ChoiceStore
from shiplap_testing.choices import FIELDS, VALUE


@pytest.fixture(params=[0o000, 0o002, 0o022, 0o077], ids=oct)
def umask(request):
    """For a user with a group of his own, most systems set 002."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_choice_serves_whatever_the_umask_is(tmp_path, umask):
    """With 002 no entry was ever believed: the group could have written it."""
    tmp_path.chmod(0o700)
    store, key = ChoiceStore(tmp_path / "tuned"), Key.of(FIELDS)
    assert store.put(key, VALUE)
    assert store.get(key) == VALUE


def test_a_binding_is_loaded_whatever_the_umask_is(tmp_path, umask):
    """With 002 each was refused after it had been built, and its owner told to remove it."""
    compiler, root = tmp_path / "cxx", tmp_path / "native"
    compiler.write_text(f"#!{sys.executable} -I\nimport sys\nopen(sys.argv[2], 'wb').write(b'library')\n")
    compiler.chmod(0o700)
    tmp_path.chmod(0o700)
    root.mkdir(mode=0o700)
    assert build_once(root, "abc", "source", [str(compiler)]) == ""
    assert is_library_present(root / "abc", "trust::op")


def test_what_is_named_can_be_read_again_whatever_the_umask_is(tmp_path, umask):
    tmp_path.chmod(0o700)
    safe_io.write_whole(tmp_path / "table.json", b"{}")
    assert safe_io.read_file(tmp_path / "table.json", 10, safe_io.NAMED) == b"{}"
    assert (tmp_path / "table.json").stat().st_mode & 0o777 == 0o664 & ~umask


def test_nothing_is_removed_by_way_of_a_link(tmp_path):
    """``shiplap cache gc`` and ``rm all`` removed the files of a folder that a link in the cache led to."""
    store, precious = ChoiceStore(tmp_path / "tuned"), tmp_path / "precious"
    precious.mkdir()
    kept = [precious / "mine.json", precious / f".x@{safe_io.host_name()}~999999~0.tmp"]
    for path in kept:
        path.write_text("{}")
    store.root.mkdir()
    (store.root / "op").symlink_to(precious)
    assert list(store.entries()) == list(store.half_written_files()) == []
    assert not store.remove(store.root / "op" / "mine.json"), "exchanged after it was listed"
    assert remove_artefact(store.root / "op"), "the link itself may go"
    assert all(path.exists() for path in kept)


@pytest.mark.parametrize(("lasting", "waits"), [(True, 2), (False, 0)])
def test_only_what_is_lasting_waits_for_the_disk(lasting, waits, tmp_path, monkeypatch):
    """Once for the file and once for its folder."""
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    safe_io.write_whole(tmp_path / "mark.json", b"{}", lasting=lasting)
    assert len(synced) == waits
    assert [path.name for path in tmp_path.iterdir()] == ["mark.json"]
    assert (tmp_path / "mark.json").read_bytes() == b"{}"
