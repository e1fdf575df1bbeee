"""Workers of pytest-xdist, forked from one process that has imported what the tests import.

Each worker of a run lists all tests. For that it would import torch, transformers and every file of tests, and rewrite
the assertions of a clean clone: 28 s of processor time, and three times that in ``make test``. Here one process imports
all of it once. Workers are forked from that, and list the tests in 3 s (two shared cores, 2026-11-26).

What a run needs once is done in that process too: headers are compiled (compilers.py), the instructions of the CPU are
tried, and the process from which programs of tests are forked is forked from it (forked.py).

Run as a script, this is that process, or what pytest-xdist takes for a worker: it hands its streams to a forked process
and waits until that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path

PART, NEAREST = "SHIPLAP_TEST_CHANGED_PART", "nearest"  # of the tests that --changed selects, those that run first
# Who may use an accelerator cannot be forked from a process that has asked how many there are.
ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


class Workers:
    """A handle to the fork server, the process from which pytest-xdist's workers are forked. The process that
    distributes the tests holds the handle.

    ``process`` is the fork server. ``path`` is the path of the socket on which the fork server listens.
    """

    def __init__(self, arguments: list[str], workers: Path, programs: Mapping[str, Path], count: int) -> None:
        """Start the process from which workers are forked. It listens on the socket ``workers`` and collects tests with
        the pytest ``arguments``.

        It also forks processes that listen on sockets and run the programs that tests start. ``programs`` maps the
        modules that such a process has imported beside torch's compiler, separated by blanks, to its socket. ``count``
        is the number of workers.
        """
        self.path = workers
        command = [sys.executable, "-P", __file__, "serve", workers]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self.process.stdin is not None
        sockets = [(modules, str(place)) for modules, place in programs.items()]
        self.process.stdin.write(json.dumps([arguments, sys.path, sockets, count]).encode() + b"\n")
        self.process.stdin.flush()

    def python(self) -> str:
        """Return the command by which pytest-xdist starts a worker, in place of the command of Python. It is one line
        for a shell.
        """
        return shlex.join([sys.executable, "-I", "-S", __file__, "join", str(self.path)])

    def end(self) -> None:
        """End the process from which workers are forked, and the workers that are still running."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def possible() -> bool:
    """Return whether workers can be forked on this machine. It must have ``fork`` and no accelerator, or an environment
    in which an empty ``CUDA_VISIBLE_DEVICES`` hides all accelerators from programs.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return hasattr(os, "fork") and (hidden or not any(os.path.exists(path) for path in ACCELERATORS))


def _join(path: str, command: list[str]) -> None:
    """Become a worker. Pass the standard streams of this process and ``command`` to a process that the server at the
    socket ``path`` forks, and wait until that process ends.

    If there is no server, ``python *command`` replaces this process.
    """
    with socket.socket(socket.AF_UNIX) as connection, contextlib.suppress(OSError):
        _connect(connection, path)
        message = json.dumps([command, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(connection, [len(message).to_bytes(8, "little")], [0, 1, 2])
        connection.sendall(message)
        if connection.recv(1):
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)  # the pipes are the worker's alone now: that it has ended is seen
            os.dup2(nothing, 1)
            connection.recv(1)
            return
    os.execv(sys.executable, [sys.executable, *command])


def _connect(connection: socket.socket, path: str) -> None:
    """Connect ``connection`` to the socket ``path``. Raise ``TimeoutError`` if no process listens on it within ten
    seconds.
    """
    # Ten seconds: the server imports before it listens.
    for _ in range(500):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            return connection.connect(path)
        time.sleep(0.02)
    raise TimeoutError(path)


def _serve(path: str) -> None:
    """Import what the tests import, listen on the socket ``path``, and fork a worker for each connection.

    When standard input is closed, kill the workers that are still running and return.
    """
    arguments, searched, programs, count = json.loads(sys.stdin.buffer.readline())
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        # The nearest tests to a change run few programs, and the first one starts the process that forks them.
        children = set[int]() if os.environ.get(PART) == NEAREST else {*_programs(programs, listening)}
        threads = _import(arguments, searched, headers=count > 1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever hands out the tests says when it is over
        told = _spent()
        while sys.stdin not in (ready := select.select([listening, sys.stdin], [], [], 1.0)[0]):
            children.difference_update([pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]])
            if listening in ready:
                connection, _ = listening.accept()
                if pid := os.fork():
                    children.add(pid)
                else:
                    listening.close()
                    _become_worker(connection, threads, told)
                connection.close()
                told = 0.0
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _programs(sockets: list[tuple[str, str]], listening: socket.socket) -> list[int]:
    """Fork the processes that fork the programs that tests start, and return their process ids.

    ``sockets`` has, for each process, the modules that it has imported at least, separated by blanks, and the path of
    its socket. All of them have imported torch's compiler, and the first one nothing of shiplap. This process needs the
    modules as well. ``listening``, its socket, is closed in them.
    """
    private = runpy.run_path(str(Path(__file__).with_name("private.py")))
    private["import_compiler"]()
    private["try_instructions"]()
    pids = []
    for modules, path in sockets:
        for module in modules.split():
            with contextlib.suppress(ImportError):  # what is not installed, no program imports
                import_module(module)
        pids.append(_fork_programs(path, listening))
    return pids


def _fork_programs(path: str, listening: socket.socket) -> int:
    """Fork a process that runs ``forked.py`` with the socket ``path``, and return its process id. ``listening``, the
    socket of the caller, is closed in it.
    """
    pid = os.fork()
    if not pid:
        listening.close()
        _replace_standard_streams([os.open(os.devnull, os.O_RDONLY)])
        file = str(Path(__file__).with_name("forked.py"))
        sys.argv = [file, path]
        sys.path.insert(0, os.path.dirname(file))  # as Python does for a script
        runpy.run_path(file, run_name="__main__")
        os._exit(0)
    return pid


def _import(arguments: list[str], searched: list[str], *, headers: bool) -> int:
    """Import what the tests of this run import, and return the number of threads that torch would use.

    ``arguments`` are those of pytest, and ``searched`` becomes the module path. Torch is left with one thread, since
    threads do not survive a fork. If ``headers`` is true, the compilation of shared headers is started in the
    background.
    """
    sys.path[:] = searched
    import_module("shiplap_testing.private").compile_headers_singly()
    torch = import_module("torch")
    threads: int = torch.get_num_threads()
    torch.set_num_threads(1)
    if headers:  # a run that has one worker compiles too little for them to pay
        compilers = import_module("shiplap_testing.compilers")
        compilers.headers()
        compilers.kernels()
    pytest = import_module("pytest")
    pytest.main([*arguments, "-n", "0", "--collect-only"])
    return threads


def _spent() -> float:
    """Return the seconds of processor time of this process and its ended children."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _become_worker(connection: socket.socket, threads: int, told: float) -> None:
    """Become the worker that connected by ``connection``, in this newly forked process. Take the standard streams, the
    current folder and the environment variables of the client, run its command, and end the process.

    Torch gets ``threads`` threads. ``told`` is the processor time of all imports, which is charged to the first worker.
    """
    size, streams, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as stream:
        command, cwd, environment = json.loads(stream.read(int.from_bytes(size, "little")))
    _replace_standard_streams(streams)
    connection.send(b"1")
    # The server ignores this signal, and a forked process inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    known = import_module("shiplap_testing.private").VECTORS
    vectors = {name: value for name, value in os.environ.items() if name == known}
    # The variables of the server are those of the whole run, not of this worker.
    os.environ.clear()
    os.environ.update(vectors | environment)
    os.chdir(cwd)
    random.seed()
    import_module("torch").set_num_threads(threads)
    sys.argv, sys.modules["__main__"] = ["-c"], types.ModuleType("__main__")
    forked = import_module("shiplap_testing.forked")
    forked.spent += told
    forked._ended(partial(exec, command[-1], vars(sys.modules["__main__"])), atexit._run_exitfuncs)


def _replace_standard_streams(handles: list[int]) -> None:
    """Make the file descriptors ``handles`` the standard input, output and error of this process, in this order. If
    there are fewer than three, the other streams stay.
    """
    for number, (handle, name, mode) in enumerate(zip(handles, ("stdin", "stdout", "stderr"), "rww", strict=False)):
        os.dup2(handle, number)
        os.close(handle)
        stream = os.fdopen(number, mode, buffering=1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(sys.argv[2])
    else:
        _join(sys.argv[2], sys.argv[3:])
