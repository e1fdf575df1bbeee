"""Candidates are compiled side by side, verified one after another, and raced in a quiet process."""

import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.declare.config import NO_CONFIG
from shiplap.sampling.recipe import SampleRecipe
from shiplap.tuning import bench as benches
from shiplap.tuning.bench import LocalBench
from shiplap.tuning.candidate import Candidate, ReferenceCandidate
from shiplap.tuning.inputs import draw_inputs
from shiplap.tuning.measure import RacePlan
from shiplap.tuning.search import search_candidates


@sl.op("tune_bench::double")
def double(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2


@dataclass
class Compiling(Candidate):
    """A right candidate that counts; ``work`` is what its compiler does."""

    work: object = None
    fails: bool = False
    kernel: str = "k"
    config: object = NO_CONFIG
    sizes: list[int] = field(default_factory=list)
    ended: bool = False
    fixed: bool = False
    compiles: bool = True

    def precompile(self, args):
        self.sizes.append(args[0].shape[0])
        if self.work is not None:
            self.work()
        self.ended = True
        if self.fails:
            raise ValueError("does not compile")

    def prepare(self, args):
        if self.fails:
            raise ValueError("does not compile")
        return lambda: (args[0] * 2,)


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(benches.os, "cpu_count", lambda: 2)


@pytest.fixture
def when_waited_for(monkeypatch):
    """An event that is set when nothing further is compiled, and what is being compiled is waited for."""
    waited, wait = threading.Event(), benches.wait

    def set_and_wait(futures):
        waited.set()
        return wait(futures)

    monkeypatch.setattr(benches, "wait", set_and_wait)
    return waited


def bench_of(*candidates):
    drawn = draw_inputs(double, SampleRecipe.parse("sizes(n=64), dtypes(Float='float32')"), "cpu")
    return LocalBench(drawn, [ReferenceCandidate(double), *candidates])


def test_side_by_side(two_cores):
    """Two that wait for each other would never end one after another."""
    meeting = threading.Barrier(2, timeout=30)
    bench = bench_of(Compiling(meeting.wait, fixed=True), Compiling(meeting.wait, fixed=True))
    bench.compile([0, 1, 2])
    assert bench.verify(1).ok
    assert bench.verify(2).ok


def test_every_size_of_the_verification_is_compiled_once(two_cores):
    one, other = Compiling(), Compiling(fixed=True)
    bench = bench_of(one, other)
    bench.compile([1, 2])
    assert bench.verify(1).ok
    assert bench.verify(2).ok
    assert one.sizes == [64, bench.inputs.small.args[0].shape[0], 64, 33, 63], "one of 64 begins off a boundary"
    assert other.sizes == [64]


def test_the_first_is_verified_while_others_compile(two_cores):
    slow = threading.Event()
    bench = bench_of(Compiling(), Compiling(lambda: slow.wait(30)))
    bench.compile([1, 2])
    assert bench.verify(0).ok, "one without a compiler waits for none"
    assert bench.verify(1).ok
    assert not bench.candidates[2].ended
    slow.set()
    assert bench.verify(2).ok
    assert bench.candidates[2].ended


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_for_a_gpu_are_compiled_in_other_processes_too(two_cores, device):
    """Threads wait for each other. Processes that go on would disturb the clock of a CPU, and one may fail to start."""
    begun = []

    class Elsewhere(Compiling):
        def compile_apart(self):
            begun.append(self)
            raise OSError("no process")

    drawn = bench_of().inputs
    given = SimpleNamespace(op=double, device=device, real=drawn.real, small=None)
    listed = [Elsewhere(fixed=True), Elsewhere(fixed=True)]
    bench = LocalBench(given, listed)
    assert bench.compile([0, 1]) == 2
    bench.quiet()
    assert begun == (listed if device == "cuda" else [])


def test_a_race_begins_when_nobody_compiles(two_cores, when_waited_for):
    begun = threading.Barrier(3, timeout=120)

    def work():
        begun.wait()
        when_waited_for.wait(120)
        time.sleep(0.3)

    running = [Compiling(work, fixed=True), Compiling(work, fixed=True)]
    waiting = [Compiling(fixed=True) for _ in range(20)]
    bench = bench_of(*running, *waiting)
    bench.compile(range(1, 23))
    begun.wait()
    timings, failed = bench.race([0, 1], RacePlan(rounds=2, least=1, seconds=0.1))
    assert all(c.ended for c in running), "what runs is waited for"
    assert not any(c.sizes for c in waiting), "what has not begun does not begin"
    assert sorted(timings) == [0, 1]
    assert not failed
    assert bench.verify(5).ok, "and may still be asked for"


def test_what_does_not_compile_says_why_when_it_is_verified(two_cores):
    bench = bench_of(Compiling(fails=True), Compiling())
    bench.compile([1, 2])
    assert "ValueError: does not compile" in bench.verify(1).problem
    assert bench.verify(2).ok


def test_what_has_no_time_left_is_not_compiled(two_cores, when_waited_for):
    """A search that ends early, for any reason, leaves nothing running."""
    begun = threading.Event()
    candidates = [Compiling(lambda: begun.set() or when_waited_for.wait(120), fixed=True) for _ in range(20)]
    bench = bench_of(*candidates)

    def report(what, done, total):
        begun.wait(120)
        raise TimeoutError

    with pytest.raises(TimeoutError):
        search_candidates(double, bench.candidates, bench, bench.inputs, 60.0, report, RacePlan())
    compiled = [c.ended for c in candidates]
    assert 1 <= sum(compiled) <= 2
    time.sleep(0.5)
    assert [c.ended for c in candidates] == compiled


def test_one_alone_needs_no_thread(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(benches, "ThreadPoolExecutor", never)
    bench = bench_of(Compiling())
    bench.compile([0, 1])
    assert bench.verify(1).ok
