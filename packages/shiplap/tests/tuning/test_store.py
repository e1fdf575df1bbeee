"""The store under torture: writers, readers, kills, cut files, full and read-only directories, wrong clocks."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import select
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest

from shiplap import safe_io
from shiplap.errors import ShiplapNotice
from shiplap.tuning import store as store_module
from shiplap.tuning.key import Key
from shiplap.tuning.store import ChoiceStore


def key(n, op="torture::op"):
    return Key.of({"op": op, "device": "cpu", "bucket": f"n<={n}", "source": "0123", "torch": "2.13.0"})


def value(n, writer=0, padding=200):
    return {"kernel": "k", "config": {"BLOCK": n}, "writer": writer, "padding": "x" * padding}


def valid(store, n):
    """What is served for key ``n`` is a whole value that somebody wrote for ``n``."""
    value = store.get(key(n))
    if value is not None:
        assert value["config"] == {"BLOCK": n}
        assert value["padding"] == "x" * len(value["padding"])
    return value


@pytest.fixture
def store(tmp_path):
    return ChoiceStore(tmp_path / "tuned")


def child(work):
    """A forked process that runs ``work`` and exits 0, or 1 with its exception on stderr."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException as e:
        sys.stderr.write(f"{type(e).__name__}: {e}\n")
    finally:
        os._exit(code)


def wait(pids):
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def test_an_entry_reads_back_and_is_readable(store):
    assert store.get(key(1)) is None
    assert store.put(key(1), value(1)) is True
    assert store.get(key(1)) == value(1)
    content = json.loads(store.path(key(1)).read_text())
    assert list(content) == ["format", "key", "value", "sha256"]
    assert list(content["key"]) == ["op", "device", "bucket", "source", "torch"], "the call first, versions last"
    assert store.path(key(1)).parent.name == "torture..op"
    assert len(store.path(key(1)).stem) == 32


@pytest.mark.long
def test_8_writers_and_readers_lose_nothing_and_serve_nothing_wrong(store):
    """What a writer was told is written is there at the end; what a reader sees is always whole and of its key."""
    keys, rounds = 24, 16
    reports = [store.root.parent / f"written{w}" for w in range(8)]

    def write(writer):
        rng, written = random.Random(writer), set()
        for _ in range(rounds):
            for n in rng.sample(range(keys), keys):
                if store.put(key(n), value(n, writer, rng.randrange(4000))):
                    written.add(n)
        reports[writer].write_text(json.dumps(sorted(written)))

    def read():
        for _ in range(rounds):
            for n in range(keys):
                valid(store, n)
            assert not [e for e in store.entries() if e.problem]

    assert wait([child(lambda w=w: write(w)) for w in range(8)] + [child(read) for _ in range(3)]) == [0] * 11
    written = set().union(*(json.loads(r.read_text()) for r in reports))
    assert written == set(range(keys))
    assert all(valid(store, n) is not None for n in written)
    assert not list(store.root.rglob("*.tmp"))


@pytest.mark.parametrize("times", [12, pytest.param(40, marks=pytest.mark.long)])
def test_killed_writers_lose_nothing_that_was_reported_written(store, times):
    """Writers report each entry through a pipe after ``put`` returned, and are killed at random moments.

    Half of them are only killed after their first report, however slow the machine is.
    """
    reported, number = set(), 0
    rng = random.Random(7)
    for writer in range(times):
        read_end, write_end = os.pipe()
        number += 1000

        def work(first=number, write_end=write_end):
            for n in range(first, first + 1000):
                if store.put(key(n), value(n, padding=20_000)):
                    os.write(write_end, n.to_bytes(4, "little"))

        pid = child(work)
        os.close(write_end)
        if writer % 2:
            assert select.select([read_end], [], [], 60)[0]
        time.sleep(rng.uniform(0.002, 0.04))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while data := os.read(read_end, 4):
            reported.add(int.from_bytes(data, "little"))
        os.close(read_end)
    assert len(reported) >= times // 2
    assert all(valid(store, n) is not None for n in reported)
    assert not [e for e in store.entries() if e.problem], "a kill leaves no half entry under an entry's name"
    left = list(store.half_written_files())
    assert set(left) == set(store.root.rglob("*.tmp"))
    assert all(store.remove(path) for path in left)
    assert all(store.put(key(n), value(n)) for n in range(3))


@pytest.mark.parametrize("cut", [0, 1, 20, 0.5, 0.99, -2])
def test_a_truncated_entry_is_absent_and_reported(store, cut):
    store.put(key(1), value(1))
    path = store.path(key(1))
    data = path.read_bytes()
    path.write_bytes(data[: int(cut * len(data)) if isinstance(cut, float) else cut])
    assert store.get(key(1)) is None
    (entry,) = store.entries()
    assert entry.problem.startswith("damaged: ")
    assert store.put(key(1), value(1))
    assert store.get(key(1)) == value(1)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"[]", b"{}", b"null", b'{"format": "shiplap-choice/1"}', b"[" * 4000]
)
def test_a_foreign_file_is_absent(store, content):
    store.put(key(1), value(1))
    store.path(key(1)).write_bytes(content)
    assert store.get(key(1)) is None
    assert next(store.entries()).problem


def test_an_edited_entry_is_absent(store):
    store.put(key(1), value(1))
    path = store.path(key(1))
    path.write_text(path.read_text().replace('"BLOCK": 1', '"BLOCK": 2'))
    assert store.get(key(1)) is None
    assert next(store.entries()).problem == "damaged: its checksum does not fit"


def test_an_entry_under_the_name_of_another_is_absent(store):
    store.put(key(1), value(1))
    os.replace(store.path(key(1)), store.path(key(2)))
    assert store.get(key(2)) is None
    assert next(store.entries()).problem == "its key belongs to another file name"


def test_clocks_do_not_matter(store):
    """Entries from 1970 and 2100 serve; the last writer wins, also when its clock is behind."""
    store.put(key(1), value(1, writer=1))
    os.utime(store.path(key(1)), (4e9, 4e9))
    assert store.get(key(1))["writer"] == 1
    store.put(key(1), value(1, writer=2))
    os.utime(store.path(key(1)), (0, 0))
    assert store.get(key(1))["writer"] == 2
    assert not list(store.half_written_files())


def test_a_read_only_directory_is_said_and_serves_what_it_has():
    """As another user, since root may write everywhere; so not below pytest's own private directory."""
    with tempfile.TemporaryDirectory() as root:
        store = ChoiceStore(Path(root) / "tuned")
        store.put(key(1), value(1))
        for path in [Path(root), store.root, *store.root.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)

        def work():
            if os.getuid() == 0:
                os.setuid(65534)
            with pytest.warns(ShiplapNotice, match="choices cannot be kept in .*EACCES: Permission denied"):
                assert store.put(key(2), value(2)) is False
            assert store.get(key(1)) == value(1)
            assert store.remove(store.path(key(1))) is False

        assert wait([child(work)]) == [0]
        for path in [Path(root), store.root, *store.root.iterdir()]:
            path.chmod(0o755)


def test_a_full_disk_is_said_once_and_leaves_nothing(store, monkeypatch):
    store.put(key(1), value(1))

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module.os, "fsync", full)
    with pytest.warns(ShiplapNotice, match=r"ENOSPC: No space left on device\): they serve this process only"):
        assert store.put(key(1), value(1, writer=9)) is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.put(key(2), value(2)) is False
    monkeypatch.undo()
    assert store.get(key(1)) == value(1), "the old entry is whole"
    assert not list(store.root.rglob("*.tmp"))


def test_a_write_cut_short_by_the_kernel_leaves_the_old_entry(store):
    """A real limit on file size: the write fails in the middle."""
    store.put(key(1), value(1))

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with pytest.warns(ShiplapNotice, match="EFBIG"):
            assert store.put(key(1), value(1, writer=9)) is False

    assert wait([child(work)]) == [0]
    assert store.get(key(1)) == value(1)
    assert not list(store.root.rglob("*.tmp"))


def test_a_file_in_the_place_of_the_directory_is_said(tmp_path):
    (tmp_path / "tuned").write_text("mine")
    store = ChoiceStore(tmp_path / "tuned")
    with pytest.warns(ShiplapNotice, match="choices cannot be kept"):
        assert store.put(key(1), value(1)) is False
    assert store.get(key(1)) is None
    assert list(store.entries()) == []


def test_a_stale_handle_is_tried_again(store, monkeypatch):
    """NFS: a file replaced on another machine between open and read."""
    store.put(key(1), value(1))
    real, failures = os.open, [OSError(errno.ESTALE, "Stale file handle")]

    def stale(path, *args, **kwargs):
        if failures and str(path).endswith(".json"):
            raise failures.pop()
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", stale)
    assert store.get(key(1)) == value(1)
    assert not failures


def test_only_what_dead_processes_of_this_machine_left_is_rubbish(store):
    store.put(key(1), value(1))
    folder = store.path(key(1)).parent
    host = safe_io.host_name()
    dead = child(lambda: None)
    wait([dead])
    names = {
        f".a@{host}~{dead}~0.tmp": True,
        f".a@{host}~{os.getpid()}~0.tmp": False,
        f".a@other~{dead}~0.tmp": False,
        ".strange.tmp": False,
    }
    for name in names:
        (folder / name).write_text("half")
    assert {p.name for p in store.half_written_files()} == {name for name, is_rubbish in names.items() if is_rubbish}


def test_names_of_ops_stay_inside_the_store(tmp_path):
    store = ChoiceStore(tmp_path / "tuned")
    for name in ("../../etc::x", "a/b::c", "..", ""):
        path = store.path(key(1, op=name))
        assert path.parent.parent == store.root
        assert path.parent.name not in (".", "..")


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    def refuse(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(store_module.os, "replace", refuse)
    with pytest.raises(KeyboardInterrupt):
        safe_io.write_whole(tmp_path / "x.json", b"{}")
    assert list(tmp_path.iterdir()) == []
