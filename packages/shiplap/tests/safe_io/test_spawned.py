"""Attacks on and from the processes that Shiplap starts: what they import, and what they answer."""

from __future__ import annotations

import ast
import math
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shiplap.errors import ShiplapError
from shiplap.packaging.worker import fill_apart
from shiplap.sandbox.supervisor import SandboxLauncher
from shiplap.tuning.bench import BEAT
from shiplap.tuning.verify import VerifyOutcome
from shiplap.tuning.worker_process import RaceReply, WorkerDied, WorkerProcess, convert_reply
from shiplap_testing.paths import REPOSITORY

PLANTED = "import os\nopen({mark!r}, 'w').write('loaded')\nos._exit(3)\n"


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Modules of names that every process imports, in the current folder; and the file that tells of their import."""
    mark, here = tmp_path / "mark", tmp_path / "here"
    here.mkdir()
    for name in ("json", "torch", "shiplap", "ctypes"):
        (here / f"{name}.py").write_text(PLANTED.format(mark=str(mark)))
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    return mark


def test_a_module_of_the_current_folder_is_not_loaded_by_a_worker_that_packages(planted, tmp_path):
    """``python -m`` looks in the current folder first: in /tmp, another user's ``json.py`` was loaded."""
    (tmp_path / "mylib").mkdir()
    (tmp_path / "mylib" / "__init__.py").touch()
    with pytest.raises(ShiplapError, match="no op is declared"):
        fill_apart(["mylib"], tmp_path)
    assert not planted.exists()


def test_a_module_of_the_current_folder_is_not_loaded_by_a_worker_that_tunes(planted):
    with WorkerProcess() as isolation:
        assert "KeyError" in isolation.ask({"do": "open"}, {})["closed"], "it has started, and misses the rest"
    assert not planted.exists()


@pytest.mark.long
def test_a_module_of_the_current_folder_is_not_loaded_by_a_referee(planted, monkeypatch):
    """An empty entry of ``sys.path`` is the current folder, too."""
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with SandboxLauncher() as launcher:
        assert launcher.ask({"do": "import", "module": "math"}) is not None
        environment = Path(f"/proc/{launcher.pid}/environ").read_bytes().split(b"\0")
    assert not planted.exists()
    paths = next(line for line in environment if line.startswith(b"PYTHONPATH="))
    assert b"" not in paths.partition(b"=")[2].split(b":")


def test_every_process_of_python_leaves_the_current_folder_out():
    """``-P`` or ``-I`` behind every ``sys.executable`` of the sources."""
    calls = 0
    for source in sorted((REPOSITORY / "packages").glob("*/src/**/*.py")):
        if "shiplap-testing" in source.parts:
            continue
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                calls += 1
                assert ast.literal_eval(node.elts[1]) in ("-P", "-I"), f"{source}:{node.lineno}"
    assert calls > 5


# --- answers ----------------------------------------------------------------------------------------------------------

LINES = {
    "no JSON": rb"{not json}\n",
    "a list": rb"[]\n",
    "a number": rb"5\n",
    "two answers": rb"{}\n{}\n",
    "no number": rb'{"a": NaN}\n',
    "deep": b"[" * 100_000 + rb"\n",
    "not UTF-8": rb"\xff\xfe\n",
    "one name twice": rb'{"a": 1, "a": 2}\n',
}


def speaks(isolation: WorkerProcess, code: str) -> None:
    """A worker of another kind in place of the right one."""
    isolation._process = subprocess.Popen(
        [sys.executable, "-I", "-c", f"import os, sys, time\nsys.stdin.readline()\n{code}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    handle = os.memfd_create("beat")
    os.ftruncate(handle, BEAT.size)
    isolation._beat = mmap.mmap(handle, BEAT.size)
    os.close(handle)
    BEAT.pack_into(isolation._beat, 0, 3, time.monotonic())


@pytest.mark.parametrize("name", LINES)
def test_an_answer_of_another_form_costs_the_worker(name):
    """A kernel can write where its worker answers. It was an exception of ``json``, or the answer to the next task."""
    with WorkerProcess(timeout=60.0) as isolation:
        line = ast.literal_eval(f'b"""{LINES[name].decode()}"""')
        speaks(isolation, f"os.write(1, {line!r}); time.sleep(600)")
        with pytest.raises(WorkerDied, match="no answer:"):
            isolation._exchange("{}")
        assert isolation._process is None


def test_an_answer_without_an_end_fills_no_memory():
    with WorkerProcess(timeout=60.0) as isolation:
        speaks(isolation, "while True: os.write(1, b' ' * 65536)")
        with pytest.raises(WorkerDied, match="longer than 1048576 bytes"):
            isolation._exchange("{}")


def test_half_an_answer_is_waited_for_no_longer_than_a_run_may_take():
    """The rest of the line was waited for without a limit."""
    with WorkerProcess(timeout=0.1) as isolation:
        speaks(isolation, "os.write(1, b'{'); time.sleep(600)")
        with pytest.raises(WorkerDied, match="no answer for"):
            isolation._exchange("{}")


@pytest.mark.parametrize("since", [math.inf, math.nan, 1e300])
def test_a_time_that_a_kernel_has_written_does_not_stop_the_clock(since):
    """The memory that says since when a candidate runs is shared with what runs."""
    with WorkerProcess(timeout=2.0) as isolation:
        speaks(isolation, "time.sleep(600)")
        mark = isolation._reset_beat
        isolation._reset_beat = lambda: (mark(), BEAT.pack_into(isolation._beat, 0, 3, since))
        with pytest.raises(WorkerDied, match="no answer for 2 s"):
            isolation._exchange("{}")


FORMS = [
    (VerifyOutcome, {"problem": 5}),
    (VerifyOutcome, {"problem": "", "refused": "no"}),
    (RaceReply, {"timings": {"x": {}}}),
    (RaceReply, {"timings": {"1": {"median": "fast"}}}),
    (RaceReply, {"timings": [], "failed": {}}),
    (RaceReply, {"failed": {"1": None}}),
    (RaceReply, {"error": 5}),
    (int, "1"),
    (int, 1.5),
]


@pytest.mark.parametrize(("form", "data"), FORMS)
def test_what_an_answer_holds_has_a_form(form, data):
    with pytest.raises(WorkerDied):
        convert_reply(data, form)
