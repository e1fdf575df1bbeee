"""What Linux says about processes."""

import os
import subprocess
import sys
import time

import pytest

from shiplap.sandbox import proc_filesystem

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
