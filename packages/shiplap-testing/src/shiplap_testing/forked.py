"""Python programs of tests, each in a process of its own, forked from one that has imported torch and its compiler.

A process that compiles something imports for five seconds first. What a program finds here is what it would find after
``import torch._inductor.compile_fx``, and nothing of shiplap. Where variables differ that torch or Triton read when
they are imported, there is another process to fork from. Programs about imports are started the ordinary way.

Run as a script, this is the process that forks: one JSON line in for a program, its pid and its status out.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

# As paths.py has it: run as a script, this file imports nothing of ours.
REPOSITORY = Path(os.environ.get("SHIPLAP_TEST_ROOT") or Path(__file__).parents[4]).resolve()
READ_AT_IMPORT = ("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "TRITON_", "OMP_")
READ_LATER = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}


def python(
    *command: object, cwd: Path = REPOSITORY, env: Mapping[str, str] | None = None, timeout: float = 600.0
) -> subprocess.CompletedProcess[str]:
    """``python *command`` - a script, ``-m module`` or ``-c code``, after ``-W`` filters: what it printed, its status.

    Raises:
        subprocess.TimeoutExpired: it took longer, and was ended.
    """
    environment = dict(os.environ if env is None else env)
    changed = {n for n in environment.keys() | os.environ.keys() if environment.get(n) != os.environ.get(n)}
    early = tuple((n, environment.get(n)) for n in sorted(changed - READ_LATER) if n.startswith(READ_AT_IMPORT))
    arguments = [str(a) for a in command]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        status = _ask(_server(early), [arguments, str(cwd), environment, str(out), str(err)], timeout)
        if status is None:
            raise subprocess.TimeoutExpired(arguments, timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(
            arguments, status, out.read_text(errors="replace"), err.read_text(errors="replace")
        )


def interpreted(
    *command: object, env: Mapping[str, str] | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """The same where Triton interprets its kernels."""
    return python(*command, env={**(os.environ if env is None else env), "TRITON_INTERPRET": "1"}, **more)


def _ask(server: subprocess.Popen[bytes], program: list[object], timeout: float) -> int | None:
    """The status of a program, or None for one that was ended."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(program).encode() + b"\n")
    pid = int(server.stdout.readline())
    late = not select.select([server.stdout], [], [], timeout)[0]
    if late:
        os.kill(pid, signal.SIGKILL)
    status = int(server.stdout.readline())
    return None if late else status


def settle() -> None:
    """What has been imported stays: the garbage collector leaves it out from now on, and runs less often.

    A tenth of the time of tests that compile, where it went through all of torch, Inductor and SymPy each time; and
    forked processes go on sharing what nobody writes to.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 10)


@cache
def _server(early: tuple[tuple[str, str | None], ...]) -> subprocess.Popen[bytes]:
    """Started with the first program of a test worker that needs it; it ends when the worker does, with its input."""
    given: dict[str, str | None] = {**os.environ, **dict(early), "PYTHONPATH": None}
    environment = {n: v for n, v in given.items() if v is not None}
    command = [sys.executable, __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0)


def _serve() -> None:
    del sys.path[0]  # the folder of this file
    import_module("torch._inductor.compile_fx")  # nobody uses it here: an import statement would be tidied away
    settle()
    asked, told = os.fdopen(os.dup(0), "rb"), os.dup(1)
    for line in asked:
        pid = os.fork()
        if not pid:
            asked.close()
            os.close(told)
            _run(*json.loads(line))
        os.write(told, b"%d\n" % pid)
        os.write(told, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run(arguments: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> None:
    """In the new process: become ``python *arguments``."""
    for number, path in enumerate((os.devnull, out, err)):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(handle, number)
        os.close(handle)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    random.seed()
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.modules["__main__"] = types.ModuleType("__main__")
    _ended(partial(_program, arguments), atexit._run_exitfuncs)


def child(run: Callable[[], object]) -> int:
    """The pid of a process forked from this one that calls ``run`` and ends, with the status of ``SystemExit``, 1 for
    any other exception, else 0. What was registered to run at exit is this process's own, and does not run there.
    """
    pid = os.fork()
    if not pid:
        _ended(run)
    return pid


def _ended(run: Callable[[], object], last: Callable[[], object] = lambda: None) -> NoReturn:
    """Call ``run`` and ``last``, and end this process as Python would."""
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
        os._exit(status)


def _program(arguments: list[str]) -> None:
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
    _serve()
