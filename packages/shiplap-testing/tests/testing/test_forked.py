"""Forked programs are what ``python`` makes of the same command, but for what is already imported."""

import os
import platform
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from shiplap_testing import forked
from shiplap_testing.effort import sampled
from shiplap_testing.forked import WITH_FAMILIES, WITH_VERBS, python

COMMANDS = {
    "code": ["-c", "import sys; print(sys.argv, __name__); sys.exit(3)", "a", "b c"],
    "message": ["-c", "import sys; sys.exit('no such thing')"],
    "error": ["-c", "def f():\n    raise ValueError('lost')\nf()"],
    "atexit": ["-c", "import atexit; atexit.register(print, 'last'); print('first')"],
    "crash": ["-c", "import ctypes; ctypes.string_at(0)"],
    "exit": ["-c", "import os; os._exit(5)"],
    "stdin": ["-c", "import sys; print(repr(sys.stdin.read()))"],
    "child": ["-c", "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1)'])"],
    "script": ["script.py", "x"],
    "module": ["-m", "module", "y"],
    "filter": ["-W", "error", "-c", "import warnings; warnings.warn('loud')"],
    "folder": ["-c", "import os; print(os.getcwd(), os.environ.get('MINE'))"],
}
PROGRAM = """
import os, sys
import helper
print(__name__, os.path.basename(__file__), sys.argv[1:], helper.VALUE, sys.modules["__main__"].helper is helper)
class Local: ...
print(Local.__module__)
"""


@pytest.mark.parametrize("name", sampled(COMMANDS, 6))
def test_a_forked_program_does_what_a_started_one_does(name, tmp_path):
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    for file in ("script.py", "module.py"):
        (tmp_path / file).write_text(textwrap.dedent(PROGRAM))
    env = {**os.environ, "MINE": "set"}
    started = subprocess.run(
        [sys.executable, *COMMANDS[name]],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    forked = python(*COMMANDS[name], cwd=tmp_path, env=env)
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_nothing_of_one_program_is_in_the_next():
    assert python("-c", "import builtins, os; builtins.seen = 1; os.environ['SEEN'] = '1'").returncode == 0
    done = python(
        "-c",
        "import builtins, os, sys; print(hasattr(builtins, 'seen'), 'SEEN' in os.environ, "
        "[m for m in sys.modules if m.startswith(('shiplap', 'tests', 'pytest'))])",
    )
    assert done.stdout == "False False []\n", done.stderr


def test_one_that_hangs_is_ended():
    assert python("-c", "pass").returncode == 0  # what forks the programs takes seconds to start, too
    with pytest.raises(subprocess.TimeoutExpired) as e:
        python("-c", "print('begun', flush=True); import time; time.sleep(1000)", timeout=6)
    assert e.value.stdout == "begun\n"


def test_variables_that_are_read_at_import_are_there_in_time():
    program = "from triton import knobs, language; print(knobs.runtime.interpret, type(language.cdiv).__name__)"
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    pytest.importorskip("triton")
    shown = python(
        "-c", program, env=env, imported=WITH_FAMILIES
    ).stdout  # by the process that interprets for other tests
    assert shown.split() == ["True", "InterpretedFunction"]
    assert python("-c", program).stdout.split() == ["False", "JITFunction"]


def test_a_program_finds_the_compiler_imported_and_nothing_of_shiplap_unless_it_says_so():
    """What it saves."""
    code = "import sys; print('torch._inductor.compile_fx' in sys.modules, 'shiplap' in sys.modules)"
    assert python("-c", code).stdout == "True False\n"
    assert python("-c", code, imported=WITH_VERBS).stdout == "True True\n"


def test_a_program_finds_what_each_first_graph_looks_up_and_one_thread():
    """A second of each program that compiles; and a process with threads is not to be forked."""
    code = """
import threading
from torch._dynamo import guards
from torch._inductor.fx_passes import joint_graph, post_grad
print(*(passes.lazy_init.cache_info().currsize for passes in (joint_graph, post_grad)), threading.active_count())
print(guards.profile_guard_manager.__module__.startswith("torch"))
"""
    assert python("-c", code).stdout == "1 1 1\nFalse\n"


def huge_kilobytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:")), 0)


def test_what_a_process_of_a_run_has_allocated_lies_on_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    release = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    if not place.exists() or "[never]" in place.read_text() or release < (6, 1):
        pytest.skip("this Linux moves nothing to huge pages")
    forked.shared()
    held = [bytearray(1 << 10) for _ in range(20_000)]
    monkeypatch.setattr(forked, "_resident", 0)
    forked.use_huge_pages()
    assert huge_kilobytes() > 0
    assert all(len(each) == 1 << 10 for each in held)
