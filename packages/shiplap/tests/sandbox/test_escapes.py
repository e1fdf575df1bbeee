"""Nothing gets out of the sandbox, as root or not, and the filter allows what honest code calls."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shiplap.sandbox import landlock, seccomp, system_calls
from shiplap.sandbox.seccomp import ALLOW, KILL, REFUSE, UNKNOWN, assemble
from shiplap_testing.effort import EFFORTS
from tests.sandbox import reading_escapes

CALLS = {name: pair for c in (*system_calls.ALLOWED, *system_calls.WITH_DEVICE) for name, pair in c.numbers.items()}
NOBODY = 65534
PID = 4711


GETS_THROUGH = {
    *("timer with a signal", "memfd_create", "/dev/shm", "pinned memory", "bind an end of a pair", "mbind"),
    *("a message with an address", "descriptors in flight", "timer_settime", "huge pages that are set aside"),
    *("huge pages of 2 MiB that are set aside", "huge pages that are set aside and shared"),
    *("memory that stays, by its map", "locked memory, with a high half", "huge pages, with a high half"),
}  # with a device


@pytest.fixture(scope="module", params=EFFORTS)
def rows(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """The rows of the attempts of this user, of the last attack each fifth. With a device, and of another user if this
    is root, those of each ninth attempt. ``nox -s long`` has all rows.
    """
    # From a process with one thread: each attempt is a fork of it.
    users = f", ('another', dict(names=some, user={NOBODY}))" if os.geteuid() == 0 else ""
    # Each attempt is a fork, which takes ten times as long where torch is loaded, and half as long where it need not
    # look up which places may be read.
    code = f"""
import sys, types
for name in "shiplap", "shiplap.sandbox":
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = ["src/" + name.replace(".", "/")]
from functools import cache
from shiplap.sandbox import landlock
from tests.sandbox import thirteenth_escapes
from tests.sandbox.escapes import every_attempt, run_all
landlock.readable_places = cache(landlock.readable_places)
for device in (False, True):
    landlock.readable_places(device=device, hidden=())
names, long = list(every_attempt()), {request.param == "every"}
some = [n for i, n in enumerate(names) if i % 9 == 0 or long or n in {GETS_THROUGH}]
names = [n for i, n in enumerate(names) if i % 5 == 0 or long or n not in thirteenth_escapes.ATTEMPTS]
for who, how in ('this', dict(names=names)), ('device', dict(names=some, device=True)){users}:
    for row in run_all(**how):
        print(f"{{who}}:{{row}}")
"""
    found: dict[str, list[str]] = {}
    for line in _python(code).splitlines():
        who, _, row = line.partition(":")
        found.setdefault(who, []).append(row)
    return found


@pytest.mark.parametrize("who", ["this", "another"])
def test_no_attempt_gets_out(rows: dict[str, list[str]], who: str) -> None:
    if who not in rows:
        pytest.skip("only root can become another user")
    assert len(rows[who]) >= (570 if who == "this" else 70)
    assert [row for row in rows[who] if not row.startswith("refused")] == []


def test_with_a_device_only_what_its_driver_needs_gets_through(rows: dict[str, list[str]]) -> None:
    through = {row[12:55].strip() for row in rows["device"] if not row.startswith("refused")}
    # The driver writes below /proc/self, locks memory, sets timers, and sends to sockets that it has bound itself.
    through = {name for name in through if not name.startswith(("/proc/self/", "/proc/thread-self/", "/proc/net/"))}
    # It looks through all of /sys, too, where root may read more than others.
    through -= {name[:43].strip() for name in reading_escapes.ATTEMPTS if "page" not in name}
    assert through == GETS_THROUGH


def test_of_a_folder_with_hidden_files_the_others_are_shown(tmp_path: Path) -> None:
    for name, mode in {
        "all": 0o444,
        "mixed/shown": 0o644,
        "mixed/deep/hidden": 0o400,
        "mixed/deep/written": 0o200,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "mixed" / "whole").mkdir()
    (tmp_path / "mixed" / "link").symlink_to("deep/hidden")
    assert landlock._open_parts(tmp_path / "all") == [tmp_path / "all"]
    assert set(landlock._open_parts(tmp_path / "mixed")) == {tmp_path / "mixed/shown", tmp_path / "mixed/whole"}
    assert landlock._open_parts(tmp_path / "mixed" / "whole") == [tmp_path / "mixed/whole"]
    (tmp_path / "mixed" / "deep" / "hidden").unlink()
    assert landlock._open_parts(tmp_path / "mixed") == [tmp_path / "mixed"]  # a file that is only written hides nothing


def test_honest_programs_run_in_the_sandbox(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    scratch, wrapper = tmp_path / "scratch", tmp_path / "programs" / "gcc"  # which the sandbox does not see
    for folder in (scratch, wrapper.parent):
        folder.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("gcc")} "$@"\n')
    wrapper.chmod(0o755)
    code = f"""
import asyncio, ctypes, os, shutil, subprocess, tempfile, threading
from shiplap.sandbox.landlock import SandboxPolicy, lock_process
os.chdir({str(scratch)!r})
os.environ["TMPDIR"] = tempfile.tempdir = {str(scratch)!r}
os.environ["PATH"] = {str(wrapper.parent)!r} + os.pathsep + os.environ["PATH"]
assert not any(lock_process(SandboxPolicy({str(scratch)!r})).values())
source = tempfile.mkdtemp() + "/k.c"
open(source, "w").write("int twice(int x) {{ return 2 * x; }}")
subprocess.run(["gcc", "-shared", "-fPIC", "-o", source + ".so", source], check=True)
assert ctypes.CDLL(source + ".so").twice(21) == 42
asyncio.run(asyncio.sleep(0.001))
thread = threading.Thread(target=print, args=("from a thread",))
thread.start(); thread.join()
shutil.copyfile(source, source + ".copy"); os.replace(source + ".copy", source)
shutil.rmtree(os.path.dirname(source))
"""
    assert _python(code).split() == ["from", "a", "thread"]


def test_names_with_a_dot_in_a_readable_folder_are_not_readable(tmp_path: Path) -> None:
    shown, scratch = tmp_path / "shown", tmp_path / "scratch"
    (shown / ".ssh").mkdir(parents=True)
    scratch.mkdir()
    for name in (".env", ".ssh/key", "kernel.py", "../other"):
        (shown / name).write_text(name)
    (shown / "link").symlink_to("../other")
    (shown / "near").symlink_to("kernel.py")
    code = f"""
import os
from shiplap.sandbox.landlock import SandboxPolicy, lock_process
os.chdir({str(shown)!r})
assert not any(lock_process(SandboxPolicy({str(scratch)!r}, ({str(shown)!r},))).values())
for name in (*sorted(os.listdir()), ".ssh/key"):
    try:
        print(name, open(name).read())
    except OSError:
        pass
"""
    assert _python(code).split() == ["kernel.py", "kernel.py", "near", "kernel.py"]


def test_names_with_a_dot_are_hidden_at_any_depth_and_so_is_the_reference(tmp_path: Path) -> None:
    """Shown whole is what has none of them. Of a folder with too many names, what lies deepest is not shown."""
    for name in ("k.py", "whole/a/b.py", "mixed/.git/config", "mixed/deep/.env", "mixed/deep/c.py", "ref/r.py", ".env"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "whole" / ".libs").mkdir()
    (tmp_path / "mixed" / "empty").mkdir()
    at = os.path.relpath
    shown = landlock.shown_parts(str(tmp_path), (str(tmp_path / "ref"),))
    assert {at(part, tmp_path) for part in shown} == {"k.py", "whole", "mixed/empty", "mixed/deep/c.py"}
    assert landlock.shown_parts(str(tmp_path / "whole")) == (str(tmp_path / "whole"),)
    assert landlock.shown_parts(str(tmp_path / "k.py")) == (str(tmp_path / "k.py"),)


def test_of_too_many_names_the_nearest_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("k.py", "a/b.py", "a/deep/c.py", "a/deep/.env", ".git/a", ".git/b"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(landlock, "MOST_ENTRIES", 4)
    shown = landlock.shown_parts(str(tmp_path))
    assert {os.path.relpath(part, tmp_path) for part in shown} == {"k.py", "a/b.py"}


def test_what_hidden_folders_hold_leaves_the_others_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (".git/a", ".git/b", ".git/c", "near/deep/k.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(landlock, "MOST_ENTRIES", 4)
    assert landlock.shown_parts(str(tmp_path)) == (str(tmp_path / "near"),)


def test_where_programs_are_installed_what_root_alone_may_read_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, mode in {"app/settings": 0o600, "app/run": 0o755, "tool/lib/a.so": 0o644, "secret/key": 0o644}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "secret").chmod(0o700)
    shown = {os.path.relpath(part, tmp_path) for part in landlock.shown_parts(str(tmp_path), private=True)}
    assert shown == {"app/run", "tool"}
    monkeypatch.setattr(landlock, "MOST_ENTRIES", 1)
    assert set(landlock.shown_parts(str(tmp_path), private=True)) >= {str(tmp_path / "app"), str(tmp_path / "tool")}
    if os.geteuid() == 0:
        places = landlock.program_places()
        assert {"/usr/bin", "/usr/lib"} <= {*places}
        assert not {"/usr", "/usr/local/private"} & {*places}


def test_folders_of_modules_are_shown_without_names_with_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / ".ssh").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    places = landlock.readable_places()
    assert str(tmp_path / "package") in places
    assert not {str(tmp_path), str(tmp_path / ".ssh")} & {*places}
    assert os.path.join(sys.prefix, "lib") in places
    assert str(tmp_path / "package") not in landlock.readable_places(hidden=[str(tmp_path)])
    (tmp_path / "new").mkdir()
    hidden = [str(tmp_path / "package")]
    assert str(tmp_path / "new") in landlock.readable_places(hidden=hidden)
    assert str(tmp_path / "package") not in landlock.readable_places(hidden=hidden)
    packages = tmp_path / "site-packages"
    (packages / ".kept").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    assert str(packages) in landlock.readable_places()


def test_of_a_folder_of_python_its_parts_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside them lie settings with passwords, and the project, if it is in its folder that Python was installed."""
    for name in ("bin/python", "lib/python3/os.py", "pyvenv.cfg", "pip.conf", ".condarc", "secrets/key", "own/m.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "lib64").symlink_to("lib")
    (tmp_path / "own" / ".env").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "own")])
    shown = {p for p in landlock.readable_places() if p.startswith(str(tmp_path))}
    assert {os.path.relpath(p, tmp_path) for p in shown} == {"bin", "lib", "lib64", "pyvenv.cfg", "own/m.py"}


def test_torch_in_a_folder_with_too_many_names_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "built_here" / "deep").mkdir(parents=True)
    (tmp_path / "built_here" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(landlock, "LIBRARIES", ("built_here", "not_there"))
    monkeypatch.setattr(landlock, "MOST_ENTRIES", 1)
    assert str(tmp_path / "built_here") in landlock.readable_places()


def test_a_package_with_a_hidden_name_can_be_imported(tmp_path: Path) -> None:
    """Python takes a folder that it cannot list for one without modules."""
    (tmp_path / "modules" / "package").mkdir(parents=True)
    (tmp_path / "scratch").mkdir()
    for name in ("__init__.py", "inner.py", ".keep"):
        (tmp_path / "modules" / "package" / name).touch()
    code = f"""
import sys
sys.path.append({str(tmp_path / "modules")!r})
from shiplap.sandbox.landlock import SandboxPolicy, lock_process
assert not any(lock_process(SandboxPolicy({str(tmp_path / "scratch")!r})).values())
import package.inner
print(package.inner.__name__)
"""
    assert _python(code).split() == ["package.inner"]


def test_a_scratch_folder_that_others_can_exchange_is_none(tmp_path: Path) -> None:
    """They could put a link in its place, to a folder which the process may then write."""
    (tmp_path / "shared" / "scratch").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o777)
    code = f"""
from shiplap.sandbox.landlock import SandboxPolicy, lock_process
print(lock_process(SandboxPolicy({str(tmp_path / "shared" / "scratch")!r}))["files"])
"""
    assert "it can be written by others (mode 777)" in _python(code)


def _python(code: str) -> str:
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout


def decide(program: list[seccomp.Line], architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Return what the filter decides, as the kernel computes it."""
    words = [number, architecture, 0, 0]
    for value in (*arguments, *(0,) * (6 - len(arguments))):
        words += [value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF]
    here, loaded = 0, 0
    while True:
        code, yes, no, value = program[here]
        here += 1
        if code == seccomp.LOAD:
            loaded = words[value // 4]
        elif code == seccomp.AND:
            loaded &= value
        elif code == seccomp.RETURN:
            return value
        else:
            holds = loaded == value if code == seccomp.EQUAL else loaded >= value
            here += yes if holds else no


@pytest.fixture(params=sorted(seccomp.MACHINES))
def machine(request: pytest.FixtureRequest) -> tuple[int, int]:
    return seccomp.MACHINES[request.param][:2]


def test_a_call_of_the_table_is_allowed_and_each_other_number_refused(machine: tuple[int, int]) -> None:
    column, architecture = machine
    program = assemble(column, architecture, PID, False)
    allowed = {pair[column] for c in system_calls.ALLOWED for pair in c.numbers.values()} - {None}
    conditional = {n for n, _ in seccomp._conditions(column, PID, False)}
    assert not allowed & conditional
    for number in range(system_calls.NEWEST + 1):
        if number not in conditional:
            expected = ALLOW if number in allowed else REFUSE
            assert decide(program, architecture, number, (1,) * 6) == expected, number
    assert decide(program, architecture, system_calls.NEWEST + 1) == UNKNOWN
    assert decide(program, architecture, 0x40000000 + 39) == KILL
    assert decide(program, 0x40000003, 20) == KILL  # of 32-bit programs


def test_metadata_is_never_allowed(machine: tuple[int, int]) -> None:
    column, architecture = machine
    program = assemble(column, architecture, PID, True)
    changing = ["chmod", "fchmod", "fchmodat", "chown", "fchown", "lchown", "fchownat", "utime", "utimes", "futimesat"]
    changing += ["utimensat", "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"]
    assert not {*changing, "fchmodat2", "setxattrat", "removexattrat", "file_setattr"} & CALLS.keys()
    of_arm = {"fchmod": 52, "fchmodat": 53, "fchownat": 54, "utimensat": 88, "setxattr": 5}
    of_intel = {"fchmod": 91, "fchmodat": 268, "fchownat": 260, "utimensat": 280, "setxattr": 188}
    for number in (*(of_intel, of_arm)[column].values(), 452, 463, 466, 469):
        assert decide(program, architecture, number) == REFUSE


def test_conditions_look_at_arguments(machine: tuple[int, int]) -> None:
    column, architecture = machine
    program = assemble(column, architecture, PID, False)

    def of(numbers: tuple[int, int], *arguments: int) -> int:
        return decide(program, architecture, numbers[column], arguments)

    assert of(seccomp.OWN_PROCESS_CALLS["kill"], PID, 6) == of(seccomp.OWN_PROCESS_CALLS["kill"], 0, 6) == ALLOW
    kill = seccomp.OWN_PROCESS_CALLS["kill"]
    assert of(kill, PID + 1, 6) == of(kill, 0xFFFFFFFF, 6) == REFUSE
    assert of(seccomp.CLONE, 0x3D0F00) == of(seccomp.CLONE, 0x1200011) == ALLOW  # a thread, and a fork
    for flags in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x8000, 0x1000):
        assert of(seccomp.CLONE, flags | 17) == REFUSE, hex(flags)
    assert of(seccomp.CLONE, 18) == REFUSE  # SIGCONT at its end
    assert [of(seccomp.OWN_PROCESS_CALLS["tgkill"], PID, PID, s) for s in (6, 9)] == [ALLOW, REFUSE]
    assert of(seccomp.OWN_PROCESS_CALLS["kill"], 0, 9) == REFUSE
    assert of(seccomp.OWN_PROCESS_CALLS["prlimit64"], PID, 9) == ALLOW
    for new in (1, 1 << 40):  # at the end of its processor time Linux sends SIGKILL
        assert [of(seccomp.OWN_PROCESS_CALLS["prlimit64"], 0, kind, new) for kind in (0, 9)] == [REFUSE, ALLOW]
    assert of(seccomp.OWN_PROCESS_CALLS["prlimit64"], 0, 0, 0) == ALLOW
    assert [of(seccomp.SETRLIMIT, kind) for kind in (0, 9)] == [REFUSE, ALLOW]
    assert of(seccomp.FCNTL, 5, 1030) == ALLOW
    assert [of(seccomp.FCNTL, 5, c) for c in (5, 8, 10, 15, 36, 1024, 1026, 1033)] == [REFUSE] * 8
    assert [of(seccomp.FCNTL, 5, c) for c in (6, 7, 37, 38)] == [seccomp.NOTHING] * 4
    assert of(seccomp.PRETENDED_CALLS["flock"], 5, 2) == seccomp.NOTHING
    for clock in seccomp.CLOCK_CALLS.values():
        assert [of(clock, c) for c in (0, 2, 7, -6 & 0xFFFFFFFF, (~PID << 3 | 2) & 0xFFFFFFFF)] == [ALLOW] * 4 + [
            REFUSE
        ]
    assert [of(seccomp.FUTEX, 1, o) for o in (0, 1, 129, 137, 393)] == [ALLOW] * 5
    assert [of(seccomp.FUTEX, 1, o) for o in (131, 132, 265, 138)] == [ALLOW] * 4
    assert [of(seccomp.FUTEX, 1, o) for o in (3, 4, 6, 7, 8, 11, 12, 13, 134)] == [REFUSE] * 9
    assert [of(seccomp.MMAP, 0, 4096, 3, flags) for flags in (0x22, 0x40022, 0x2022)] == [ALLOW, REFUSE, REFUSE]
    assert of(seccomp.OPENAT2) == UNKNOWN
    for flags, mode, decision in (
        *((0o101, 0o644, ALLOW), (0o101, 0o4755, REFUSE), (0o101, 0o2755, REFUSE), (0o20200002, 0o4700, REFUSE)),
        *((0o2, 0o4755, ALLOW), (0o200000, 0o6000, ALLOW)),  # nothing is made, and the mode may be anything
        *((0o3, 0, REFUSE), (0o2000003, 0, REFUSE), (0o101 | 0o2, 0o600, REFUSE)),
    ):
        assert decide(program, architecture, (257, 56)[column], (3, 1 << 40, flags, mode)) == decision
        if column == 0:
            assert decide(program, architecture, 2, (1 << 40, flags, mode)) == decision
    if column == 0:
        assert [decide(program, architecture, 85, (1 << 40, mode)) for mode in (0o600, 0o4600)] == [ALLOW, REFUSE]
        assert [decide(program, architecture, 83, (1 << 40, mode)) for mode in (0o777, 0o300)] == [ALLOW, REFUSE]
        assert [decide(program, architecture, 158, (option, 1)) for option in (0x1002, 0x4002)] == [ALLOW, REFUSE]
    assert [of((258, 34), 3, 1 << 40, mode) for mode in (0o777, 0o700, 0o1755, 0o300, 0o577, 0)] == [ALLOW] * 3 + [
        REFUSE
    ] * 3
    assert [of(seccomp.UMASK, mask) for mask in (0, 0o77, 0o27, 0o400, 0o777)] == [ALLOW] * 3 + [REFUSE] * 2
    assert [of(seccomp.MEMBARRIER, c) for c in (0, 8, 16, 1, 2, 4)] == [ALLOW] * 3 + [REFUSE] * 3
    assert [of(seccomp.GETSOCKOPT, 3, 1, option) for option in (3, 17, 77)] == [ALLOW] * 2 + [REFUSE]
    assert of(seccomp.IOCTL, 1, 0x5401) == ALLOW
    assert [of(seccomp.IOCTL, 1, r) for r in (0x40086602, 0x401C5820, 0x8901, 0x5412, 0xC020462A, 1)] == [REFUSE] * 6
    assert of(seccomp.SENDTO, 3, 1 << 40, 8, 0, 0, 0) == ALLOW
    assert of(seccomp.SENDTO, 3, 1, 8, 0, 0x7FFF00000000, 0) == of(seccomp.SENDTO, 3, 1, 8, 0, 5, 5) == REFUSE
    assert of(seccomp.SOCKETPAIR, 1, 0x80001) == of(seccomp.SOCKETPAIR, 1, 5) == ALLOW
    assert of(seccomp.SOCKETPAIR, 1, 2) == of(seccomp.SOCKETPAIR, 30, 1) == of(seccomp.SOCKET, 1, 1) == REFUSE
    assert [of(seccomp.FALLOCATE, 3, mode, 0, 9) for mode in (0, 1, 3, 0x10)] == [ALLOW] + [REFUSE] * 3
    assert [of(seccomp.FADVISE, 3, 0, 0, advice) for advice in (0, 2, 3, 4)] == [ALLOW] * 3 + [REFUSE]
    assert [of(seccomp.MADVISE, 0, 4096, advice) for advice in (4, 8, 14)] == [ALLOW] * 3
    assert [of(seccomp.MADVISE, 0, 4096, advice) for advice in (9, 12, 20, 21, 25, 100, 101)] == [REFUSE] * 7
    assert [of(numbers, 3) for numbers in seccomp.FLAGGED_READS] == [UNKNOWN] * 2
    assert [of(seccomp.CLOSE_RANGE, 3, 9, flags) for flags in (0, 4, 2, 6)] == [ALLOW] * 2 + [REFUSE] * 2
    assert [of(seccomp.CLONE, flags) for flags in (0x3D0B00, 0x50B00, 0x10000)] == [REFUSE] * 3  # open files of its own
    assert of(seccomp.PRCTL, 15) == ALLOW
    assert [of(seccomp.PRCTL, o) for o in (1, 4, 22, 36, 0x59616D61)] == [REFUSE] * 5


def test_a_device_has_requests_of_its_drivers(machine: tuple[int, int]) -> None:
    column, architecture = machine
    program = assemble(column, architecture, PID, True)

    def of(request: int) -> int:
        return decide(program, architecture, seccomp.IOCTL[column], (5, request))

    # NV_ESC_RM_ALLOC, an ioctl of DRM, UVM_REGISTER_GPU, UVM_INITIALIZE, and a question of libc.
    assert [of(r) for r in (0xC030462B, 0xC0106407, 37, 0x30000001, 0x5401)] == [ALLOW] * 5
    assert [of(r) for r in (0x40086602, 0x401C5820, 0x8901, 0x5412, 0x40041271)] == [REFUSE] * 5
    sockets = decide(program, architecture, seccomp.SOCKET[column], (1, 1)), CALLS["bind"][column]
    assert sockets[0] == ALLOW
    assert decide(program, architecture, sockets[1] or 0) == ALLOW
    assert decide(program, architecture, (42, 203)[column]) == REFUSE  # connect
