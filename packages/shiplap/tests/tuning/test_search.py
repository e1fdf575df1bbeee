"""The search, driven by a bench that knows the true times: the winner, in large spaces a near one, in budget."""

import itertools
import time
from dataclasses import dataclass, field

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.declare.config import Config
from shiplap.sampling.recipe import SampleRecipe
from shiplap.tuning import measure
from shiplap.tuning.bench import ConfirmedClaim
from shiplap.tuning.candidate import Candidate, ReferenceCandidate
from shiplap.tuning.inputs import draw_inputs
from shiplap.tuning.measure import CpuClock, RacePlan, Timing, race_runs
from shiplap.tuning.search import WHOLE, search_candidates
from shiplap.tuning.verify import VerifyOutcome


@sl.op("tune_search::one")
def one(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + 1


@dataclass(frozen=True)
class Fake(Candidate):
    config: Config
    kernel: str = "tiled"
    prior: object = None

    def estimate(self, env):
        return None if self.prior is None else self.prior(env, self.config.as_dict())

    def prepare(self, args):
        raise NotImplementedError


@dataclass
class FakeBench:
    """True times by index; counts what it was asked."""

    times: list[float]
    wrong: frozenset = frozenset()
    delay: float = 0.0
    verified: list[int] = field(default_factory=list)
    compiled: list[int] = field(default_factory=list)

    def compile(self, indices):
        self.compiled += indices
        return len(indices)

    def quiet(self):
        self.compiled.clear()

    def confirm(self, claims, seconds, believed):
        return dict.fromkeys(claims, ConfirmedClaim())

    def duel(self, indices, claimed, seconds):
        return {}, {}

    def verify(self, index):
        time.sleep(self.delay)
        self.verified.append(index)
        return VerifyOutcome("it is wrong" if index in self.wrong else "")

    def race(self, indices, plan):
        best = min(self.times[i] for i in indices)
        return {i: Timing(self.times[i], 0, 0, plan.rounds, self.times[i] <= plan.hopeless * best) for i in indices}, {}


def space(prior=None, tiles=(16, 32, 64, 128, 256), stages=(1, 2, 3, 4), warps=(1, 2, 4, 8)):
    configs = [Config.of(dict(zip("MNSW", v, strict=True))) for v in itertools.product(tiles, tiles, stages, warps)]
    return [ReferenceCandidate(one), *(Fake(c, prior=prior) for c in configs)]


def cost(config, m=128, n=64, s=3, w=4):
    """Smooth, with one best point, as tile sizes behave."""
    c = config.as_dict()
    far = [abs(torch.tensor(c[a] / b).log2().item()) for a, b in (("M", m), ("N", n), ("W", w))]
    return 1.0 + 0.3 * sum(far) + 0.15 * abs(c["S"] - s)


def run(candidates, bench, seconds=60.0):
    drawn = draw_inputs(one, SampleRecipe().but(sizes={"n": 64}, dtypes={"Float": "float32"}), "cpu")
    return search_candidates(one, candidates, bench, drawn, seconds, lambda what, done, total: None, RacePlan())


def test_a_small_space_is_searched_whole():
    candidates = space()[: WHOLE - 2]
    times = [9.0, *(5.0 - 0.1 * i for i in range(len(candidates) - 1))]
    bench = FakeBench(times)
    ranking = run(candidates, bench)
    assert bench.verified == list(range(len(candidates)))
    assert ranking.order[0] == len(candidates) - 1
    assert ranking.unseen == 0


@pytest.mark.parametrize("best", [(128, 64, 3, 4), (16, 256, 1, 8), (64, 64, 2, 2), (256, 16, 4, 1)])
def test_a_large_space_is_not_searched_whole_and_the_winner_is_near(best):
    candidates = space()
    times = [9.0, *(cost(c.config, *best) for c in candidates[1:])]
    bench = FakeBench(times)
    ranking = run(candidates, bench)
    assert len(bench.verified) < len(candidates) / 3
    assert times[ranking.order[0]] <= 1.35 * min(times)
    assert ranking.unseen == len(candidates) - len(bench.verified)


@pytest.mark.parametrize("best", [(128, 64, 3, 4), (16, 256, 1, 8), (64, 64, 2, 2), (256, 16, 4, 1)])
def test_with_a_prior_the_winner_is_within_3_percent(best):
    """A prior that is off by a factor of two in each direction still leads there."""
    candidates = space(prior=lambda env, values: cost(Config.of(values), *best) + 0.3 * (values["M"] > 64))
    times = [9.0, *(cost(c.config, *best) for c in candidates[1:])]
    bench = FakeBench(times)
    ranking = run(candidates, bench)
    assert len(bench.verified) < len(candidates) / 3
    assert times[ranking.order[0]] <= 1.03 * min(times)


def test_each_kernel_of_a_large_space_is_tried_once_at_least():
    candidates = [*space(prior=lambda env, values: 1.0), Fake(Config(), kernel="vendor")]
    times = [*[5.0] * (len(candidates) - 1), 1.0]
    ranking = run(candidates, FakeBench(times))
    assert candidates[ranking.order[0]].kernel == "vendor"


def test_the_wrong_are_not_raced():
    candidates = space()[:10]
    bench = FakeBench([5.0, *[1.0] * 9], wrong=frozenset(range(1, 9)))
    ranking = run(candidates, bench)
    assert ranking.order == [9, 0]
    assert [f.verdict for f in ranking.findings] == ["fail"] * 8


def test_a_budget_ends_the_search_and_says_what_was_not_seen():
    candidates = space()[:30]
    bench = FakeBench([5.0] * 30, delay=0.02)
    ranking = run(candidates, bench, seconds=0.1)
    assert 2 <= len(bench.verified) < 30
    assert ranking.unseen == 30 - len(bench.verified)
    assert ranking.order


class Script:
    """A clock whose samples are given."""

    def __init__(self, times):
        self.times, self.samples = times, dict.fromkeys(times, 0)

    def ready(self, run):
        return run

    def sample(self, run, repeats):
        index = run()
        self.samples[index] += 1
        return self.times[index]


def test_a_race_gives_up_the_hopeless_early():
    clock = Script({0: 1.0, 1: 1.1, 2: 2.0, 3: 100.0})
    timings = race_runs({i: lambda i=i: i for i in clock.times}, clock, RacePlan(rounds=20))
    assert {i: t.finished for i, t in timings.items()} == {0: True, 1: True, 2: False, 3: False}
    assert clock.samples[3] == 2
    assert clock.samples[2] <= 4
    assert clock.samples[0] == 21
    assert timings[1].median == 1.1


def test_one_disturbed_sample_costs_nobody_the_race():
    """The scheduler takes the processor away during the first sample of the fastest, and later during every tenth."""

    class Disturbed(Script):
        def sample(self, run, repeats):
            index = run()
            self.samples[index] += 1
            hit = index == 0 and self.samples[index] % 10 == 1
            return 50.0 if hit else self.times[index]

    timings = race_runs({i: lambda i=i: i for i in range(3)}, Disturbed({0: 1.0, 1: 1.5, 2: 2.0}), RacePlan(rounds=20))
    assert min(timings, key=lambda i: timings[i].median) == 0
    assert timings[0].finished


def test_candidates_take_turns():
    order = []
    race_runs({i: lambda i=i: i for i in range(3)}, Script({0: 1.0, 1: 1.0, 2: 1.0}), RacePlan(rounds=3), order.append)
    assert order[:3] == [0, 1, 2]
    assert order[3:6] == [0, 1, 2]
    assert order[6:9] == [1, 2, 0]
    assert order[9:] == [2, 0, 1]


def test_a_launch_is_timed_without_waiting_for_the_device(monkeypatch):
    """The clock of this test moves by what the host does. Work of the device ends while the host waits."""
    now, queued = [0], [0]

    def run(host: int, device: int) -> None:
        now[0] += host
        queued[0] += device

    def wait() -> None:
        now[0] += queued[0]
        queued[0] = 0

    monkeypatch.setattr(measure, "perf_counter_ns", lambda: now[0])
    runs = {0: lambda: run(9000, 500_000), 3: lambda: run(16_000 if now[0] < 9_000_000 else 15_000, 400_000)}
    assert measure.launch_seconds(runs, wait) == pytest.approx({0: 9e-6, 3: 15e-6})
    assert queued == [0]


def test_a_cpu_sample_is_long_against_the_clock(monkeypatch):
    """The clock of this test moves by a microsecond a call."""
    calls = []
    monkeypatch.setattr(measure, "perf_counter_ns", lambda: 1000 * len(calls))
    race_runs({0: lambda: calls.append(1)}, CpuClock(), RacePlan(rounds=2))
    assert len(calls) > 100
