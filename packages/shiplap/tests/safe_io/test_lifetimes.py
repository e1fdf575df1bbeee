"""Calls of many threads while an op is declared again, tuned, cleared; children that are forked meanwhile."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.cached_property import cached_property
from shiplap.declare.config import Config
from shiplap.dispatch import tuned_choices
from shiplap.kernels.native import binding
from shiplap.kernels.native.build import build_once as compile_into
from shiplap.tuning import thaw
from shiplap_testing.effort import sampled
from shiplap_testing.forked import WITH_VERBS, python

DECLARED_TWICE = """
import threading, time
import torch
from jaxtyping import Float
from torch import Tensor
import shiplap as sl

def declare():
    @sl.op("lifetime_test::double")
    def double(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return 2 * x

    @double.kernel("cpu")
    def kernel(x, *, out):
        torch.mul(x, 2, out=out)

    @double.backward
    def gradient(grad, saved, needs):
        return {"x": 2 * grad}

    return double

op, stop, wrong, calls, times = declare(), time.monotonic() + SECONDS, [], [0], [0]
x = torch.arange(64.0)
y = torch.arange(64.0, requires_grad=True)

def goes_on():
    few = times[0] <= 5 or calls[0] <= 16  # a machine that does much else takes longer
    return not wrong and time.monotonic() < stop + 200 * few

def call():
    while goes_on():
        for made in (op(x), torch.ops.lifetime_test.double(x), op(x=x)):
            if not torch.equal(made, 2 * x):
                wrong.append("wrong values")
        try:
            (grad,) = torch.autograd.grad(op(y).sum(), y)
        except sl.ShiplapError as e:
            if e.id != "SL304":  # declared again, and its gradient not yet
                raise
        else:
            if not torch.equal(grad, torch.full((64,), 2.0)):
                wrong.append("wrong gradient")
        calls[0] += 1

def run():
    try:
        call()
    except BaseException as e:
        wrong.append(f"{type(e).__name__}: {e}")

threads = [threading.Thread(target=run) for _ in range(16)]
for t in threads: t.start()
while goes_on():
    declare()
    times[0] += 1
for t in threads: t.join()
assert not wrong, wrong[:3]
assert times[0] > 5 and calls[0] > 16, (times, calls)
"""


@pytest.mark.long
def test_declaring_again_frees_nothing_that_a_call_uses():
    """6 of 6 such runs ended in a segmentation fault."""
    done = python("-c", DECLARED_TWICE.replace("SECONDS", "1.5"), timeout=300, imported=WITH_VERBS)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def storm(tmp_path_factory):
    """``storm(change, seconds, threads)`` runs storm.py; what is compiled for one is there for the next."""
    folder = tmp_path_factory.mktemp("storm")
    (folder / "cache").mkdir(mode=0o700)
    environment = {**os.environ, "SHIPLAP_CACHE_DIR": str(folder / "cache"), "SHIPLAP_NATIVE": "1"}
    program = Path(__file__).with_name("storm.py")
    return lambda *what: python(program, *what, folder, env=environment, timeout=300, imported=WITH_VERBS)


CHANGES = ("same", "different", "attach", "tune", "everything")


@pytest.mark.parametrize("change", sampled(CHANGES, long=CHANGES[:4]))
def test_calls_survive_what_changes_under_them(storm, change):
    """A segmentation fault for another schema, and errors of torch for native code, until what torch has stayed."""
    done = storm(change, 1.5, 8)
    assert done.returncode == 0, f"{done.stdout[-500:]} {done.stderr[-2000:]}"


def test_what_is_held_of_another_schema_stays_what_it_was(ns):
    x, registered = torch.ones(2), getattr(torch.ops, ns)

    def declare(two):
        if two:

            @sl.op(f"{ns}::f")
            def f(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
                return x + y, x - y
        else:

            @sl.op(f"{ns}::f")
            def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
                return 2 * x

        return f

    first = declare(False)
    held = registered.f.default
    second = declare(True)
    assert registered.f(x, x)[1].sum() == second(x, x)[1].sum() == 0
    assert torch.equal(first(x), 2 * x)
    assert torch.equal(held(x), 2 * x)
    assert torch.equal(second.out(x, x, out=[torch.empty(2), torch.empty(2)])[0], 2 * x)
    assert torch.equal(torch.compile(lambda x: second(x, x)[0], backend="aot_eager", fullgraph=True)(x), 2 * x)


def test_an_op_declared_again_is_called_by_all_who_hold_it(ns):
    def declare(by):
        @sl.op(f"{ns}::scale")
        def scale(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
            return by * x

        return scale

    first = declare(2)
    registered = getattr(torch.ops, ns).scale
    assert registered(torch.ones(1)).item() == 2
    second = declare(3)
    assert registered(torch.ones(1)).item() == first(torch.ones(1)).item() == second(torch.ones(1)).item() == 3

    @second.backward
    def gradient(grad, saved, needs):
        return {"x": 7 * grad}

    for op in (first, second, registered, second.overload):
        x = torch.ones(1, requires_grad=True)
        op(x).sum().backward()
        assert x.grad.item() == 7
    third = declare(4)
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(sl.ShiplapError, match="SL304"):
        third(x).sum().backward()


def test_choices_may_change_and_be_cleared_under_calls(ns):
    @sl.op(f"{ns}::told")
    def told(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return torch.zeros_like(x)

    @told.kernel("cpu", configs=[{"tile": 1}, {"tile": 2}])
    def fixed(x, *, tile):
        return x + tile

    x, stop, wrong = torch.zeros(4), time.monotonic() + 0.5, []
    key = ("cpu", *told.rule.key(told.bind([x])))

    def call():
        try:
            while time.monotonic() < stop:
                assert float(told(x)[0]) in (1.0, 2.0)
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    while time.monotonic() < stop:
        for config in ({"tile": 2}, {"tile": 1}, {"tile": 0}, {}):
            tuned_choices.install_choice_entries(
                [tuned_choices.ChoiceEntry(told.spec.name, told.identity, key, "fixed", Config.of(config))]
            )
        thaw()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_child_forked_while_a_binding_is_built_does_not_hang():
    """Another thread holds the lock of native bindings when the process forks."""
    holds, done = threading.Event(), threading.Event()

    def hold():
        with binding._lock:
            holds.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(60)
    pid = os.fork()
    if not pid:
        os._exit(0 if binding._lock.acquire(timeout=20) else 1)
    status = os.waitpid(pid, 0)[1]
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


class Slow:
    """Properties that take until they are let go."""

    def __init__(self, started: threading.Event, go: threading.Event) -> None:
        self.started, self.go = started, go

    @cached_property
    def value(self) -> int:
        self.started.set()
        self.go.wait(60)
        return 7


@pytest.mark.parametrize("who", ["the child", "the parent"])
def test_a_child_forked_while_a_compiler_runs_keeps_no_lock(tmp_path, who):
    """It had the open lock of its parent, which held it against the child itself, and against all others after the
    parent had ended: found by fork 2 of seed 17.
    """
    script, go = tmp_path / "cxx", tmp_path / "go"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nwhile [ ! -e {go} ]; do sleep 0.05; done\nexit 1\n")
    script.chmod(0o700)
    (tmp_path / "native").mkdir(mode=0o700)

    def build() -> str:
        return compile_into(tmp_path / "native", "abc", "source", [str(script)], wait=60)

    builder = threading.Thread(target=build)
    builder.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    pid = os.fork()
    if not pid:
        status = 1
        try:
            if who == "the child":
                go.touch()
                status = 0 if "status 1" in build() else 1
            else:
                time.sleep(600)
        finally:
            os._exit(status)
    try:
        go.touch()
        builder.join()
        if who == "the parent":
            assert "status 1" in build(), "and not: the lock is held"
        else:
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            pid = 0
    finally:
        if pid:
            os.kill(pid, 9)
            os.waitpid(pid, 0)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_child_forked_at_any_line_of_a_build_keeps_no_lock(tmp_path, step):
    """It did where the lock file was open and not listed yet: three lines."""
    done = python(Path(__file__).with_name("fork_sweep.py"), tmp_path, step, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-500:]} {done.stderr[-2000:]}"


@pytest.mark.parametrize("how", ["built", "detached"])
def test_a_child_forked_while_a_compiler_is_started_holds_no_end_of_its_pipes(tmp_path, how):
    """Fork 79 of seed 17: the parent waited for the end of the compiler's output, which its child had open as well, and
    the child for the parent's lock."""
    program = f"""
import os, signal, subprocess, sys, threading
from pathlib import Path
from shiplap.kernels.native import build
root, children, forkers = Path({str(tmp_path)!r}), [], []

def fork():
    if not (pid := os.fork()):
        signal.pause()
    children.append(pid)

def audited(event, args):  # subprocess has made its pipes, and closed none of them
    if event == "subprocess.Popen":
        forkers.append(threading.Thread(target=fork))
        forkers[-1].start()
        forkers[-1].join(0.5)

sys.addaudithook(audited)
signal.alarm(120)
if {how == "built"}:
    said = build.build_once(root, "abc", "source", ["false"])
else:
    child = build.build_detached(root, "abc", "source", ["false"])
    said = child.stdout.read().decode()
for each in forkers:
    each.join()
for pid in children:
    os.kill(pid, signal.SIGKILL)
assert "status 1" in said, said
assert children
"""
    done = python("-c", program, timeout=300, imported=WITH_VERBS)
    assert done.returncode == 0, f"{done.stdout[-500:]} {done.stderr[-2000:]}"


def test_a_child_forked_while_a_property_is_computed_does_not_hang():
    """Python 3.11's cached_property has one lock for all instances: 1 of 20 children of a storm hung on it."""
    started, go, ready = threading.Event(), threading.Event(), threading.Event()
    ready.set()
    thread = threading.Thread(target=lambda: Slow(started, go).value)
    thread.start()
    started.wait(60)
    pid = os.fork()
    if not pid:
        os._exit(0 if Slow(ready, ready).value == 7 else 1)
    until = time.monotonic() + 60
    while not (done := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < until:
        time.sleep(0.01)
    if not done[0]:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    go.set()
    thread.join()
    assert done[0], "the child hangs"
    assert os.waitstatus_to_exitcode(done[1]) == 0


def test_no_property_of_the_core_has_a_lock():
    sources = Path(sl.__file__).parent.rglob("*.py")
    locked = [p.name for p in sources if re.search(r"^from functools import .*cached_property", p.read_text(), re.M)]
    assert not locked, "shiplap.cached_property has one without"


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.long)])
def test_children_forked_in_a_storm_do_not_hang(tmp_path, count):
    """A sample of what ``nox -s forks`` does for longer."""
    (tmp_path / "cache").mkdir(mode=0o700)
    environment = {**os.environ, "SHIPLAP_CACHE_DIR": str(tmp_path / "cache"), "SHIPLAP_NATIVE": "1"}
    program = Path(__file__).with_name("forks.py")
    done = python(program, count, 8, tmp_path, 17, env=environment, timeout=1200, imported=WITH_VERBS)
    assert done.returncode == 0, f"{done.stdout[-500:]} {done.stderr[-2000:]}"


def test_a_namespace_of_torch_itself_is_refused():
    for name in ("aten::add", "prims::mine", "quantized::x", "inductor::x"):
        with pytest.raises(sl.ShiplapError, match="SL101"):
            sl.op(name)
