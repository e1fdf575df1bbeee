"""Processes: what is sent between them, what a fork may do, and how one ends."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn

from shiplap_backend.project import Project

SECONDS = 120  # after which a process counts as hanging


def start(project: Project, program: str, timeout: int = SECONDS) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, which ends as Python ends it. It loads the device by ``load()``."""
    code = f"import sys; sys.path.insert(0, {str(project.root)!r})\nimport torch, torch_{project.device}\n"
    code += f"load, D = torch_{project.device}.autoload, {project.device!r}\n{textwrap.dedent(program)}"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def ended(run: subprocess.CompletedProcess[str]) -> tuple[int, str]:
    return run.returncode, run.stdout + run.stderr


BACKWARD = """
    x = torch.ones(2, device=D, requires_grad=True)
    (x * x).sum().backward()
"""

# The thread of the backward releases the graph after the call has returned; here it releases a hook that takes its
# time and needs the interpreter, so that Python ends meanwhile.
SLOW_RELEASE = """
    import time
    class Kept:
        def __del__(self):
            time.sleep(0.3)
            self.done = [0] * 1000
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = Kept()
            return x * 2
        @staticmethod
        def backward(ctx, grad):
            return grad * 2
    x = torch.ones(2, device=D, requires_grad=True)
    Keeps.apply(x).sum().backward()
"""


FULL = BACKWARD + "    getattr(torch, D).set_memory_limit(1)\n"

# The child has the queues of autograd's threads, and no thread that empties them.
FORK = (
    BACKWARD
    + """
    import os, time
    pid = os.fork()
    began = time.monotonic()
    if pid: assert os.waitpid(pid, 0)[1] == 0 and time.monotonic() - began < 4
"""
)

QUEUE = """
    import torch.multiprocessing as mp

    def child(queue, answers):
        answers.put(queue.get() * 2)

    if __name__ == "__main__":
        context = mp.get_context("fork")
        queue, answers = context.Queue(), context.Queue()
        process = context.Process(target=child, args=(queue, answers))
        process.start()
        queue.put(torch.arange(3.0, device=D))
        got = answers.get(timeout=60)
        assert (got.device.type, got.cpu().tolist()) == (D, [0, 2, 4])
        process.join(60)
        assert process.exitcode == 0
"""

PROGRAMS = {"plain": BACKWARD, "slow": SLOW_RELEASE, "no memory left": FULL, "fork": FORK, "queue": QUEUE}

# Torch takes two seconds to import, and each program a fraction of one: each runs in a child of one process, loads the
# device there and ends as Python ends a script. An alarm ends a child that hangs.
EACH = """
    import json, os, signal
    programs, place, ends = json.loads(PROGRAMS), PLACE, {}
    for name, program in programs.items():
        pid = os.fork()
        if not pid:
            signal.alarm(SECONDS)
            for stream in (1, 2):
                os.dup2(os.open(os.path.join(place, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            break
        ends[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if pid:
        print(json.dumps(ends))
        raise SystemExit
    load()
    exec(program)
"""


@pytest.fixture(scope="module")
def ends(project: Project, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """By the name of a program, the status with which its process ended, and what it printed."""
    place, values = tmp_path_factory.mktemp("ends"), {name: textwrap.dedent(text) for name, text in PROGRAMS.items()}
    each = EACH.replace("PROGRAMS", repr(json.dumps(values))).replace("PLACE", repr(str(place)))
    done = start(project, each.replace("SECONDS", str(SECONDS)), timeout=SECONDS * (1 + len(PROGRAMS)))
    assert done.returncode == 0, done.stderr
    return {name: (status, (place / name).read_text()) for name, status in json.loads(done.stdout).items()}


@pytest.mark.parametrize("name", ["plain", "slow", "no memory left"])
def test_a_process_ends_after_a_backward(ends: dict[str, tuple[int, str]], name: str) -> None:
    assert ends[name] == (0, "")


# Forked where torch is imported and the device is not there: an exit costs a fraction of a second, and each child loads
# the device, runs its program and ends as Python ends a script. More run at a time than there are cores.
MANY = """
    import os
    running, ends = set(), []
    def wait():
        pid, status = os.wait()
        running.remove(pid)
        ends.append(status)
    for _ in range(COUNT):
        if len(running) == 8:
            wait()
        pid = os.fork()
        if not pid:
            break
        running.add(pid)
    while running and pid:
        wait()
    if pid:
        print(len(ends), sorted(set(ends)))
        raise SystemExit
    load()
"""


@pytest.mark.long
@pytest.mark.parametrize("program", [BACKWARD, SLOW_RELEASE], ids=["plain", "slow"])
def test_two_hundred_processes_end_after_a_backward(project: Project, program: str) -> None:
    """Half of them ended with status 134 on a busy machine."""
    many = textwrap.dedent(MANY.replace("COUNT", "200")) + textwrap.dedent(program)
    assert ended(start(project, many)) == (0, "200 [0]\n")


def test_a_fork_after_a_backward_ends(ends: dict[str, tuple[int, str]]) -> None:
    assert ends["fork"] == (0, "")


def sent(value: Any) -> Any:
    """Return what a queue hands to the receiver."""
    return pickle.loads(bytes(ForkingPickler.dumps(value)))


def test_what_a_queue_carries(dev: Any, device: str) -> None:
    x = torch.arange(6.0, device=device).reshape(2, 3)
    for value in (x, x.t(), x[1:], x.bool(), x.to(torch.complex64).conj(), torch.empty(0, device=device)):
        got = sent(value)
        assert (got.device, got.dtype, got.shape) == (value.device, value.dtype, value.shape)
        assert torch.equal(got.cpu(), value.cpu())
    leaf = sent(x.clone().requires_grad_())
    assert leaf.requires_grad
    parameter = sent(nn.Parameter(x, requires_grad=False))
    assert isinstance(parameter, nn.Parameter)
    assert not parameter.requires_grad
    assert bytes(sent(x.untyped_storage()).cpu().tolist()) == bytes(x.cpu().untyped_storage().tolist())
    model = sent(nn.Linear(3, 2).to(device))
    assert {p.device.type for p in model.parameters()} == {device}
    assert sent(torch.ones(2)).device.type == "cpu"
    with pytest.raises(RuntimeError, match=r"detach\(\) it first"):
        sent(x.clone().requires_grad_() * 2)


def test_what_cannot_be_sent_raises_where_it_is_received(
    dev: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue pickles in a thread: an error there is printed, and the receiver waits for ever."""
    x = torch.ones(2, device=device)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", lambda self: 1 / 0)
        data = bytes(ForkingPickler.dumps(x))
    with pytest.raises(RuntimeError, match=f"a Tensor of device '{device}' could not be sent: division by zero"):
        pickle.loads(data)


def test_a_queue_between_processes(ends: dict[str, tuple[int, str]]) -> None:
    """The child of a fork that comes before any computation is a process like any other."""
    assert ends["queue"] == (0, "")
