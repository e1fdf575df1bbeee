"""What Linux says about processes."""

import os
import subprocess
import sys
import time

import pytest

from shiplap.sandbox import proc_filesystem
from shiplap.sandbox.resource_use import ResourceUse

FAMILY = """
import os, time
for _ in range(2):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(60)
        time.sleep(60)
print("there", flush=True)
time.sleep(60)
"""


@pytest.fixture
def family():
    parent = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout.readline()
    ends = time.monotonic() + 120
    while len(proc_filesystem.list_descendants(parent.pid)) < 4 and time.monotonic() < ends:
        time.sleep(0.05)
    yield parent.pid
    os.killpg(parent.pid, 9)
    parent.stdout.close()
    parent.wait()


def test_children_of_children_are_found_without_a_look_at_every_process(family, monkeypatch):
    groups = proc_filesystem.list_stopped_descendants(family)
    assert groups == proc_filesystem.list_descendants(family)
    assert len(groups) == 4
    assert set(groups.values()) == {family}
    monkeypatch.setattr(os.path, "exists", lambda path: False)  # a kernel that does not list children
    assert proc_filesystem.list_stopped_descendants(family) == groups


def test_nobody_is_below_who_has_no_children():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert proc_filesystem.list_stopped_descendants(process.pid) == {}
    finally:
        process.communicate(b"")


FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("there", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize("program", ["print('there', flush=True); input()", FIRST_THREAD_ENDS])
def test_a_process_is_ending_when_all_its_threads_are(program):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        assert process.stdout.readline()
        ends = time.monotonic() + 120
        while program == FIRST_THREAD_ENDS and proc_filesystem.stat_fields(process.pid)[0] != "Z":
            assert time.monotonic() < ends
            time.sleep(0.01)
        assert not proc_filesystem.is_ending(process.pid)
        process.kill()
        while not proc_filesystem.is_ending(process.pid):
            assert time.monotonic() < ends
            time.sleep(0.01)
        process.wait()
        assert proc_filesystem.is_ending(process.pid), "it is gone"


MEMORY_FILES = """
import mmap, os
open_alone, mapped = (os.memfd_create(name) for name in ("open", "mapped"))
for file in (open_alone, mapped):
    os.write(file, bytes(8 << 20))
kept = mmap.mmap(mapped, 8 << 20)
print("there", flush=True)
input()
"""


def test_a_file_in_memory_counts_once():
    """The resident size of a process shows what it has mapped and read."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", MEMORY_FILES], **pipes) as process:
        assert process.stdout.readline()
        held = proc_filesystem.unseen_bytes([process.pid])
        process.communicate(b"\n")
    assert 8 << 20 <= held < 16 << 20
    assert process.returncode == 0


MAPPED = """
import mmap, os, sys
kept = []
def mapped(name):
    with open(name, "w+b") as file:
        file.truncate(4096)
        kept.append(mmap.mmap(file.fileno(), 4096))
        return os.fstat(file.fileno()).st_ino
inode = mapped("arguments")
for end in "\\r\\n\\v\\f\\x1c\\x1d\\x1e\\x85\\u2028\\u2029":
    mapped(f"{end} {inode} x")
    mapped(f"{end}7000-8000 rw-s 00000000 00:00 {inode} x")
print("there", flush=True)
input()
"""


def test_names_of_mapped_files_make_no_lines(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", MAPPED], cwd=tmp_path, **pipes) as process:
        assert process.stdout.readline()
        about = (tmp_path / "arguments").stat()
        (piece,) = proc_filesystem.find_mapped_pieces(process.pid, (about.st_dev, about.st_ino))
        lines = proc_filesystem.read_memory_map(f"/proc/{process.pid}")
        process.communicate(b"\n")
    assert piece[1:] == (4096, 0)
    assert sum(str(tmp_path) in line for line in lines) == 21
    assert process.returncode == 0


def test_a_list_of_mappings_without_a_bound_is_not_read(monkeypatch):
    monkeypatch.setattr(proc_filesystem, "MAX_MAP_BYTES", 1000)
    with pytest.raises(proc_filesystem.OversizedMemoryMap, match="mappings"):
        proc_filesystem.find_mapped_pieces(os.getpid(), (0, 0))
    assert "mappings" in ResourceUse("/").excess([os.getpid()], 0, 0)
