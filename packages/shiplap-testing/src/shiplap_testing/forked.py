"""Python programs of tests, each in a process of its own, forked from one that has imported torch and its compiler.

A process that compiles something imports for five seconds first. What a program finds here is what it would find after
it has compiled a graph, but for the graph (private.py), and nothing of shiplap. Where variables differ that torch or
Triton read when they are imported, there is another process to fork from; that with Triton's interpreter has a quicker
one (quick_interpreter.py). One more has imported modules of Shiplap as well, which takes most programs a second.
Programs about imports are started the ordinary way.

Run as a script with the path of a socket, this is that process. All workers of a run share it: each connection is
served by a process forked from it, with one JSON line in for a program, its pid and its status out.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import hashlib
import json
import os
import random
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

# As paths.py has it: run as a script, this file imports nothing of ours.
REPOSITORY = Path(os.environ.get("SHIPLAP_TEST_ROOT") or Path(__file__).parents[4]).resolve()
IMPORTED = "SHIPLAP_TEST_IMPORTED"  # of a server: the modules of Shiplap that it has imported
READ_AT_IMPORT = ("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_", "OMP_", IMPORTED)
WITH_VERBS = (
    "shiplap.dispatch shiplap.audit shiplap.cli.app"  # what programs import that run the command or declare ops
)
WITH_FAMILIES = "shiplap_dense shiplap_slidesparse shiplap_sparse3d"  # and those that interpret their kernels
READ_LATER = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
OURS = {"TORCH_COMPILE_CACHE_KEY_TAG"}  # of the ops that this process has declared: a program declares its own
HUGE, MADV_COLLAPSE = 2 << 20, 25  # of Linux: bytes of a huge page, and the request for some
GROWTH, LARGEST = 64 << 20, 4 << 30  # bytes after which it is asked again, and of a span
FOLDER = "SHIPLAP_TEST_FORKED"  # where the sockets of a run are: its workers and their programs inherit it

_resident = 0  # bytes of this process when its memory was moved to huge pages
spent = 0.0  # seconds of processor time of what was forked for this process, to which it is no child
outlived = 0.0  # those of them that launchers spent which several tests had, and the templates of such launchers


def python(
    *command: object,
    cwd: Path = REPOSITORY,
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
    imported: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run ``python *command`` in a forked process that has already imported torch's compiler, and return the ended
    process with its output.

    ``command`` is a script, ``-m module`` or ``-c code`` with its arguments, after any ``-W`` filters. ``cwd`` is the
    working directory. ``env`` has the environment variables, which are those of this process if it is None. Raise
    ``subprocess.TimeoutExpired`` after ``timeout`` seconds, when the process is killed.

    ``imported`` names further modules, separated by blanks, that the process has imported. It is ``WITH_VERBS`` or
    ``WITH_FAMILIES`` for a program that imports them from where this process does, and is not about their import.
    """
    environment = dict(os.environ if env is None else env)
    early = _variables_read_at_import(environment | ({IMPORTED: imported} if imported else {}))
    arguments = [str(a) for a in command]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        status = _ask(
            _server(early, threading.get_ident()), [arguments, str(cwd), environment, str(out), str(err)], timeout
        )
        if status is None:
            raise subprocess.TimeoutExpired(arguments, timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(
            arguments, status, out.read_text(errors="replace"), err.read_text(errors="replace")
        )


def interpreted(
    *command: object, env: Mapping[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``python *command`` as :func:`python` does, with the environment variable ``TRITON_INTERPRET=1``, by which
    Triton interprets its kernels. The families of ops are imported already. Return the ended process. ``more`` has
    further keyword arguments of :func:`python`.
    """
    environment = {**(os.environ if env is None else env), "TRITON_INTERPRET": "1"}
    return python(*command, env=environment, **{"imported": WITH_FAMILIES, **more})


def _variables_read_at_import(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return, as sorted pairs of name and value, the variables of ``environment`` that torch or Triton read when they
    are imported.
    """
    names = sorted(n for n in environment.keys() - READ_LATER - OURS if n.startswith(READ_AT_IMPORT))
    return tuple((n, environment[n]) for n in names)


def _ask(server: IO[bytes], program: list[object], timeout: float) -> int | None:
    """Send ``program`` to the process behind the connection ``server``, wait for the program, and return its exit
    status. If it takes more than ``timeout`` seconds, kill it and return None.

    The processor time of the program is added to the module's variable ``spent``.
    """
    global spent
    server.write(json.dumps(program).encode() + b"\n")
    pid = int(server.readline())
    # The pid comes at once, the status when the program has ended.
    late = not select.select([server], [], [], timeout)[0]
    if late:
        os.kill(pid, signal.SIGKILL)
    status, seconds = server.readline().split()
    spent += float(seconds)
    return None if late else int(status)


def settle() -> None:
    """Exempt all objects that exist now from garbage collection, and let the collector run less often.

    The collector took a tenth of the time of tests that compile. Exempt objects are not written to, so forked processes
    share their memory.
    """
    gc.collect()
    # Frozen objects are not written to by the collector, so that forked processes share their memory.
    gc.freeze()
    gc.set_threshold(100_000, 20, 10)
    use_huge_pages()


def use_huge_pages() -> None:
    """Move what this process has allocated to huge pages if it has grown by 64 MB since this function last did so. Do
    nothing outside a run with several processes.
    """
    global _resident
    with contextlib.suppress(OSError):
        now = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
        if os.environ.get(FOLDER) and now > _resident + GROWTH:
            _resident = now
            _advise_huge_pages()


def _advise_huge_pages() -> None:
    """Move what this process has allocated to huge pages, if Linux can do so (from version 6.1 on). Later allocations
    are not affected.

    A fork then took 9 instead of 22 ms, and a compilation in the forked process 0.36 instead of 0.43 s (two shared
    cores, 2026-11-29).
    """
    with contextlib.suppress(OSError, AttributeError):
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            span, access, _, _, inode, *name = line.split(None, 5)
            first, last = (int(place, 16) for place in span.split("-"))
            first, last = -(-first // HUGE) * HUGE, last // HUGE * HUGE
            anonymous = access == "rw-p" and inode == "0" and name in ([], ["[heap]"])
            if anonymous and first < last < first + LARGEST:  # what is larger is reserved, not in use
                advise(first, last - first, MADV_COLLAPSE)


def shared() -> str:
    """Return the folder for the sockets of the processes of this test run. The first process that calls this function
    creates the folder, and removes it when it ends.
    """
    if not os.environ.get(FOLDER):
        from shiplap_testing.folder import temporary  # not where this file is run as a script

        os.environ[FOLDER] = str(temporary("forked"))
    return os.environ[FOLDER]


def place(environment: Mapping[str, str]) -> Path:
    """Return the path of the socket on which the server for programs with the environment variables ``environment``
    listens.

    Programs share a server if those variables are equal that torch or Triton read at their import.
    """
    digest = hashlib.sha256(repr(_variables_read_at_import(environment)).encode()).hexdigest()[:16]
    return Path(shared(), digest)


@cache
def _server(early: tuple[tuple[str, str], ...], thread: int) -> IO[bytes]:
    """Return a connection to a server, a process that has imported torch and forks programs. The first process that
    needs the server starts it.

    ``early`` are those environment variables of the programs that torch or Triton read at their import. Each
    ``thread``, given by its id, gets a connection of its own.
    """
    global spent
    path = place(dict(early))
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        # Two workers that need a server at the same time must not start two.
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = _connected(str(path)) or _started(str(path), dict(early))
    stream = connection.makefile("rwb", buffering=0)
    spent += float(stream.readline())
    return stream


def _connected(path: str) -> socket.socket | None:
    """Return a connection to the socket ``path``, or None if no process listens on it."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:  # there is none, or it has ended
        connection.close()
        return None
    return connection


def _started(path: str, early: dict[str, str]) -> socket.socket:
    """Start a server that listens on the socket ``path``, and return a connection to it. A server is a process that
    imports torch and forks programs.

    ``early`` are environment variables of the server. Raise ``RuntimeError`` if the server ends before it listens.
    """
    kept = {n: v for n, v in os.environ.items() if n in READ_LATER or not n.startswith((*READ_AT_IMPORT, "PYTHONPATH"))}
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    command = [sys.executable, __file__, path]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**kept, **early})
    _processes.append(process)
    while not (connection := _connected(path)):
        if process.poll() is not None:
            raise RuntimeError(f"the process to fork from ended with status {process.returncode}")
        time.sleep(0.02)
    return connection


_processes: list[subprocess.Popen[bytes]] = []  # what this process started; each ends when nobody is connected to it


def _serve(path: str) -> None:
    """Import torch's compiler, listen on the socket ``path``, and fork a process for each connection.

    Return when all forked processes have ended. Without any connection, return when the process that started this one
    has ended.
    """
    del sys.path[0]  # the folder of this file
    runpy.run_path(str(Path(__file__).with_name("private.py")))["import_compiler"]()
    if os.environ.get("TRITON_INTERPRET") == "1":
        runpy.run_path(str(Path(__file__).with_name("quick_interpreter.py")))["quicken"]()
    for module in os.environ.get(IMPORTED, "").split():
        with contextlib.suppress(ImportError):  # what is not installed, the program does not import either
            import_module(module)
    settle()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        handlers, told, parent = set[int](), time.process_time(), os.getppid()
        while not _all_ended(handlers) if handlers else os.getppid() == parent:
            if not select.select([listening], [], [], 1.0)[0]:
                continue
            connection, _ = listening.accept()
            if pid := os.fork():
                handlers.add(pid)
            else:
                listening.close()
                _handle(connection.makefile("rwb", buffering=0), told)
                os._exit(0)
            connection.close()
            told = 0.0


def _all_ended(handlers: set[int]) -> bool:
    """Remove the ids of processes that have ended from ``handlers``, and return whether the set is empty then."""
    handlers.difference_update([pid for pid in handlers if os.waitpid(pid, os.WNOHANG)[0]])
    return not handlers


def _handle(connection: IO[bytes], told: float) -> None:
    """Read programs from ``connection``, one JSON line each, and run each in a forked process.

    The first line that is written to ``connection`` is ``told``, the processor time of the imports. For each program, a
    line with its process id follows, and then a line with its exit status and its processor time.
    """
    connection.write(b"%f\n" % told)
    for line in connection:
        pid = os.fork()
        if not pid:
            connection.close()
            _run(*json.loads(line))
        connection.write(b"%d\n" % pid)
        _, status, usage = os.wait4(pid, 0)
        connection.write(b"%d %f\n" % (os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime))


def _run(arguments: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> None:
    """Run ``python *arguments`` in this newly forked process, and end the process. ``cwd`` is its working directory,
    ``environment`` are its environment variables, and ``out`` and ``err`` are the paths of the files for its output.
    """
    for number, path in enumerate((os.devnull, out, err)):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(handle, number)
        os.close(handle)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    # All forked processes would draw the same numbers otherwise.
    random.seed()
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    # The program must not see the names of the server.
    sys.modules["__main__"] = types.ModuleType("__main__")
    _ended(partial(_program, arguments), atexit._run_exitfuncs)


def child(run: Callable[[], object]) -> int:
    """Fork a process that calls ``run`` and then ends. Return its process id in the calling process.

    Its exit status is that of ``SystemExit``, 1 for any other exception, and 0 otherwise. Functions that were
    registered to run at exit do not run in it.
    """
    pid = os.fork()
    if not pid:
        _ended(run)
    return pid


def _ended(run: Callable[[], object], last: Callable[[], object] = lambda: None) -> NoReturn:
    """Call ``run`` and then ``last``, and end this process with the exit status that Python would have."""
    status = 1
    try:
        run()
        status = 0
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        last()
        sys.stdout.flush()
        sys.stderr.flush()
        # An exception would run the code around the fork in this process, too.
        os._exit(status)


def _program(arguments: list[str]) -> None:
    """Run a program as ``__main__`` in this process.

    ``arguments`` are those of Python. They are the options ``-W filter`` and ``-P``, then ``-c code``, ``-m module`` or
    the path of a script, and then the arguments of the program.
    """
    safe = False  # -P: neither the current folder nor that of the program is searched
    while arguments[0] in ("-W", "-P"):
        if arguments[0] == "-W":
            warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        safe |= arguments[0] == "-P"
        arguments = arguments[2 if arguments[0] == "-W" else 1 :]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path[:0] = [] if safe else [""]
        exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[:0] = [] if safe else [os.getcwd()]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[:0] = [] if safe else [str(Path(arguments[0]).resolve().parent)]
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _serve(sys.argv[1])
