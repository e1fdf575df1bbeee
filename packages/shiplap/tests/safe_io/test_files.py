"""Attacks on what is loaded and believed: paths that somebody else could have written, and files that are none."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import threading
import time
from pathlib import Path

import pytest

from shiplap import errors, safe_io
from shiplap.errors import ShiplapError, ShiplapNotice
from shiplap.kernels.native import binding, build, cache
from shiplap.kernels.native.build import LIBRARY, SEAL
from shiplap.kernels.native.build import build_once as compile_into
from shiplap.settings import settings
from shiplap.tuning.frozen_table import dump_table, read_frozen_table
from shiplap.tuning.key import Key
from shiplap.tuning.store import ChoiceStore

SOURCE = 'extern "C" int answer() { return 42; }\n'
COMPILER = ["c++", "-shared", "-fPIC"]
STRANGER = 54321


@pytest.fixture
def folder(tmp_path):
    """A file in a folder in a folder, all private."""
    (tmp_path / "a" / "b").mkdir(parents=True, mode=0o700)
    (tmp_path / "a").chmod(0o700)
    (tmp_path / "a" / "b" / "file").write_text("content")
    (tmp_path / "a" / "b" / "file").chmod(0o600)
    return tmp_path / "a" / "b"


def give_away(path: Path, monkeypatch) -> None:
    """Let ``path`` belong to another user; who is not root becomes another user himself."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


def why(path, rule=safe_io.CODE):
    with pytest.raises(safe_io.Distrusted) as caught:
        safe_io.read_file(path, 100, rule)
    return safe_io.unsafe_reason(caught.value)


def test_a_private_file_is_read(folder):
    assert safe_io.read_file(folder / "file", 100) == b"content"


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o720, 0o770, 0o722])
@pytest.mark.parametrize("what", ["a", "a/b", "a/b/file"])
def test_whatever_others_can_write_is_refused_by_name(folder, tmp_path, what, mode):
    (tmp_path / what).chmod(mode)
    assert why(folder / "file").startswith(f"{tmp_path / what}: it can be written by others (mode {mode:o})")


@pytest.mark.parametrize("what", ["a", "a/b", "a/b/file"])
def test_whatever_belongs_to_others_is_refused(folder, tmp_path, monkeypatch, what):
    give_away(tmp_path / what, monkeypatch)
    assert "it belongs to another user" in why(folder / "file")


def test_a_sticky_folder_is_a_way_to_what_is_ours_only(folder, tmp_path, monkeypatch):
    (tmp_path / "a").chmod(0o1777)
    assert safe_io.read_file(folder / "file", 100) == b"content"
    give_away(folder, monkeypatch)
    assert "it belongs to another user" in why(folder / "file")
    assert "it belongs to another user" in why(folder / "file", safe_io.NAMED)


def test_a_sticky_folder_is_no_place_of_its_own(folder):
    folder.chmod(0o1777)
    with pytest.raises(safe_io.Distrusted, match="can be written by others"):
        safe_io.open_folder(folder)


def test_a_file_that_was_named_may_be_anybodys_but_not_everybodys(folder, tmp_path, monkeypatch):
    give_away(folder / "file", monkeypatch)
    (folder / "file").chmod(0o664)
    assert safe_io.read_file(folder / "file", 100, safe_io.NAMED) == b"content"
    (folder / "file").chmod(0o666)
    assert "mode 666" in why(folder / "file", safe_io.NAMED)


def test_a_link_is_followed_to_where_it_may_lead(folder, tmp_path):
    (tmp_path / "to").symlink_to(folder)
    (tmp_path / "relative").symlink_to("a/../a/b")
    for link in ("to", "relative"):
        assert safe_io.read_file(tmp_path / link / "file", 100) == b"content"
    (tmp_path / "a").chmod(0o777)
    assert "mode 777" in why(tmp_path / "to" / "file"), "the way that the link leads is judged"


def test_a_link_of_somebody_else_is_refused(folder, tmp_path, monkeypatch):
    (tmp_path / "to").symlink_to(folder / "file")
    if os.geteuid() == 0:
        os.chown(tmp_path / "to", STRANGER, STRANGER, follow_symlinks=False)
        assert "a link that belongs to another user" in why(tmp_path / "to")
    else:
        give_away(tmp_path / "to", monkeypatch)
        assert "another user" in why(tmp_path / "to")


def test_links_in_a_circle_end(tmp_path):
    (tmp_path / "x").symlink_to("y")
    (tmp_path / "y").symlink_to("x")
    with pytest.raises(OSError, match="symbolic") as caught:
        safe_io.read_file(tmp_path / "x", 100)
    assert caught.value.errno == errno.ELOOP


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "socket"])
def test_only_a_regular_file_is_opened_and_nothing_hangs(tmp_path, kind):
    path = tmp_path / "thing"
    if kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as there:
            there.bind(str(path))
    started = time.monotonic()
    with pytest.raises(OSError, match=r"."):
        safe_io.read_file(path, 100)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_that_is_none_is_an_os_error(path):
    with pytest.raises(OSError, match=r"."):
        safe_io.read_file(path, 100)


def test_more_than_the_limit_is_not_read(folder):
    with pytest.raises(OSError, match="longer than 3 bytes"):
        safe_io.read_file(folder / "file", 3)


def test_no_descriptor_is_left_open(folder, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "loop").symlink_to("loop")
    for path in (folder / "file", folder / "absent", tmp_path / "loop", folder / "file" / "below"):
        for rule in (safe_io.CODE, safe_io.NAMED):
            try:
                safe_io.read_file(path, 100, rule)
            except OSError:
                continue
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_exchanged_while_it_is_opened_is_whole_or_refused(folder):
    """Somebody exchanges the file for a link and back: what is read is the file, or nothing."""
    secret = folder.parent / "secret"
    secret.write_text("foreign")
    secret.chmod(0o666)
    stop = threading.Event()

    def exchange():
        while not stop.is_set():
            (folder / "new").symlink_to(secret)
            os.replace(folder / "new", folder / "file")
            (folder / "new").write_text("content")
            (folder / "new").chmod(0o600)
            os.replace(folder / "new", folder / "file")

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        for _ in range(300):
            try:
                assert safe_io.read_file(folder / "file", 100) == b"content"
            except OSError:
                continue
    finally:
        stop.set()
        thread.join()


# --- compiled bindings ------------------------------------------------------------------------------------------------


@pytest.fixture
def native(tmp_path, monkeypatch):
    """The folder of compiled bindings, with one library in it."""
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    root = cache.cache_folder("trust_test::op")
    assert compile_into(root, "abc", SOURCE, COMPILER) == ""
    assert cache.is_library_present(root / "abc", "trust_test::op")
    return root


def refused(root, name="abc"):
    with pytest.raises(ShiplapError) as caught:
        cache.load_library(root / name, "trust_test::op")
    return caught.value


def test_the_library_that_was_checked_is_the_one_that_is_loaded(native):
    library = cache.load_library(native / "abc", "trust_test::op")
    assert library.answer() == 42
    assert cache.load_library(native / "abc", "trust_test::op") is library


@pytest.mark.parametrize("what", [".", "abc", f"abc/{LIBRARY}", f"abc/{SEAL}"])
def test_a_planted_library_is_not_loaded_and_the_advice_does_not_lead_to_it(native, what):
    """The attack of the audit: a cache of mode 777, a library planted, the mode put right as the error said."""
    (native / what).chmod(0o777)
    messages = refused(native)
    assert messages.id == "SL406"
    assert messages.got.startswith(str((native / what).resolve()))
    assert "remove" in messages.fix
    assert "chmod" not in str(messages)


@pytest.mark.parametrize("what", ["abc", f"abc/{LIBRARY}", f"abc/{SEAL}"])
def test_after_chmod_what_a_stranger_planted_is_still_his(native, monkeypatch, what):
    give_away(native / what, monkeypatch)
    assert refused(native).id == "SL406"
    assert "another user" in refused(native).got


@pytest.mark.parametrize("place", ["fifo", "folder", "link"])
@pytest.mark.parametrize("name", [LIBRARY, SEAL])
def test_what_is_no_file_is_not_loaded_and_built_again(native, place, name):
    path = native / "abc" / name
    path.unlink()
    if place == "fifo":
        os.mkfifo(path)
    elif place == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    assert refused(native).id in ("SL405", "SL406")
    assert compile_into(native, "abc", SOURCE, COMPILER) == ""
    assert cache.is_library_present(native / "abc", "trust_test::op")


@pytest.mark.parametrize("place", ["file", "link"])
def test_a_file_in_place_of_the_folder_is_replaced(native, place):
    if place == "file":
        (native / "def").write_text("")
    else:
        (native / "def").symlink_to("nowhere")
    assert compile_into(native, "def", SOURCE, COMPILER) == ""
    assert cache.load_library(native / "def", "trust_test::op").answer() == 42


def test_a_lock_that_is_a_fifo_hangs_nobody(native):
    os.mkfifo(native / "ghi.lock")
    started = time.monotonic()
    assert "no regular file" in compile_into(native, "ghi", SOURCE, COMPILER)
    assert time.monotonic() - started < 30


def test_a_builder_that_waits_too_long_names_who_it_waits_for(native):
    import fcntl

    with (native / "ghi.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write(f"{os.getpid()}\n")
        held.flush()
        messages = compile_into(native, "ghi", SOURCE, COMPILER, wait=0.1)
    assert f"process {os.getpid()} has been building it for more than 0.1 s" in messages


def test_an_empty_cache_directory_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHIPLAP_CACHE_DIR", raising=False)
    default = settings().cache_dir
    for empty in ("", " "):
        monkeypatch.setenv("SHIPLAP_CACHE_DIR", empty)
        assert Path(settings().cache_dir).is_absolute()
    assert settings().cache_dir == default


def test_a_cache_below_a_folder_that_everybody_writes_is_refused(tmp_path, monkeypatch):
    (tmp_path / "open" / "cache").mkdir(parents=True)
    (tmp_path / "open" / "cache").chmod(0o700)
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "open" / "cache"))
    with pytest.raises(ShiplapError, match="SL406") as caught:
        cache.cache_folder("trust_test::op")
    assert caught.value.got.startswith(str(tmp_path / "open"))


@pytest.mark.parametrize("wrong", ["file", "long"])
def test_a_cache_that_cannot_be_made_says_why(tmp_path, monkeypatch, wrong):
    path = tmp_path / "file" / "cache" if wrong == "file" else tmp_path / ("x" * 300)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(path))
    with pytest.raises(ShiplapError, match="SL406") as caught:
        cache.cache_folder("trust_test::op")
    assert ("Not a directory" if wrong == "file" else "File name too long") in caught.value.got
    assert "chmod" not in caught.value.fix
    assert "set SHIPLAP_CACHE_DIR" in caught.value.fix


def test_bindings_are_evicted_in_the_order_of_use(native):
    for number, name in enumerate(("one", "two", "three")):
        assert compile_into(native, name, SOURCE, COMPILER) == ""
        os.utime(native / name, (1000 - number, 1000 - number))
    size = cache.cached_artefacts(native)[0].size
    gone = cache.evict_artefacts(native, cap=2 * size + size // 2)
    assert [path.name for path in gone] == ["three", "two"]
    assert {a.path.name for a in cache.cached_artefacts(native)} == {"one", "abc"}


def test_what_killed_builders_left_is_found(native):
    (native / ".abc-left").mkdir()
    (native / "gone.lock").write_text("")
    assert list(cache.stale_build_files(native)) == [], "it may be somebody's work"
    for name in (".abc-left", "gone.lock", "abc.lock"):
        os.utime(native / name, (1000, 1000))
    assert {path.name for path in cache.stale_build_files(native)} == {".abc-left", "gone.lock"}


# --- choices ----------------------------------------------------------------------------------------------------------

KEY = Key.of({"op": "trust_test::op", "device": "cpu", "bucket": "n<=8", "source": "0123", "torch": "2"})


@pytest.mark.parametrize("what", [".", "tuned", "tuned/trust_test..op", "entry"])
def test_a_choice_that_others_could_have_written_is_not_believed(tmp_path, what):
    store = ChoiceStore(tmp_path / "cache" / "tuned")
    assert store.put(KEY, {"kernel": "k"})
    assert store.get(KEY) == {"kernel": "k"}
    path = store.path(KEY) if what == "entry" else tmp_path / "cache" / what
    path.chmod(0o777)
    with pytest.warns(ShiplapNotice, match="can be written by others"):
        assert store.get(KEY) is None


def test_a_choice_that_is_a_fifo_hangs_nobody(tmp_path):
    store = ChoiceStore(tmp_path / "tuned")
    store.path(KEY).parent.mkdir(parents=True, mode=0o700)
    os.mkfifo(store.path(KEY))
    assert store.get(KEY) is None


@pytest.mark.parametrize("attack", ["fifo", "writable", "absent", "nul"])
def test_a_table_that_cannot_be_believed_is_an_error(tmp_path, attack):
    path = tmp_path / "table.json"
    dump_table(path, [])
    assert read_frozen_table(path) == []
    if attack == "writable":
        path.chmod(0o666)
    else:
        path.unlink()
    if attack == "fifo":
        os.mkfifo(path)
    with pytest.raises(ShiplapError, match="SL602"):
        read_frozen_table("\0" if attack == "nul" else path)


def test_the_cache_command_shows_and_cleans_compiled_bindings(native):
    from typer.testing import CliRunner

    from shiplap.cli.app import app

    run = CliRunner()
    done = run.invoke(app, ["cache", "ls"])
    assert done.exit_code == 0, done.output
    assert str(native / "abc") in done.output.replace("\n", "")
    (native / "abc" / LIBRARY).write_bytes(b"damaged")
    (native / ".def-left").mkdir()
    os.utime(native / ".def-left", (1000, 1000))
    assert run.invoke(app, ["cache", "ls"]).exit_code == 1
    done = run.invoke(app, ["cache", "gc"])
    assert done.exit_code == 0, done.output
    assert "removed 2 from" in done.output
    assert [path.name for path in native.iterdir()] == ["abc.lock"]


# --- whose cache it is ------------------------------------------------------------------------------------------------


def test_a_cache_folder_that_came_along_is_not_loaded_and_built_anew(native, tmp_path, monkeypatch):
    """The user of another machine, or the author of a repository, has compiled it: all is whole, and theirs."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another"))
    with pytest.warns(match=f"bindings in {native} are built anew: this user has not compiled them"):
        assert not cache.is_library_present(native / "abc", "trust_test::op")
    assert refused(native).got == f"{native / 'abc'}: its seal is not of this user"
    assert compile_into(native, "abc", SOURCE, COMPILER) == ""
    assert cache.load_library(native / "abc", "trust_test::op").answer() == 42


@pytest.mark.parametrize("forged", ["missing", "copied", "plain"])
def test_a_forged_seal_is_not_believed(native, forged):
    library, seal = native / "abc" / LIBRARY, native / "abc" / SEAL
    library.write_bytes(library.read_bytes() + b"\0")
    with library.open("rb") as file:
        seal.write_text(build.seal_text("abc", file))
    if forged == "missing":
        (native / "abc" / build.KEYED_SEAL).unlink()
    elif forged == "plain":
        (native / "abc" / build.KEYED_SEAL).write_text(seal.read_text())
    assert not build.is_sealed_folder(native / "abc")
    assert refused(native).got.endswith("its seal is not of this user")


def test_the_secret_is_this_user_s_alone_and_stays(native, tmp_path):
    path = Path(os.environ["XDG_DATA_HOME"]) / "shiplap" / "seal.key"
    assert (path.stat().st_mode & 0o777, len(path.read_bytes())) == (0o600, 32)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    build._keys.clear()
    assert cache.is_library_present(native / "abc", "trust_test::op")
    assert [p.name for p in path.parent.iterdir()] == ["seal.key"]


@pytest.mark.parametrize("fault", ["no home", "a file", "open to others", "short", "a fifo"])
def test_without_a_secret_bindings_serve_one_process(tmp_path, monkeypatch, fault):
    home = tmp_path / "home"
    home.mkdir()
    place = home / "shiplap" / "seal.key"
    if fault == "a file":
        (home / "shiplap").write_text("")
    elif fault == "a fifo":
        place.parent.mkdir()
        os.mkfifo(place)
    elif fault != "no home":
        place.parent.mkdir()
        place.write_bytes(bytes(31 if fault == "short" else 32))
        place.chmod(0o644 if fault == "open to others" else 0o600)
    monkeypatch.setenv("XDG_DATA_HOME", "relative" if fault == "no home" else str(home))
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    errors.base._announced.discard("seal key")
    build._keys.clear()
    root = cache.cache_folder("trust_test::op")
    assert compile_into(root, "abc", SOURCE, COMPILER) == ""
    with pytest.warns(match="built anew in each process: the secret of their seals cannot be kept"):
        assert cache.load_library(root / "abc", "trust_test::op").answer() == 42
    build._keys.clear()  # another process
    assert not build.is_sealed_folder(root / "abc")


def test_a_proof_of_another_user_is_not_believed(tmp_path, monkeypatch):
    store = ChoiceStore(tmp_path / "proofs", "proofs", keyed=True)
    key = Key.of({"op": "trust::op"})
    assert store.put(key, {"right": True})
    assert store.get(key) == {"right": True}
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another"))
    assert store.get(key) is None
    assert [entry.problem for entry in store.entries()] == ["its seal is not of this user"]


@pytest.mark.parametrize("seal", ["\u00e9", "", None, 5])
def test_a_seal_of_any_text_is_a_problem_of_the_entry(seal, tmp_path):
    """The checksum of an entry does not cover its seal, and a seal beyond ASCII raised a TypeError."""
    store, key = ChoiceStore(tmp_path / "proofs", "proofs", keyed=True), Key.of({"op": "trust::op"})
    assert store.put(key, {"right": True})
    place = store.path(key)
    place.write_text(json.dumps({**json.loads(place.read_text()), "seal": seal}))
    assert store.get(key) is None
    assert [entry.problem for entry in store.entries()] == ["its seal is not of this user"]


def test_no_more_is_read_than_a_file_has(tmp_path):
    (tmp_path / "small").write_bytes(b"x" * 1000)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))
    try:
        assert len(safe_io.read_file(tmp_path / "small", 1 << 28)) == 1000
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert safe_io.read_file("/proc/self/status", 1 << 20)  # which states no size


@pytest.mark.parametrize("how", ["killed", "said"])
def test_a_compiler_that_was_ended_is_no_fault_of_the_source(native, tmp_path, how):
    compiler = tmp_path / "compiler"
    words = "echo 'fatal error: Killed signal terminated program cc1plus' >&2; exit 1"
    line = "kill -9 $$" if how == "killed" else words
    compiler.write_text(f"#!/bin/sh\n{line}\n")
    compiler.chmod(0o700)
    problem = compile_into(native, "def", SOURCE, [str(compiler)])
    assert problem.startswith(f"the machine lacks what {compiler} needs: it was ended (")
    failure = binding.build_error("trust_test::op", problem)
    assert (failure.id, failure.what) == (
        "SL410",
        "the native binding could not be built or loaded for lack of a resource",
    )


def test_a_file_in_place_of_the_cache_is_no_foreign_code(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ShiplapError) as caught:
        cache.cache_folder("trust_test::op")
    assert (caught.value.id, caught.value.what) == ("SL406", "the cache directory cannot be used")
    assert "others may have put code there" not in caught.value.fix
