"""Launchers that are forked from a template are as those that are started."""

import json
import os
import subprocess

import pytest

from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.protocol import Done, ImportModule, LoadTarget
from shiplap.sandbox.request_errors import RequestFailed
from shiplap.sandbox.supervisor import SandboxLauncher
from shiplap_testing import forked as forked_processes
from shiplap_testing.launchers import ForkedProcess, forked_launchers, ordinary_launchers

TOLD = """
import gc, json, os, signal, sys
torch = sys.modules["torch"]
raise RuntimeError(json.dumps([
    os.environ.get("SHIPLAP_TEST_WORD"), sys.path[0] == WORD, gc.isenabled(),
    [name for name in sys.modules if name.startswith("shiplap_testing")],
    signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, signal.getsignal(signal.SIGINT) == signal.default_int_handler,
    sys.argv[0], sorted(int(n) for n in os.listdir("/proc/self/fd"))[:4],
]))
"""


@pytest.fixture(scope="module")
def forked():
    with forked_launchers():
        yield


def told(launcher, folder):
    """Return what a sandboxed process of ``launcher`` says of its surroundings."""
    (folder / "it.py").write_text(TOLD.replace("== WORD", f"== {str(folder)!r}"))
    prisoner = launcher.start([str(folder)])
    order = LoadTarget(str(folder / "it.py"), ["it"], "function", [], 1)
    with pytest.raises(RequestFailed) as failed:
        prisoner.request_reply(order, ArgumentArena().write())
    text = str(failed.value)
    return json.loads(text[text.index("[") : text.rindex("]") + 1])


def test_a_forked_launcher_is_as_one_that_was_started(forked, monkeypatch, tmp_path):
    monkeypatch.setenv("SHIPLAP_TEST_WORD", "first")
    with SandboxLauncher() as launcher:
        launcher.ask(ImportModule())
        assert isinstance(launcher._process, ForkedProcess)
    monkeypatch.setenv("SHIPLAP_TEST_WORD", "second")
    monkeypatch.syspath_prepend(tmp_path)
    with SandboxLauncher() as launcher:
        forked_tells = told(launcher, tmp_path)
        assert isinstance(launcher._process, ForkedProcess)
    with ordinary_launchers(), SandboxLauncher() as launcher:
        started_tells = told(launcher, tmp_path)
        assert isinstance(launcher._process, subprocess.Popen)
    assert forked_tells == started_tells
    assert forked_tells[0] == "second"


@pytest.mark.long
def test_what_a_process_reads_when_it_starts_is_read(forked, monkeypatch):
    with SandboxLauncher() as launcher:
        launcher.ask(ImportModule())
        assert isinstance(launcher._process, ForkedProcess)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        with SandboxLauncher() as other:
            other.ask(ImportModule())
            assert isinstance(other._process, subprocess.Popen)


def test_the_end_of_a_forked_launcher_is_seen(forked):
    launcher = SandboxLauncher()
    launcher.ask(ImportModule())
    process = launcher._process
    assert isinstance(process, ForkedProcess)
    assert process.poll() is None
    assert process.returncode is None
    before, outlived = forked_processes.spent, forked_processes.outlived
    process.kill()
    assert process.wait() == process.poll() == process.returncode == 0
    process.kill()
    assert 0.0 < forked_processes.spent - before < 60.0, "its processor time is charged when it ends"
    assert forked_processes.outlived == outlived, "to the test that started it"
    launcher.close()
    assert not os.path.exists(launcher.folder)
    assert launcher.ask(ImportModule()) == Done(), "the next request starts another"
    launcher.close()


def test_the_time_of_a_launcher_that_another_test_started_is_no_cost_of_this_one(forked, monkeypatch):
    """As of a launcher that a fixture starts for all tests of a file."""
    launcher = SandboxLauncher()
    with monkeypatch.context() as patch:
        patch.setenv("PYTEST_CURRENT_TEST", "test_another.py::test_another (call)")
        launcher.ask(ImportModule())
    spent, outlived = forked_processes.spent, forked_processes.outlived
    launcher.close()
    seconds = forked_processes.spent - spent
    assert seconds > 0.0
    assert forked_processes.outlived - outlived == pytest.approx(seconds)
