"""Launchers of sandboxed processes, forked from one process of each worker that has imported what a launcher imports.

A launcher imports torch and the sandbox, 2 s of processor time, and tests start dozens of them. Here a template process
imports both once. A launcher that is forked from it serves the same requests, by the same function, with the
environment variables, the module path, the working folder and the output of the program that asked for it. Where
something differs that a process gets only when it starts, such as a variable that torch reads when it is imported or a
limit of the process, an ordinary launcher is started. The programs that tests run start ordinary launchers, too.

``serve_template`` runs in the template, which imports this file and ``forked.py``, and nothing else of the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import NoReturn

from shiplap_testing import forked

# Variables that Python, torch or OpenMP read when a process starts. A fork finds its module path itself.
READ_AT_START = ("PYTHON", "TORCH", "TRITON_", "OMP_", "MKL_", "KMP_", "LD_", "MALLOC_", "GOMP_", "CUDA_")
READ_LATER = {"PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_COMPILE_CACHE_KEY_TAG"}
LIMITS = [getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")]
LONGEST = 1 << 17  # bytes of a request
TURN_S = 0.05  # seconds for which a thread waits before another one may end the process
FILES = 3  # that come with a request: a connection, and the standard output and error
TEMPLATE = (
    "import gc, signal, sys; gc.disable(); signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "import shiplap.sandbox.launcher; from shiplap_testing.launchers import serve_template; "
    "serve_template(int(sys.argv[1]))"
)


class ForkedProcess:
    """A process that is no child of this one, with the part of the interface of ``subprocess.Popen`` that a launcher
    uses. Its exit status is not known: ``returncode`` is None while it runs, and 0 afterwards.
    """

    def __init__(self, pid: int, ended: Callable[[int], object]) -> None:
        """Describe the process with the id ``pid``, which has not been waited for yet. ``ended`` is called with its id
        when its end is seen.
        """
        self.pid, self.returncode = pid, None
        self._handle, self._ended = os.pidfd_open(pid), ended
        self._turn = threading.RLock()  # one thread at a time closes the handle, and none uses it then

    def poll(self) -> int | None:
        """Return 0 if the process has ended, and None if it still runs."""
        return self._wait(0.0)

    def wait(self) -> int | None:
        """Wait until the process has ended, and return 0."""
        while self._wait(TURN_S) is None:
            pass
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL to the process if it still runs."""
        with self._turn:
            if self.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _wait(self, seconds: float) -> int | None:
        """Wait for the end of the process, at most for ``seconds``. Return 0 if it has ended, and None otherwise."""
        with self._turn:
            if self.returncode is None and select.select([self._handle], [], [], seconds)[0]:
                self.returncode = 0
                os.close(self._handle)
                self._ended(self.pid)
        return self.returncode


class Template:
    """The template process, from which launchers are forked. It is started by the first request for a launcher."""

    def __init__(self) -> None:
        """Describe a template process that is not started yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._started_with: object = None
        self._owner = 0  # the id of the process that has started the template
        self._turn = threading.Lock()
        self._charged = 0.0  # seconds of processor time of ended launchers, which are no children of this process
        self._tests = dict[int, str]()  # by the process id of a launcher, the test that started it

    def open_launcher(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str], cwd: str, **how: bool
    ) -> ForkedProcess | subprocess.Popen[bytes]:
        """Return the process of a new launcher, which serves requests on the connection ``pass_fds[0]``.

        The arguments are those of ``subprocess.Popen``. A fork of the template has a session of its own, whatever
        ``how`` says. An ordinary launcher is started instead of a fork if this program is itself a fork, or if it has
        changed since the template started in a way that a fork of the template cannot make up for. Raise
        ``RuntimeError`` if the template process has ended.
        """
        if self._owner not in (0, os.getpid()):  # in a fork, whose parent would read the replies
            return subprocess.Popen(command, pass_fds=pass_fds, env=env, cwd=cwd, **how)
        with self._turn:
            if self._process is None:
                self._start(env)
            if self._started_with != _surroundings(env):
                return subprocess.Popen(command, pass_fds=pass_fds, env=env, cwd=cwd, **how)
            assert self._connection is not None
            request = json.dumps([dict(env), cwd]).encode()
            socket.send_fds(self._connection, [request], [pass_fds[0], 1, 2])
            reply = self._connection.recv(LONGEST)
            if not reply:
                raise RuntimeError(f"the template of launchers has ended with status {self._process.poll()}")
            pid = int(reply)
            self._tests[pid] = _current_test()
            return ForkedProcess(pid, self._charge)

    def _charge(self, pid: int) -> None:
        """Add the processor time of the launcher ``pid``, which has ended, to that of this process. Without this
        addition it would be counted when the template ends, as time of the test that runs then. Do nothing in a fork of
        this process.
        """
        if self._owner != os.getpid():
            return
        with self._turn:
            if self._connection is not None:
                self._connection.send(json.dumps(pid).encode())
                seconds = float(self._connection.recv(LONGEST))
                self._charged += seconds
                forked.spent += seconds
                if self._tests.pop(pid, "") != _current_test():
                    forked.outlived += seconds

    def _start(self, env: Mapping[str, str]) -> None:
        """Start the template process with the environment variables ``env`` of a launcher."""
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", TEMPLATE, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=env
            )
        self._started_with, self._owner = _surroundings(env), os.getpid()

    def end(self) -> None:
        """End the template process, and wait for it. Launchers that were forked from it go on."""
        if self._process is not None and self._connection is not None:
            self._connection.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold it, too
            self._connection.close()
            self._connection = None
            before = os.times()
            self._process.wait()
            now = os.times()
            forked.spent -= self._charged  # the processor time of the template, which is a child, includes it
            ended = now.children_user + now.children_system - before.children_user - before.children_system
            forked.outlived += ended - self._charged  # what it imported is of use to several tests


def _current_test() -> str:
    """Return the id of the test that runs in this process, or an empty string between tests."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


def _surroundings(env: Mapping[str, str]) -> object:
    """Return what a launcher with the environment variables ``env`` gets when it starts, and a fork of the template
    cannot get later, in a form that can be compared.
    """
    early = {n: v for n, v in env.items() if n.startswith(READ_AT_START) and n not in READ_LATER}
    limits = [resource.getrlimit(limit) for limit in LIMITS]
    users = os.getresuid(), os.getresgid(), tuple(os.getgroups())
    processors, nice = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    return early, limits, processors, nice, users, sys.executable


@contextlib.contextmanager
def forked_launchers() -> Iterator[None]:
    """Return a context in which the launchers that this process starts are forked from a template process."""
    template = Template()
    try:
        with _launchers_by(SimpleNamespace(Popen=template.open_launcher)):
            yield
    finally:
        template.end()


def ordinary_launchers() -> contextlib.AbstractContextManager[None]:
    """Return a context in which the launchers that this process starts import torch, as those of users do."""
    return _launchers_by(subprocess)


@contextlib.contextmanager
def _launchers_by(module: object) -> Iterator[None]:
    """Return a context in which launchers are started by the function ``Popen`` of ``module``."""
    from shiplap.sandbox import supervisor

    before = supervisor.subprocess
    vars(supervisor)["subprocess"] = module
    try:
        yield
    finally:
        vars(supervisor)["subprocess"] = before


def serve_template(handle: int) -> None:
    """Serve requests on the connection ``handle`` until it ends.

    A request with environment variables and a working folder forks a launcher, and the reply is its process id. The
    reply to the id of a launcher that has ended is its processor time in seconds.
    """
    sys.modules["shiplap.sandbox.child"].take_baseline()  # a launcher takes the rest, of what is imported later
    path = sys.path[len(os.environ["PYTHONPATH"].split(os.pathsep)) :]
    connection = socket.socket(fileno=handle)
    ended, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing)  # a launcher that has ended must not stay as a zombie
    spent = dict[int, float]()
    while True:
        ready = select.select([connection, ended], [], [])[0]
        if ended in ready:
            os.read(ended, 512)
            spent |= _wait_for_ended()
        if connection in ready:
            request, files, _, _ = socket.recv_fds(connection, LONGEST, FILES)
            if not request:
                return
            asked = json.loads(request)
            if isinstance(asked, int):
                spent |= _wait_for_ended()  # the signal may come later
                connection.send(b"%f" % spent.pop(asked, 0.0))
                continue
            pid = os.fork()
            if not pid:
                os.close(ended)
                os.close(writing)
                connection.close()
                _become_launcher(files, path, *asked)
            for file in files:
                os.close(file)
            connection.send(b"%d" % pid)


def _wait_for_ended() -> dict[int, float]:
    """Wait for all children of this process that have ended. Return the seconds of processor time of each by its id."""
    spent = dict[int, float]()
    with contextlib.suppress(ChildProcessError):
        while (ended := os.wait4(-1, os.WNOHANG))[0]:
            spent[ended[0]] = ended[2].ru_utime + ended[2].ru_stime
    return spent


def _become_launcher(files: list[int], path: list[str], environment: dict[str, str], cwd: str) -> NoReturn:
    """Serve the requests to a launcher in this newly forked process, and end the process.

    ``files`` are its connection, its standard output and its standard error. ``environment`` are its environment
    variables and ``cwd`` is its working folder. The module path becomes ``PYTHONPATH`` followed by ``path``.
    """
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, file in enumerate(files[1:], 1):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        sys.path[:] = [*environment["PYTHONPATH"].split(os.pathsep), *path]
        sys.argv = ["-c", str(files[0])]
        ours = __name__.partition(".")[0]
        for name in [n for n in sys.modules if n.partition(".")[0] == ours]:
            del sys.modules[name]  # an ordinary launcher has imported nothing of the tests
        from shiplap.sandbox.launcher import main

        main()
    finally:
        os._exit(0)
