"""Attacks on and from the processes that Shiplap starts: what they import, and what they answer."""

from __future__ import annotations

import ast
import math
import sys
import time
from pathlib import Path

import msgspec
import pytest

from shiplap.errors import ShiplapError
from shiplap.packaging.worker import fill_apart
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.proc_filesystem import thread_states
from shiplap.sandbox.protocol import MESSAGE_HEAD, Answer, Done, Failed, ImportModule, Inspect, LoadTarget, pack_message
from shiplap.sandbox.request_errors import ProcessEnded, RequestFailed, Timeout
from shiplap.sandbox.supervisor import Bounds, SandboxLauncher
from shiplap.tuning.sandboxed.workers import OpenTask
from shiplap.tuning.worker_process import WorkerProcess
from shiplap_testing.effort import sampled
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


@pytest.mark.long
def test_a_module_of_the_current_folder_is_not_loaded_by_a_worker_that_packages(planted, tmp_path):
    """``python -m`` looks in the current folder first: in /tmp, another user's ``json.py`` was loaded."""
    (tmp_path / "mylib").mkdir()
    (tmp_path / "mylib" / "__init__.py").touch()
    with pytest.raises(ShiplapError, match="no op is declared"):
        fill_apart(["mylib"], tmp_path)
    assert not planted.exists()


def test_a_module_of_the_current_folder_is_not_loaded_by_a_worker_that_tunes(planted):
    with WorkerProcess() as isolation, pytest.raises(RequestFailed, match="no an::op"):
        isolation.open_task(OpenTask("an::op", "it", [], "", [*sys.path], "", "cpu", "", "auto", 1, []))
    assert not planted.exists()


@pytest.mark.long
def test_a_module_of_the_current_folder_is_not_loaded_by_a_referee(planted, monkeypatch):
    """An empty entry of ``sys.path`` is the current folder, too."""
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with SandboxLauncher() as launcher:
        assert launcher.ask(ImportModule("math")) == Done()
        environment = Path(f"/proc/{launcher.pid}/environ").read_bytes().split(b"\0")
    assert not planted.exists()
    paths = next(line for line in environment if line.startswith(b"PYTHONPATH="))
    assert b"" not in paths.partition(b"=")[2].split(b":")


def test_every_process_of_python_leaves_the_current_folder_out():
    """``-P`` or ``-I`` behind every ``sys.executable`` of the sources."""
    calls = 0
    for source in sorted((REPOSITORY / "packages").glob("*/src/**/*.py")):
        text = source.read_text(encoding="utf-8")
        if "shiplap-testing" in source.parts or "sys.executable" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                calls += 1
                assert ast.literal_eval(node.elts[1]) in ("-P", "-I"), f"{source}:{node.lineno}"
    assert calls > 5


# --- answers ----------------------------------------------------------------------------------------------------------


def reply_bytes(body: bytes) -> bytes:
    return MESSAGE_HEAD.pack(len(body)) + body


REPLIES = {
    "no msgpack": reply_bytes(b"\xc1\xff"),
    "JSON": reply_bytes(b'{"do": "load"}'),
    "a pickle": reply_bytes(b"\x80\x04cposix\nsystem\n."),
    "nothing": reply_bytes(b""),
    "a list": reply_bytes(b"\x90"),
    "deep": reply_bytes(b"\x91" * 100_000),
    "not UTF-8": reply_bytes(b"\x91\xa2\xff\xfe"),
    "another reply": pack_message(Answer(yes=True)),
    "a request": pack_message(Inspect()),
    "a reply and more": reply_bytes(pack_message(Done())[MESSAGE_HEAD.size :] + b"\x01"),
    "one field more": reply_bytes(msgspec.msgpack.encode(["Done", 1])),
    "a text without an end": pack_message(Failed("x" * 401)),
    "a length without an end": MESSAGE_HEAD.pack((1 << 20) + 1),
}


@pytest.fixture(scope="module")
def launcher():
    with SandboxLauncher() as started:
        yield started


@pytest.mark.parametrize("locked", [True, False], ids=["of the judge", "of the tuner"])
@pytest.mark.parametrize("name", sampled(REPLIES, 7))
def test_an_answer_of_another_form_ends_its_process(launcher, tmp_path, name, locked):
    """Code that is not trusted can write where its process answers."""
    (tmp_path / "it.py").write_text(f"import os, time\nos.write(3, {REPLIES[name]!r})\ntime.sleep(600)\n")
    prisoner = launcher.start([str(tmp_path)], Bounds(seconds=60.0), locked=locked)
    message = LoadTarget(str(tmp_path / "it.py"), ["it"], "function", [], 1)
    with pytest.raises(ProcessEnded, match=r"no valid message|a message of 1048577 bytes"):
        prisoner.request_reply(message, ArgumentArena().write())
    assert thread_states(prisoner.pid) <= {"Z", "X"}
    prisoner.kill()


def test_half_an_answer_is_waited_for_no_longer_than_a_run_may_take(launcher, tmp_path):
    (tmp_path / "it.py").write_text("import os, time\nos.write(3, b'{')\ntime.sleep(600)\n")
    prisoner = launcher.start([str(tmp_path)])
    prisoner.run = lambda: (0.1, 0.0)
    with pytest.raises(ProcessEnded, match="no answer for"):
        prisoner.request_reply(LoadTarget(str(tmp_path / "it.py"), ["it"], "function", [], 1), ArgumentArena().write())


@pytest.mark.parametrize("since", [math.inf, math.nan, 1e300])
def test_a_time_that_a_kernel_has_written_does_not_stop_the_clock(launcher, since):
    """The memory that says since when a candidate runs is shared with what runs."""
    prisoner = launcher.start()
    prisoner.run = lambda: (2.0, since)
    try:
        ends = time.monotonic() + 10.0
        assert not prisoner._exceeded_limit(ends, 10.0)
        assert prisoner._exceeded_limit(ends - 13.0, 10.0).startswith("no answer for")
    finally:
        prisoner.kill()


@pytest.mark.parametrize(
    ("until", "seconds", "raised"), [(600.0, 1.5, Timeout), (math.inf, 0.3, ProcessEnded)], ids=["judge", "tuner"]
)
def test_a_compiler_that_needs_longer_than_a_request_may_take_is_no_hang(launcher, tmp_path, until, seconds, raised):
    (tmp_path / "it.py").write_text("import subprocess\nsubprocess.run(['sleep', '600'])\n")
    prisoner = launcher.start([str(tmp_path)], until=time.monotonic() + until)
    prisoner.bounds = Bounds(seconds=seconds)
    with pytest.raises(ProcessEnded, match="no answer for") as caught:
        prisoner.request_reply(LoadTarget(str(tmp_path / "it.py"), ["it"], "function", [], 1), ArgumentArena().write())
    assert caught.type is raised
