"""A launcher that waits: for whom, for how long, and what becomes of it."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from shiplap.errors import ShiplapError
from shiplap.sandbox import launcher_pool as module
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.launcher_pool import IdleLauncher, LauncherPool
from shiplap.sandbox.proc_filesystem import list_descendants, stat_fields
from shiplap.sandbox.protocol import Done, ImportModule, LoadTarget
from shiplap.sandbox.request_errors import ProcessEnded
from shiplap.sandbox.supervisor import SandboxedProcess, SandboxLauncher


@pytest.fixture(scope="module")
def keeper():
    """One for all tests: a launcher takes seconds to start. The variable that names the test does not matter to it."""
    made = LauncherPool()
    yield made
    made.end()


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine takes longer than the seconds after which an idle launcher is given up."""
    monkeypatch.setattr(module, "PROMPT_S", 120.0)


def is_gone(pid, seconds=120.0):
    """Whether there is no such process, nor what is left of one that nobody waited for."""
    ends = time.monotonic() + seconds
    while (there := stat_fields(pid)) and time.monotonic() < ends:
        time.sleep(0.02)
    return not there


def rested(keeper):
    """The process of a launcher that has served, and waits."""
    launcher = keeper.take()
    launcher.start().kill()
    keeper.leave(launcher)
    return keeper.pid


# --- for whom ---------------------------------------------------------------------------------------------------------


def test_the_next_one_gets_it_with_nothing_of_the_last(keeper):
    launcher = keeper.take()
    launcher.start().kill()
    left = launcher.start()  # nobody has ended it
    first, folder = launcher.pid, launcher.folder
    keeper.leave(launcher)
    assert keeper.pid == first
    assert not os.path.exists(folder)
    assert os.readlink(f"/proc/{first}/cwd") == "/"
    assert not list_descendants(first)
    assert is_gone(left.pid)
    left.connection.close()
    handles = {os.readlink(f"/proc/{first}/fd/{n}") for n in os.listdir(f"/proc/{first}/fd")}
    assert sum(h.startswith("socket:") for h in handles) == 1, handles
    second = keeper.take()
    assert keeper.pid == -1
    second.start().kill()
    assert second.pid == first
    assert second.folder != folder
    keeper.leave(second)
    assert keeper.pid == first


def test_one_that_nobody_needed_is_put_back_as_it_is(keeper):
    waiting = rested(keeper)
    taken = keeper.take()
    assert taken.resting
    keeper.leave(taken)
    assert (keeper.pid, taken.resting, taken.folder) == (waiting, True, "")


def test_one_that_never_started_is_not_kept():
    keeper = LauncherPool()
    keeper.leave(keeper.take())
    assert keeper.pid == -1


@pytest.mark.parametrize("what", ["environment", "path", "folder", "limit", "processors"])
def test_a_program_that_has_changed_gets_another_one(what, monkeypatch, tmp_path):
    launcher = IdleLauncher()
    launcher._process = SimpleNamespace(poll=lambda: None)  # it runs
    launcher._surroundings = module._launcher_surroundings()
    assert launcher.fits()
    if what == "environment":
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
    elif what == "path":
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    elif what == "folder":
        monkeypatch.chdir(tmp_path)
    elif what == "limit":
        monkeypatch.setattr(module.resource, "getrlimit", lambda limit: (1, 1))
    else:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {99})
    assert not launcher.fits()


def test_the_one_that_does_not_fit_is_ended(keeper, monkeypatch):
    waiting = rested(keeper)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert keeper.take().pid == -1
    assert is_gone(waiting, 0)


def test_one_that_may_have_been_reached_is_not_kept(keeper, monkeypatch):
    launcher = keeper.take()
    launcher.start(locked=False).kill()
    assert not launcher.rest(1.0), "who is not locked in may reach it"
    launcher.sealed = True
    first = SandboxedProcess.__post_init__

    def without(self):
        first(self)
        self.missing = {"files": "Landlock: Function not implemented"}

    with monkeypatch.context() as patch:
        patch.setattr(SandboxedProcess, "__post_init__", without)
        launcher.start().kill()
    launcher.start().kill()  # that later ones have every facility does not count
    assert not launcher.rest(1.0)
    launcher.sealed = True

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shiplap.sandbox.supervisor.receive_message", interrupted)
        with pytest.raises(KeyboardInterrupt):
            launcher.ask(ImportModule("math"))
    assert not launcher.rest(1.0), "the next answer would be that of another question"
    served = launcher.pid
    keeper.leave(launcher)
    assert keeper.pid == -1
    assert is_gone(served, 0)


@pytest.mark.long
def test_one_that_has_ended_is_replaced_when_it_is_needed(keeper):
    waiting = rested(keeper)
    taken = keeper.take()  # at the last moment of its life
    os.kill(waiting, signal.SIGKILL)
    taken.start().kill()
    assert taken.pid != waiting
    keeper.leave(taken)
    assert is_gone(waiting, 0)


REACHES = """
import ctypes, os, signal
PARENT = os.getppid()
libc = ctypes.CDLL(None, use_errno=True)
ways = {
    "stop it": lambda: os.kill(PARENT, signal.SIGSTOP),
    "interrupt it": lambda: os.kill(PARENT, signal.SIGINT),
    "write its memory": lambda: open(f"/proc/{PARENT}/mem", "r+b"),
    "read its memory": lambda: open(f"/proc/{PARENT}/mem", "rb"),
    "its files": lambda: open(f"/proc/{PARENT}/fd/3", "rb"),
    "its folder": lambda: open(f"/proc/{PARENT}/cwd/../planted.py", "w"),
    "beside its own folder": lambda: open("../planted.py", "w"),
    "another's folder": lambda: os.mkdir("../2/planted"),
}
done = []
for name, way in ways.items():
    try:
        way()
    except OSError:
        continue
    done.append(name)
if libc.ptrace(16, PARENT, 0, 0) == 0:
    done.append("ptrace")
def points(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""
if sum(points(n).startswith("socket:") for n in os.listdir("/proc/self/fd")) != 1:
    done.append("another connection than its own")
if done:
    raise RuntimeError(f"it reached {done}")
def it(*args):
    return ()
"""


def test_a_process_does_not_reach_the_launcher_that_will_serve_the_next(keeper, tmp_path):
    (tmp_path / "it.py").write_text(REACHES)
    order = LoadTarget(str(tmp_path / "it.py"), ["it"], "function", [], 1)
    launcher = keeper.take()
    prisoner, other = launcher.start([str(tmp_path)]), launcher.start()
    assert prisoner.request_reply(order, ArgumentArena().write())[0] == Done()
    prisoner.kill()
    other.kill()
    maps = Path(f"/proc/{launcher.pid}/maps").read_text()
    keeper.leave(launcher)
    assert keeper.pid == launcher.pid
    assert str(tmp_path) not in maps
    assert stat_fields(keeper.pid)[0] in "SR", "it stands still"


def test_an_interrupt_of_the_terminal_is_for_the_program_alone(keeper):
    """A waiting launcher must not end with a traceback in the user's terminal. What it forks is as any program."""
    launcher = keeper.take()
    prisoner = launcher.start()
    ignored = {
        pid: int(next(s for s in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in s).split()[1], 16)
        for pid in (launcher.pid, prisoner.pid)
    }
    prisoner.kill()
    bit = 1 << (signal.SIGINT - 1)
    assert ignored[launcher.pid] & bit
    assert not ignored[prisoner.pid] & bit
    os.kill(launcher.pid, signal.SIGINT)
    launcher.start().kill()
    keeper.leave(launcher)
    assert keeper.pid == launcher.pid


# --- for how long -----------------------------------------------------------------------------------------------------


def test_it_ends_when_nobody_has_needed_it_for_a_while():
    keeper = LauncherPool(seconds=0.3)
    waiting = rested(keeper)
    assert is_gone(waiting), "gone, and waited for"
    assert keeper.pid == -1
    assert keeper.take().pid == -1


@pytest.mark.long
def test_it_ends_by_itself_where_nobody_ends_it():
    launcher = IdleLauncher()
    launcher.ask(ImportModule())
    assert launcher.rest(0.2)
    ends = time.monotonic() + 10
    while launcher._process.poll() is None and time.monotonic() < ends:
        time.sleep(0.02)
    assert launcher._process.returncode == 0
    assert not launcher.fits()
    launcher.close()


PROGRAM = """
import os, signal, sys, time
from shiplap.sandbox.launcher_pool import standby
if __name__ == "__main__":
    launcher = standby.take()
    launcher.start().kill()
    standby.leave(launcher)
    print(standby.pid, flush=True)
    {rest}
"""

ENDS = {
    "by its end": "pass",
    "at once": "os._exit(0)",
    "by a signal": "os.kill(os.getpid(), signal.SIGKILL)",
    "by a signal, with a fork that goes on": "os.fork() and os.kill(os.getpid(), signal.SIGKILL) or time.sleep(60)",
}
SHORT = ("by a signal, with a fork that goes on",)  # the others are alike


@pytest.mark.parametrize(
    "rest", [pytest.param(r, id=n, marks=[] if n in SHORT else pytest.mark.long) for n, r in ENDS.items()]
)
def test_it_ends_with_the_program(rest, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM.format(rest=rest)], stdout=subprocess.PIPE, cwd=tmp_path, process_group=0
    )
    try:
        waiting = int(process.stdout.readline())
        process.wait(60)
        assert is_gone(waiting)
    finally:
        process.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the fork


FORKS = """
child = os.fork()
if child == 0:
    assert standby.pid == -1 and standby.take().pid == -1
    sys.exit(0)  # in order, with all that is registered for the end
_, status = os.waitpid(child, 0)
launcher = standby.take()
launcher.start().kill()
print(status, launcher.pid, flush=True)
launcher.close()
"""


@pytest.mark.long
def test_a_fork_of_the_program_neither_has_nor_ends_it(tmp_path):
    source = PROGRAM.format(rest=textwrap.indent(FORKS, "    ").strip())
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error::ResourceWarning", "-c", source],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    waiting, status, served = map(int, done.stdout.split())
    assert (status, served) == (0, waiting), done.stderr
    assert not done.stderr


@pytest.mark.long
def test_nobody_else_is_served_while_it_is_taken(keeper):
    rested(keeper)
    one, other = keeper.take(), keeper.take()
    assert one is not other
    assert other.pid == -1
    keeper.leave(one)
    other.finish()
    with pytest.raises(ProcessEnded):
        other.start()
    keeper.leave(other)
    assert keeper.pid == one.pid


def test_a_temporary_folder_whose_path_is_no_text_is_named(tmp_path, monkeypatch):
    """It is in each request for a process."""
    folder = tmp_path / os.fsdecode(b"k\xff")
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with SandboxLauncher() as launcher, pytest.raises(ShiplapError) as e:
        launcher.start()
    assert (e.value.id, e.value.where) == ("SL617", "TMPDIR")
    assert r"k\udcff/shiplap-run-judge-" in e.value.got
    assert not list(folder.iterdir())
