"""What the eighth attack tried from inside of a sandboxed process, and what a lack of the machine looks like."""

from __future__ import annotations

import errno
import gc
import math
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shiplap.safe_io.work_folders import remove_folder, start_removal
from shiplap.sampling.compare import Difference
from shiplap.sandbox import candidate, load_candidate, resource_use, supervisor
from shiplap.sandbox.arguments import ArgumentArena, MappedArguments
from shiplap.sandbox.call_batch import CallBatch
from shiplap.sandbox.candidate import CandidateError, ExpectedEffects, MachineLack, TargetProcess
from shiplap.sandbox.forked_launcher import ForkedLauncher, _forget_secrets, _make_memory_private
from shiplap.sandbox.launcher_environment import is_secret, launcher_environment
from shiplap.sandbox.proc_filesystem import has_ended, stat_fields
from shiplap.sandbox.protocol import Heartbeat, ImportModule, Inspect, LoadTarget
from shiplap.sandbox.supervisor import Bounds, SandboxLauncher
from shiplap_testing.launchers import ordinary_launchers

HEAD = """
import os, sys, time
import torch
child = sys.modules["shiplap.sandbox.child"]
"""


@pytest.fixture(scope="module")
def launcher():
    with SandboxLauncher() as made:
        with ordinary_launchers():
            made.ask(ImportModule())
        yield made


@pytest.fixture
def load(launcher, tmp_path):
    """A candidate in its process, by its source."""
    prisoners = []

    def loaded(text: str, seconds: float = 20.0) -> TargetProcess:
        (tmp_path / "it.py").write_text(HEAD + text)
        prisoners.append(launcher.start([str(tmp_path)], Bounds(seconds=seconds)))
        made = TargetProcess(prisoners[-1])
        made.load(LoadTarget(str(tmp_path / "it.py"), ["candidate"], "function", [], 1), ArgumentArena())
        return made

    yield loaded
    for prisoner in prisoners:
        prisoner.kill()


def called(witness: TargetProcess, *args: torch.Tensor, like: list[torch.Tensor] | None = None):
    return witness.call(args, ExpectedEffects(like or [torch.empty(4)], lambda got: Difference()))


def test_what_linux_does_for_a_process_after_its_answer_counts(load) -> None:
    witness = load("""
usual, block = child.send_message, b"x" * (64 << 20)
def send(connection, data, handles=()):
    usual(connection, data, handles)
    os.pwrite(file, block, 0)  # it cannot be stopped before it has returned
def candidate(x):
    global file
    file = os.open("copied", os.O_CREAT | os.O_RDWR)
    child.send_message = send
    return x + 1
""")
    # No memory takes 64 MiB faster. A process that lost its processor to this one copies in the next call.
    assert max(called(witness, torch.ones(4)).wall for _ in range(4)) > 4e-3


def test_nobody_declines_arguments_that_the_judge_gives(load) -> None:
    witness = load("""
def candidate(x):
    raise child.ArgumentsDeclined("not these")
""")
    with pytest.raises(CandidateError, match="declines arguments") as caught:
        called(witness, torch.ones(4))
    assert caught.value.check == "answer"


def test_who_is_killed_from_outside_is_not_blamed(load) -> None:
    witness = load("""
def candidate(x):
    time.sleep(15)
""")
    threading.Timer(0.2, os.kill, (witness.prisoner.pid, signal.SIGKILL)).start()
    with pytest.raises(MachineLack, match="killed from outside"):
        called(witness, torch.ones(4))


@pytest.mark.parametrize("how", ["killed", "itself"])
def test_a_child_that_holds_the_connection_does_not_hide_an_end(load, how: str) -> None:
    """The reply was waited for until the time was over, and who was killed from outside was blamed."""
    witness = load(f"""
if os.fork() == 0:
    time.sleep(60)
def candidate(x):
    if {how == "itself"}:
        os._exit(3)
    time.sleep(60)
""")
    if how == "killed":
        threading.Timer(0.2, os.kill, (witness.prisoner.pid, signal.SIGKILL)).start()
    with pytest.raises(CandidateError) as caught:
        called(witness, torch.ones(4))
    assert isinstance(caught.value, MachineLack) is (how == "killed")
    assert ("killed from outside" if how == "killed" else "exit status 3") in str(caught.value)


def test_who_is_killed_while_it_stands_is_not_blamed(load) -> None:
    witness = load("""
held = torch.ones(1 << 26)  # its end takes time of a processor
def candidate(x):
    return x + 1
""")
    called(witness, torch.ones(4))
    os.kill(witness.prisoner.pid, signal.SIGKILL)
    while _lives(str(witness.prisoner.pid)):
        time.sleep(0.001)
    with pytest.raises(MachineLack, match="cannot be read"):
        witness._read(4096, 8)
    with pytest.raises(MachineLack, match="cannot be looked at"):
        witness.pieces(witness._given)
    with pytest.raises(MachineLack, match="killed from outside"):
        called(witness, torch.ones(4))


@pytest.mark.parametrize("lack", [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), MemoryError()])
def test_a_process_is_killed_where_others_cannot_be_looked_at(load, monkeypatch, lack: Exception) -> None:
    def lacking(*_: object, **__: object) -> dict[int, int]:
        raise lack

    prisoner = load("candidate = torch.relu").prisoner
    monkeypatch.setattr(supervisor, "list_descendants", lacking)
    prisoner.kill()
    assert not os.path.exists(f"/proc/{prisoner.pid}")


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("when", ["in its call", "after its answer"])
def test_who_ends_itself_is_blamed(load, status: int, when: str) -> None:
    witness = load(f"""
usual = child.send_message
def end():
    try:
        os.kill(os.getpid(), 9)
    except PermissionError:
        os._exit({status})
def send(*args):
    usual(*args)
    end()
def candidate(x):
    if {when == "in its call"}:
        end()
    child.send_message = send
    return x + 1
""")
    with pytest.raises(CandidateError) as caught:
        _ = [called(witness, torch.ones(4)) for _ in range(2)]  # it may be stopped before it has ended
    assert f"exit status {status}" in str(caught.value)
    assert caught.value.check == "process"


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        ("OSError(23, os.strerror(23))", True),  # ENFILE: no process could open one
        ("OSError(122, os.strerror(122))", True),  # EDQUOT
        ("OSError(24, os.strerror(24))", False),  # EMFILE: this program may open more than the process
        ("MemoryError()", False),  # with memory left, it asks for too much
        ("OSError(28, os.strerror(28))", False),
        ("ValueError('no')", False),
    ],
)
def test_an_error_is_a_lack_if_the_machine_has_no_more(load, monkeypatch, error: str, lacks: bool) -> None:
    from shiplap.sandbox import machine_lack

    monkeypatch.setattr(machine_lack, "available_memory", lambda: 1 << 50)
    monkeypatch.setattr(machine_lack, "_files_left", lambda: 0)
    monkeypatch.setattr(machine_lack, "_exceeds_quota", lambda folder: True)
    witness = load(f"""
def candidate(x):
    raise {error}
""")
    object.__setattr__(witness.prisoner.bounds, "file_size", 1)
    with pytest.raises(CandidateError) as caught:
        called(witness, torch.ones(4))
    assert isinstance(caught.value, MachineLack) is lacks
    monkeypatch.setattr(machine_lack, "available_memory", lambda: 1 << 20)
    if error == "MemoryError()":
        with pytest.raises(MachineLack, match="Cannot allocate memory"):
            called(witness, torch.ones(4))


@pytest.mark.parametrize("number", [errno.ENFILE, errno.EDQUOT])
def test_who_names_a_lack_that_the_machine_does_not_have_is_blamed(load, number: int) -> None:
    witness = load(f"""
def candidate(x):
    raise OSError({number}, os.strerror({number}))
""")
    with pytest.raises(CandidateError) as caught:
        called(witness, torch.ones(4))
    assert not isinstance(caught.value, MachineLack)


def test_a_quota_is_tried(monkeypatch, tmp_path) -> None:
    from shiplap.sandbox import machine_lack

    def refuse(handle: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    assert not machine_lack._exceeds_quota(str(tmp_path))
    assert machine_lack._files_left() > 0
    monkeypatch.setattr(os, "fsync", refuse)
    assert machine_lack._exceeds_quota(str(tmp_path))


def test_a_machine_that_forbids_to_read_other_processes_is_no_fault() -> None:
    assert isinstance(candidate._memory_fault(OSError(errno.EPERM, "not permitted"), "its results"), MachineLack)
    assert not isinstance(candidate._memory_fault(OSError(errno.EFAULT, "bad address"), "its results"), MachineLack)


# What leaves no trace in the status of a process: how a candidate begins such work, in Python.
HIDDEN = """
import ctypes, mmap, threading
libc = ctypes.CDLL(None, use_errno=True)
def leaderless(work):
    pid = os.fork()
    if pid == 0:
        threading.Thread(target=work).start()
        time.sleep(0.02)
        libc.syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # this thread ends, the other one does not
    return pid
"""


def test_a_process_whose_first_thread_has_ended_counts(load) -> None:
    """Linux shows it as one that has ended."""
    witness = load(f"""{HIDDEN}
pid = leaderless(lambda: time.sleep(30))
time.sleep(0.5)  # a busy machine needs longer
def candidate(x):
    return x + 1
""")
    (helper,) = witness.prisoner.strays()
    assert stat_fields(helper)[0] == "Z"
    assert witness.prisoner.strays(still=True) == [helper]
    witness.prisoner.alone = True
    with pytest.raises(CandidateError, match="1 processes were running beside a timed call"):
        called(witness, torch.ones(4))
    ends = time.monotonic() + 5
    while not has_ended(stat_fields(helper) or "Z" * 18) and time.monotonic() < ends:
        time.sleep(0.005)
    assert witness.prisoner.strays() == []


@pytest.mark.parametrize(
    "eat",
    [
        "leaderless(lambda: (time.sleep(0.1), held.append(torch.ones(1 << 27)), time.sleep(30)))",
        "drop_shared()",
        "read_nothing()",
        "fill_sockets()",
    ],
)
def test_memory_that_is_not_resident_counts(load, eat: str) -> None:
    """Of a process whose first thread has ended, of shared pages that were dropped, of page tables, and of sockets."""
    witness = load(
        f"""{HIDDEN}
held = []
def drop_shared():
    for _ in range(16):  # a little at a time, and none of it is freed
        part = mmap.mmap(-1, 1 << 25)
        part.write(bytes(1 << 25))
        part.madvise(mmap.MADV_DONTNEED)
        held.append(part)
def read_nothing():
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    size, step = 1 << 38, 1 << 21  # one byte of each region has a table of its own
    start = libc.mmap(None, size, 1, 0x4022, -1, 0)
    libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), 15)  # no huge pages
    for at in range(0, size, step):
        ctypes.string_at(start + at, 1)
def fill_sockets():
    import socket
    for _ in range(2):
        if os.fork() == 0:
            break
    for _ in range(480):
        held.extend(socket.socketpair())
def candidate(x):
    {eat}
    time.sleep(10)
    return x + 1
"""
    )
    object.__setattr__(witness.prisoner.bounds, "memory", 1 << 28)
    with pytest.raises(CandidateError, match="GiB of memory"):
        called(witness, torch.ones(4))


FILES = {
    "in a folder": "os.makedirs('a/b'); take('a/b/c')",
    "removed": "take('a'); os.unlink('a')",
    "removed and mapped in part": "file = take('a'); os.unlink('a') if x[0] > 1 else None\n"
    "    child._libc.mmap(None, 4096, 3, 1, file, 0); os.close(file)",
    "removed, in a process without its first thread": "if os.fork() == 0:\n"
    "        take('a'); os.unlink('a'); threading.Thread(target=time.sleep, args=(9,)).start()\n"
    "        child._libc.syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)",
}


@pytest.mark.parametrize("how", FILES)
def test_files_that_take_too_much_of_the_disk_count(load, how: str) -> None:
    witness = load(f"""
import threading
def candidate(x):
    size = 300 << 20 if x[0] > 1 else 200 << 20
    def take(name):
        file = os.open(name, os.O_CREAT | os.O_RDWR)
        os.posix_fallocate(file, 0, size)
        return file
    {FILES[how]}
    time.sleep(1)
    return x + 1
""")
    object.__setattr__(witness.prisoner.bounds, "memory", 1 << 28)
    # What others do on this disk meanwhile does not matter.
    witness.prisoner._base = replace(witness.prisoner._base, free=(1 << 60, 0))
    called(witness, torch.ones(4))  # within the limit
    shutil.rmtree(f"{witness.prisoner.scratch}/a", ignore_errors=True)
    with pytest.raises(CandidateError, match="GiB of files"):
        called(witness, torch.full((4,), 2.0))


def test_names_of_files_count(load, monkeypatch) -> None:
    """An empty file takes no bytes, but room for another one, also if it was removed and is open. A folder that nobody
    can measure has no bound.
    """
    witness = load("""
held = []
def candidate(x):
    for i in range(60 if x[0] > 1 else 40):
        held.append(open(str(i), "w"))
        os.unlink(str(i)) if i % 2 else held.pop().close()
    time.sleep(1)
    return x + 1
""")
    monkeypatch.setattr(resource_use, "MAX_NAMES", 50)
    witness.prisoner._base = replace(witness.prisoner._base, free=(0, 1 << 60))
    called(witness, torch.ones(4))
    with pytest.raises(CandidateError, match="more than 50 files"):
        called(witness, torch.full((4,), 2.0))
    monkeypatch.setattr(resource_use, "MEASURE_S", 0)
    assert resource_use.measure_folder("/", "--inodes") == math.inf


def test_shared_memory_behind_the_end_of_a_map_counts(load) -> None:
    """Linux keeps it as long as the rest is mapped, and shows it in the sum of the machine alone."""
    witness = load("""
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
def candidate(x):
    size = (320 if x[0] > 1 else 64) << 20
    at = libc.mmap(None, size, 3, 0x21, -1, 0)
    ctypes.memset(at, 1, size)
    libc.munmap(ctypes.c_void_p(at + 4096), size - 4096)
    time.sleep(1)
    return x + 1
""")
    object.__setattr__(witness.prisoner.bounds, "memory", 1 << 28)
    called(witness, torch.ones(4))
    with pytest.raises(CandidateError, match="GiB of memory"):
        called(witness, torch.full((4,), 2.0))


def test_nothing_outlives_a_launcher_that_was_killed(tmp_path) -> None:
    with SandboxLauncher() as launcher:
        (tmp_path / "it.py").write_text(
            f"{HEAD}\nif os.fork() == 0:\n    time.sleep(60)\n\ndef candidate(x): return x\n"
        )
        prisoner = launcher.start([str(tmp_path)], Bounds(seconds=20))
        TargetProcess(prisoner).load(
            LoadTarget(str(tmp_path / "it.py"), ["candidate"], "function", [], 1), ArgumentArena()
        )
        (helper,) = prisoner.strays()
        os.kill(launcher.pid, signal.SIGKILL)
    ends = time.monotonic() + 5
    while (stat := stat_fields(helper)) and not has_ended(stat) and time.monotonic() < ends:
        time.sleep(0.005)
    assert not stat or has_ended(stat)


def test_folders_that_nobody_can_list_are_removed(tmp_path, capfd) -> None:
    """A folder of mode 300 can be filled, and ``rm`` cannot remove it for a user who is not root."""
    left = tmp_path / "left"
    (left / "a" / "b").mkdir(parents=True)
    (left / "a" / "b" / "c").touch()
    for path in (tmp_path, left, left / "a", left / "a" / "b", left / "a" / "b" / "c") if os.geteuid() == 0 else ():
        os.chown(path, 65534, 65534)
    (left / "a").chmod(0o300)
    for above in tmp_path.parents[:-2] if os.geteuid() == 0 else ():
        above.chmod(above.stat().st_mode | 0o111)
    child = os.fork()
    if child == 0:
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(start_removal(str(left)), 0)[1]))
    os.waitpid(child, 0)
    assert not left.exists()
    assert not capfd.readouterr().err


def test_a_folder_is_removed_if_the_shell_starts_and_can_start_nothing(tmp_path, monkeypatch) -> None:
    """As where one more process may start, and not two."""
    left, programs = tmp_path / "left" / "a", tmp_path / "programs"
    left.mkdir(parents=True)
    programs.mkdir()
    (programs / "sh").symlink_to(shutil.which("sh") or "")
    monkeypatch.setenv("PATH", str(programs))
    remove_folder(str(left.parent))
    assert not left.parent.exists()


def test_modules_with_generated_functions_may_be_imported_by_a_candidate(load) -> None:
    witness = load("""
import asyncio.tasks, email.policy, http.cookies, multiprocessing.managers, multiprocessing.sharedctypes
def candidate(x):
    return x + 1
""")
    witness.check_interpreter()


def test_names_of_secrets() -> None:
    secrets = (
        "DB_PASS MYSQL_PWD PGPASSFILE GH_PAT DATABASE_URL PIP_INDEX_URL SENTRY_DSN SESSION_COOKIE AWS_ACCESS_KEY_ID"
    )
    plain = "PWD OLDPWD PATH PYTHONPATH OMP_NUM_THREADS TORCHINDUCTOR_PATTERNS CUDA_VISIBLE_DEVICES CONDA_PREFIX"
    plain += " LLVM_PASS_PLUGIN_PATH"
    secrets += " SLACK_WEBHOOK_URL AZURE_CONNECTION_STRING HASH_SALT NETRC DB_PASS_PROD PASSCODE AWS_CREDS DEPLOY_OTP"
    assert [name for name in secrets.split() if not is_secret(name, "1")] == []
    assert [name for name in plain.split() if is_secret(name, "1")] == []


@pytest.mark.parametrize(
    ("value", "secret"),
    [
        ("http://me:word@proxy:3128", True),
        ("a=b postgresql://me:word@host/base", True),
        ("-----BEGIN RSA PRIVATE KEY-----", True),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc", True),
        ("ghp_0123456789abcdef0123", True),
        ("http://proxy:3128", False),
        ("https://host/a:b@c", False),
        ("https://ghp_0123456789abcdef0123@host/x", True),
        ("token glpat-aB3_-cdEFGHIJ_klmn45", True),
        ("sk-proj-aB3_-cdEFGHIJ_klmn45", True),
        ("/usr/lib:/opt/sk-learn", False),
        ("/opt/bypass:/usr/bin:/srv/token:/usr/lib", False),
        ("password: abc", True),
        ("/usr/bin:/opt/npm_global_packages_dir/bin:/opt/sk-learn-contrib-kernels2", False),
        ("hf_transformers_cache_folder", False),
        ("max_split_size_mb:128", False),
        ("https://hooks.example.com/services/T0/B0/abc", True),
        ("-Xmx1g -Dkeystore.password=abc", True),
        ("Authorization=Basic abcdefgh", True),
        ("DefaultEndpointsProtocol=https;AccountKey=abc==", True),
        ("sk_live_0123456789abcdefGHI", True),
        ("AIzaSyA-0123456789abcdefghijklmno", True),
        ("--tokens-per-batch=4 --key-blocks=2", False),
        ("basic auto", False),
        ("https://a.blob.core.windows.net/c?sv=2022&sig=abc%3D", True),
        ("https://b.s3.amazonaws.com/k?X-Amz-Signature=ab12", True),
        ("Server=h;Uid=me;Pwd=abc;", True),
        ("--user me --password abc", True),
        ("AGE-SECRET-KEY-1QQQ", True),
        ("glsa_0123456789abcdefABCDEF", True),
        ("--password --token-file", False),
        ("-O3 -DUSE_BYPASS=ON -DNUM_TOKEN=4 -DPWD=/x -Rpass=vectorize", False),
        ("-DTOKEN=4abc", True),
        ("DBPASSWORD=hunter2", True),
        ("https://h/x?design=1&signal=2", False),
        ("amqp://user@dom:word123@host", True),
        ("http://host:8080/x@y", False),
        ("jdbc:oracle:thin:me/word9@host:1521", True),
        ("Server=db;Uid=me;PW=word9x", True),
        # Random words, whoever issues them
        ("nvapi-iK2ZWeqhFWCEPyYngFb51yBM", True),
        ("hvs.bPIa84yRnBUbHoWC8FJo", True),
        ("me:uzee6uMDhqnYNX5I3SEQ", True),
        ("wsekkqH8kQrPTsDSuFEh", True),
        ("wsekkqH8kQrPTsDSuFE", False),
        ("wsekkqhakqrptsdsufehWSEKKQHAKQRPTSDSUFEH", False),
        ("0c415ed7e70cad19461922995d84016e", True),
        ("0c415ed7e70cad19461922995d84016", False),
        ("01234567890123456789012345678901", False),
        ("/nix/store/0c415ed7e70cad19461922995d84016e-gcc:/opt/wsekkqH8kQrPTsDSuFEh", False),
        ("-O2 -frandom-seed=1 -DwsekkqH8kQrPTsDSuFEh=1", False),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", False),
        ("cuda>=12.4 brand=tesla,driver>=470,driver<471", False),
    ],
)
def test_values_of_secrets(value: str, secret: bool, monkeypatch) -> None:
    monkeypatch.setenv("SHIPLAP_TEST_PROXY", value)
    assert is_secret("PROXY", value) == secret
    assert ("SHIPLAP_TEST_PROXY" in launcher_environment()) != secret


def test_no_launcher_looks_for_modules_beside_judged_files(tmp_path, monkeypatch) -> None:
    """Python runs ``sitecustomize.py`` of such a folder when it starts, in a process that is not sandboxed."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(load_candidate, "added_folders", set())
    (tmp_path / "reference.py").touch()
    load_candidate.load_module(str(tmp_path / "reference.py"))
    assert sys.path[0] == str(tmp_path)
    monkeypatch.delitem(sys.modules, f"{load_candidate.MODULE_PREFIX}reference")
    assert str(tmp_path) not in launcher_environment()["PYTHONPATH"].split(os.pathsep)


def test_who_has_used_up_its_files_is_blamed(load) -> None:
    witness = load("""
held = []
def candidate(x):
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
""")
    with pytest.raises(CandidateError, match="Too many open files") as caught:
        called(witness, torch.ones(4))
    assert caught.value.check == "raised"


def test_calls_whose_results_are_kept_hold_no_files(load) -> None:
    witness = load("""
def candidate(x):
    return x + 1
""")

    def files() -> int:
        return len(os.listdir(f"/proc/{witness.prisoner.pid}/fd"))

    called(witness, torch.ones(4))
    before, of_one = files(), witness.kept_bytes
    for _ in range(50):
        called(witness, torch.ones(4))
    assert witness.kept_bytes > 40 * of_one > 0
    assert files() == before


def test_who_is_killed_before_its_batch_is_examined_is_not_blamed(load, monkeypatch) -> None:
    witness = load("""
def candidate(x):
    return x + 1
""")
    usual = TargetProcess.pieces

    def killed(self: TargetProcess, at: MappedArguments) -> list[tuple[int, int, int]]:
        found = usual(self, at)
        os.kill(self.prisoner.pid, signal.SIGKILL)
        while _lives(str(self.prisoner.pid)):
            time.sleep(0.001)
        return found

    monkeypatch.setattr(TargetProcess, "pieces", killed)
    with CallBatch(witness, 0, [[torch.ones(4)]]) as batch, pytest.raises(MachineLack, match="cannot be read"):
        batch.run_calls([ExpectedEffects([torch.empty(4)], lambda got: Difference())])


def test_memory_of_arguments_is_given_back(load) -> None:
    witness = load("""
def candidate(x):
    return x[:4] + 1
""")
    for _ in range(30):
        called(witness, torch.ones(1 << 20))
    mapped = Path(f"/proc/{witness.prisoner.pid}/maps").read_text().count("memfd:arguments")
    assert 1 <= mapped <= 20  # those of 64 MiB


@pytest.mark.parametrize(
    "how",
    [
        "if os.fork() == 0: os._exit(0)",
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        """if (pid := os.fork()) == 0:
            if os.fork() == 0: time.sleep(0.01)
            os._exit(0)
        os.waitpid(pid, 0)""",
    ],
)
def test_threads_and_processes_that_have_ended_are_counted(load, monkeypatch, how: str) -> None:
    monkeypatch.setattr(resource_use, "MAX_TASKS", 40)
    witness = load(f"""
import threading
def candidate(x):
    for _ in range(60):
        {how}
    time.sleep(9)
""")
    with pytest.raises(CandidateError, match="more than 40 threads and processes"):
        called(witness, torch.ones(4))


def test_who_does_not_read_is_ended(load) -> None:
    witness = load(
        """
def candidate(x):
    child.receive_message = lambda *args, **kwargs: time.sleep(60)
    return x + 1
""",
        seconds=1.0,
    )
    called(witness, torch.ones(4))
    long = LoadTarget("it", ["candidate"], "function", ["x" * 4096] * 200, 1)
    ended: list[Exception] = []

    def ask() -> None:
        try:
            witness.request(long)
        except Exception as e:
            ended.append(e)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(50)
    assert [type(e) for e in ended] == [CandidateError]


def test_who_reads_a_little_at_a_time_is_ended(load) -> None:
    witness = load(
        """
def read(connection, *kinds, **more):
    while connection.recv(1 << 14):
        time.sleep(0.6)
def candidate(x):
    child.receive_message = read
    return x + 1
""",
        seconds=1.0,
    )
    called(witness, torch.ones(4))
    began = time.monotonic()
    with pytest.raises(CandidateError, match="timed out"):
        witness.request(LoadTarget("it", ["candidate"], "function", ["x" * 4096] * 800, 1))
    assert time.monotonic() - began < 50.0


def test_padding_of_all_results_is_limited_together(load, monkeypatch) -> None:
    monkeypatch.setattr(candidate, "MAX_PADDED_BYTES", 1 << 20)
    witness = load("""
def candidate(x):
    return [torch.empty(1 << 18)[::64] for _ in range(3)]
""")
    like = [torch.empty(1 << 12)] * 3
    with pytest.raises(CandidateError, match="result 1: strides"):
        called(witness, torch.ones(4), like=like)


def test_a_result_without_padding_leaves_its_room_to_others(load, monkeypatch) -> None:
    monkeypatch.setattr(candidate, "MAX_PADDED_BYTES", 1 << 20)
    witness = load("""
def candidate(x):
    return torch.empty(1 << 20), torch.empty(1 << 12)[::32]
""")
    called(witness, torch.ones(4), like=[torch.empty(1 << 20), torch.empty(1 << 7)])


def test_nobody_changes_the_length_of_a_heartbeat() -> None:
    beat = Heartbeat()
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(beat.handle, size)
    os.close(beat.handle)


KILLED = """
import os, signal, sys
from pathlib import Path
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.candidate import TargetProcess
from shiplap.sandbox.protocol import LoadTarget
from shiplap.sandbox.supervisor import SandboxLauncher
launcher = SandboxLauncher()
witness = TargetProcess(launcher.start([sys.argv[1]]))
print(launcher.folder, launcher.pid, witness.prisoner.pid, flush=True)
witness.load(LoadTarget(sys.argv[1] + "/it.py", ["candidate"], "function", [], 1), ArgumentArena())
"""


def test_nothing_stays_after_the_supervisor_was_killed(tmp_path) -> None:
    (tmp_path / "it.py").write_text(
        HEAD
        + """
if os.fork() == 0:
    if os.fork() == 0:
        for _ in range(1200):
            os.mkdir("deeper")
            os.chdir("deeper")
        open(os.environ["TMPDIR"] + "/alive", "w").write(str(os.getpid()))
    time.sleep(60)
time.sleep(60)
"""
    )
    command = [sys.executable, "-P", "-c", KILLED, str(tmp_path)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    assert run.stdout is not None
    folder, *pids = run.stdout.readline().split()
    ends = time.monotonic() + 60
    while not (told := next(Path(folder).glob("*/alive"), None)) or not told.read_text():
        assert time.monotonic() < ends
        time.sleep(0.01)
    pids.append(told.read_text())
    os.killpg(run.pid, signal.SIGTERM)
    run.wait()
    while any(_lives(pid) for pid in pids) or os.path.exists(folder):
        assert time.monotonic() < ends
        time.sleep(0.01)


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_fork_does_not_write_what_the_program_has_mapped(tmp_path) -> None:
    file, mapped = tmp_path / "weights", []
    file.write_bytes(b"a" * 8192)
    for flags in (os.O_RDWR, os.O_RDONLY):
        handle = os.open(file, flags)
        mapped.append(mmap.mmap(handle, 8192, mmap.MAP_SHARED, mmap.PROT_READ | (flags & os.O_RDWR)))
        os.close(handle)
    (tmp_path / "gone").write_bytes(b"c" * 4096)
    handle = os.open(tmp_path / "gone", os.O_RDWR)
    gone = mmap.mmap(handle, 4096)
    os.unlink(tmp_path / "gone")
    shared = mmap.mmap(-1, 4096)
    shared[:1] = b"b"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _make_memory_private()
            kept = mapped[0][:2] + mapped[1][:1] + shared[:1] + gone[:1]
            mapped[0][:1] = shared[:1] = gone[:1] = b"!"
            status = int(kept + mapped[0][:1] + shared[:1] != b"aaabc!!")
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert (file.read_bytes()[:1], mapped[0][:1], shared[:1], os.pread(handle, 1, 0)) == (b"a", b"a", b"b", b"c")
    os.close(handle)


class EndsFork:
    """Ends a forked process that collects it. In a program, it may wait for a thread that does not exist there."""

    def __init__(self, program: int) -> None:
        self.program, self.circle = program, self

    def __del__(self) -> None:
        if os.getpid() != self.program:
            os._exit(9)


@pytest.mark.long
def test_a_fork_collects_no_garbage_of_the_program() -> None:
    before = gc.get_threshold()
    launcher = ForkedLauncher()
    gc.collect()
    try:
        gc.set_threshold(5000, 1, 1)  # fewer objects than the fork makes for its snapshot, more than this process does
        EndsFork(os.getpid())
        with launcher:
            launcher.start().kill()
    finally:
        gc.set_threshold(*before)
        gc.collect()  # a fork of a later test would end


def test_a_fork_has_no_secret_in_the_memory_of_its_environment() -> None:
    # In a new process, whose variables lie where it began. It needs no torch, which would be imported for two seconds.
    code = """
import os, sys, types
for name in "shiplap", "shiplap.sandbox", "torch":
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = ["src/" + name.replace(".", "/")]
sys.modules["torch"].Tensor = object
from shiplap.sandbox.forked_launcher import _forget_secrets
os.environ["MY_KEY"] = "another"
del os.environ["MY_SECRET"]
_forget_secrets()
shown = open("/proc/self/environ").read()
print("hidden-value" in shown, "plain-value" in shown, bool({"MY_TOKEN", "MY_KEY"} & set(os.environ)))
"""
    assert _forget_secrets is not None
    hidden = dict.fromkeys(("MY_TOKEN", "MY_KEY", "MY_SECRET"), "hidden-value")
    variables = {**os.environ, **hidden, "MY_NAME": "plain-value"}
    root, command = Path(__file__).parents[2], [sys.executable, "-P", "-c", code]
    run = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["False", "True", "False"], run.stderr


def test_memory_runs_out_for_a_sandboxed_process_first(load) -> None:
    witness = load("def candidate(x): return x")
    assert Path(f"/proc/{witness.prisoner.pid}/oom_score_adj").read_text().strip() == "1000"
    witness.request(Inspect())
