"""What lies in the folder of compiled bindings: sizes, times, what killed builders left, and whom an error names."""

import os
import time

import pytest

from shiplap import safe_io
from shiplap.kernels.native import cache


def made(path, size=1, age=0.0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    for each in (path, path.parent):
        os.utime(each, (time.time() - age,) * 2)
    return path.parent


def test_sizes_and_times(tmp_path):
    made(tmp_path / "one" / "library", 3)
    (tmp_path / "one" / "seal").write_bytes(bytes(4))
    assert cache._folder_size(tmp_path / "one") == 7
    assert cache._folder_size(tmp_path / "one" / "seal") == 4
    os.symlink("nowhere", tmp_path / "link")
    assert cache._folder_size(tmp_path / "link") == len("nowhere")
    assert cache._folder_size(tmp_path / "none") == 0
    assert cache._last_use_time(tmp_path / "none") == 0.0
    os.utime(tmp_path / "one", (5, 5))
    assert cache._last_use_time(tmp_path / "one") == 5.0
    assert cache._listed_folders(tmp_path / "none") == []


def test_the_oldest_go_until_the_rest_fits(tmp_path):
    places = [made(tmp_path / name / "library", 10, age) for name, age in (("c", 30), ("a", 20), ("b", 20))]
    same = time.time() - 20
    for name in "ab":
        os.utime(tmp_path / name, (same, same))
    (tmp_path / "a.lock").touch()
    (tmp_path / ".draft").mkdir()
    assert [a.path.name for a in cache.cached_artefacts(tmp_path)] == ["c", "a", "b"]
    assert cache.evict_artefacts(tmp_path, 30) == []
    assert cache.evict_artefacts(tmp_path, 29) == [places[0]]
    assert cache.evict_artefacts(tmp_path, 10) == [places[1]]
    assert cache.evict_artefacts(tmp_path, 0) == [places[2]]


def test_what_killed_builders_left(tmp_path):
    old = cache.STALE_AFTER_S + 60
    for name, age in ((".old", old), (".new", 0), ("kept", old)):
        made(tmp_path / name / "library", age=age)
    for name, age in (("kept.lock", old), ("gone.lock", old), ("young.lock", 0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    assert [path.name for path in cache.stale_build_files(tmp_path)] == [".old", "gone.lock"]


@pytest.mark.parametrize("kind", ["of the machine", "of no file", "of others"])
def test_an_error_of_the_cache_names_the_cause(kind, tmp_path):
    place = str(tmp_path / "file")
    cause: OSError = OSError(28, "No space left on device", place)
    if kind != "of the machine":
        words = safe_io.NO_REGULAR_FILE if kind == "of no file" else "others can write it"
        cause = safe_io.Distrusted(1, words, place)
    found = cache._untrusted_cache_error("demo::f", cause)
    assert found.id == "SL406"
    assert found.fix.startswith(
        {
            "of the machine": "set SHIPLAP_CACHE_DIR",
            "of no file": f"remove {place}",
            "of others": f"remove {place} with",
        }[kind]
    )
    assert ("others may have put code there" in found.fix) is (kind == "of others")
    assert found.expected == (
        "a file as it was built" if kind == "of no file" else "a directory of mode 700 that you own"
    )


def test_bindings_may_take_one_gib(tmp_path, monkeypatch):
    listed = [cache.Artefact(tmp_path / name, size, 0.0) for name, size in (("a", 1 << 29), ("b", 1 << 29))]
    monkeypatch.setattr(cache, "cached_artefacts", lambda root: listed)
    assert cache.evict_artefacts(tmp_path) == []
    listed.append(cache.Artefact(tmp_path / "c", 1, 1.0))
    assert cache.evict_artefacts(tmp_path) == [tmp_path / "a"]
