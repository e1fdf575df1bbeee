"""The secret of a user's seals, and when a library in the cache has both of its seals."""

import os

import pytest

from shiplap.kernels.native import build


@pytest.fixture
def mask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_the_secret_and_its_folder_are_this_user_s_alone(tmp_path, mask):
    folder = tmp_path / "data" / "shiplap"
    key = build._kept_key(folder)
    assert len(key) == build.KEY_BYTES
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.listdir(folder) == ["seal.key"]
    assert (folder / "seal.key").stat().st_mode & 0o777 == 0o600
    assert build._kept_key(folder) == key
    (folder / "seal.key").chmod(0o640)
    with pytest.raises(OSError, match="it is no secret of this user"):
        build._kept_key(folder)
    (folder / "seal.key").chmod(0o600)
    for content in (key[:-1], key + b"x"):
        (folder / "seal.key").write_bytes(content)
        with pytest.raises(OSError, match="it is no secret of this user"):
            build._kept_key(folder)


def test_a_secret_of_another_user_is_none(tmp_path, monkeypatch):
    build._kept_key(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(OSError, match="it is no secret of this user"):
        build._kept_key(tmp_path)


def test_a_folder_without_a_home_has_a_secret_for_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_keys", {})
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    key, why = build.user_key()
    assert why == "relative: no home folder"
    assert build.user_key() == (key, why)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    kept, why = build.user_key()
    assert (len(kept), why) == (build.KEY_BYTES, "")
    assert kept != key
    assert (tmp_path / "shiplap" / "seal.key").read_bytes() == kept


def test_a_library_needs_both_of_its_seals(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_keys", {})
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    place = tmp_path / "digest"
    place.mkdir()
    (place / build.LIBRARY).write_bytes(b"code")
    with (place / build.LIBRARY).open("rb") as library:
        seal = build.seal_text("digest", library)
    right = {build.SEAL: seal, build.KEYED_SEAL: build.keyed_seal(seal)}
    for missing in ({}, {build.SEAL}, {build.KEYED_SEAL}):
        for name, text in right.items():
            (place / name).write_text("wrong" if name in missing else text)
        assert build.is_sealed_folder(place) is (not missing)
    (place / build.KEYED_SEAL).unlink()
    assert not build.is_sealed_folder(place)
