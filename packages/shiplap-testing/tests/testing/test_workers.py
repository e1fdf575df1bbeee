"""Workers are forked from a process that has imported the tests; without it they are ordinary processes."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shiplap_testing import workers
from shiplap_testing.forked import python

TESTS = """
import os, sys, threading, torch
from pathlib import Path

IMPORTED = os.getpid()

def told():
    Path(os.environ["PYTEST_XDIST_WORKER"]).write_text(f"{IMPORTED} {os.getppid()} {torch.get_num_threads()}")

def test_was_imported_elsewhere():
    told()
    assert os.environ["MINE"] == "set"

def test_ends_its_worker():
    os._exit(3)

def test_comes_after_it():  # in a worker that has taken the place of the one that ended
    told()
    assert "torch._inductor.compile_fx" in sys.modules
"""


def test_without_the_process_a_worker_is_an_ordinary_one(tmp_path: Path) -> None:
    """As where it died of what it imported: whoever collects says what that was."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "workers"))
        listening.listen()
        ends = threading.Thread(target=lambda: listening.accept()[0].close())
        ends.start()
        command = [sys.executable, "-I", "-S", workers.__file__, "join", tmp_path / "workers"]
        program = "import sys; print(sys.stdin.read(), sys.flags.no_site)"
        done = subprocess.run([*command, "-u", "-c", program], input="asked", capture_output=True, text=True)
        ends.join()
    assert (done.stdout, done.returncode) == ("asked 0\n", 0), done.stderr


def test_an_accelerator_is_used_by_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert workers.possible() == (not any(map(os.path.exists, workers.ACCELERATORS)))
    monkeypatch.setattr(workers, "ACCELERATORS", ("/dev/null",))
    assert not workers.possible()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which hides it from all programs
    assert workers.possible()


@pytest.mark.long
@pytest.mark.skipif(not workers.possible(), reason="an accelerator")
def test_two_workers_find_the_same_imports_and_one_that_ends_is_replaced(tmp_path: Path) -> None:
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = ("-m", "pytest", "-q", "-p", "shiplap_testing.plugin", "-n", 2, "--dist", "loadfile", "--dearest", 1)
    done = python(*command, tmp_path, cwd=tmp_path, env={**os.environ, "MINE": "set"})
    assert "2 failed, 4 passed" in done.stdout, done.stdout + done.stderr
    assert {"gw2", "gw3"} & set(os.listdir(tmp_path)), "a third worker, or a fourth that was quicker"
    words = [path.read_text().split() for path in tmp_path.glob("gw*")]
    assert len({imported for imported, _, _ in words}) == 1, "one process imported the tests"
    assert all(imported == parent for imported, parent, _ in words), "and was forked for each worker"
    assert {int(threads) for _, _, threads in words} == {
        int(python("-c", "import torch; print(torch.get_num_threads())").stdout)
    }
