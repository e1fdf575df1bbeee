"""From candidates to a ranking: verify, drop wrong candidates with a finding, time the others, try configs near the
best.

If there are few candidates, all are timed. If there are many, the search first times those that the kernel's ``prior``
ranks best, or a spread over the declared order without a prior. Then the search times the configs that differ from the
best one in one value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from time import monotonic

from shiplap.dispatch import Op
from shiplap.errors import notice
from shiplap.sampling.finding import Finding
from shiplap.tuning.bench import Bench
from shiplap.tuning.candidate import Candidate, candidate_label
from shiplap.tuning.inputs import Inputs
from shiplap.tuning.measure import RacePlan, Timing

WHOLE = 32  # candidates up to which the space is searched whole
SHARE = 0.6  # of the time of a bucket, after which no more candidates are verified: those that are have to be raced
NEAR = 1.5  # times the time of the best, by the clocks of candidates
BESIDE = 3  # of those at once
DUEL = 2.0  # times that, by the clock of this process
FALSE = 3.0  # times its claim: more than the cost of new values, which are in no cache
TIE = 0.99  # of the reference's time: a slower candidate is no gain, and the reference is always correct
CLIMBS = 3  # how often the neighbourhood of a new winner is looked at

Report = Callable[[str, int, int], None]  # the current step as text, steps done, steps in all


@dataclass
class Ranking:
    """The state of a search for the fastest candidate. Candidates are given by index. ``timings`` has the times of
    those that were measured, ``dropped`` those that were removed, and ``findings`` the reasons. ``unseen`` is the
    number of candidates that were neither verified nor dropped.
    """

    timings: dict[int, Timing] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    unseen: int = 0

    @property
    def order(self) -> list[int]:
        """The indices of the measured candidates, fastest first.

        Candidates that left the race early come last. The time of the reference (index 0) is multiplied by 0.99, so
        that a candidate must be clearly faster to come before it.
        """

        def rank(index: int) -> tuple[bool, float]:
            """Return the sort key of the candidate at ``index``. It is a tuple of whether the candidate left the race
            early, and its time.
            """
            timing = self.timings[index]
            return not timing.finished, timing.median * (1.0 if index else TIE)

        return sorted(self.timings, key=rank)


class _Search:
    """A search in progress. It holds the op, the candidates, the bench, the inputs, the time budget and the ranking so
    far.
    """

    def __init__(
        self, op: Op, candidates: Sequence[Candidate], bench: Bench, inputs: Inputs, seconds: float, report: Report
    ) -> None:
        """Start a search among ``candidates``, which ``bench`` verifies and times, with a budget of ``seconds``.
        ``report`` is called with the progress.
        """
        self.op, self.candidates, self.bench, self.inputs, self.report = op, candidates, bench, inputs, report
        self.began, self.seconds = monotonic(), seconds
        self.ends = self.began + seconds
        self.ranking = Ranking()
        self.verified: set[int] = set()

    @property
    def seconds_left(self) -> float:
        """The seconds until the budget of the search ends. The number is negative after its end."""
        return self.ends - monotonic()

    def verify(self, indices: Sequence[int]) -> list[int]:
        """Verify the candidates at ``indices`` and return the indices of those that are correct. The others are
        dropped. Once 60 % of the budget is spent, candidates with an index above 1 are skipped.
        """
        right = []
        self.bench.compile(indices)
        for step, index in enumerate(indices):
            if self.seconds_left <= (1 - SHARE) * self.seconds and index > 1:
                self.ranking.unseen += 1
                continue
            self.report(f"verify {candidate_label(self.candidates[index])}", step, len(indices))
            outcome = self.bench.verify(index)
            if outcome.ok:
                right.append(index)
                self.verified.add(index)
            else:
                self.drop(index, "tune.verify", outcome.problem, skipped=outcome.refused)
        return right

    def drop(self, index: int, check: str, why: str, *, skipped: bool = False) -> None:
        """Remove the candidate at ``index`` from the search. Record a finding of the check ``check`` with the reason
        ``why``.

        If ``skipped`` is true, the finding says that the candidate was left out, and there is no notice. Otherwise it
        says that the candidate failed, and the user gets a notice. The reference (index 0) never causes a notice.
        """
        fix = "" if skipped else "correct the kernel, or leave this config out"
        evidence = f"{candidate_label(self.candidates[index])}: {why}"
        if not skipped and index:
            notice(
                f"dropped {self.op.spec.name} {self.candidates[index].kernel}",
                f"{self.op.spec.name}: a candidate is not used: {evidence}",
            )
        self.ranking.dropped.add(index)
        # A candidate may be dropped after its race, when a confirmation rejects it.
        self.ranking.timings.pop(index, None)
        self.ranking.findings.append(
            Finding(check, "skip" if skipped else "fail", self.op.spec.name, evidence, str(self.inputs.recipe), fix)
        )

    def race(self, indices: Sequence[int], plan: RacePlan) -> None:
        """Measure the candidates at ``indices`` alternately and store their times in the ranking. Candidates that
        cannot be measured are dropped, with the reason. The race is planned for at most a third of the remaining time,
        or for 0.2 s if that is more.
        """
        self.report(f"race {len(indices)} candidates", 0, 1)
        # A race may take twice its time, and preparing the runs comes before it.
        timings, failed = self.bench.race(
            indices, replace(plan, seconds=max(0.2, min(plan.seconds, self.seconds_left / 3)))
        )
        self.ranking.timings.update(timings)
        for index, why in failed.items():
            self.drop(index, "tune.measure", why)


def search_candidates(
    op: Op,
    candidates: Sequence[Candidate],
    bench: Bench,
    inputs: Inputs,
    seconds: float,
    report: Report,
    plan: RacePlan,
) -> Ranking:
    """Verify, time and confirm ``candidates`` within about ``seconds``, and return their ranking. The first candidate
    must be the reference, and the second the declared default.
    """
    work = _Search(op, candidates, bench, inputs, seconds, report)
    try:
        ranking = _rank_candidates(work, plan)
        _confirm_winners(work, plan)
        return ranking
    finally:
        bench.quiet()


def _rank_candidates(work: _Search, plan: RacePlan) -> Ranking:
    """Verify and measure candidates, and return the ranking. If there are at most 32, all are measured. Otherwise those
    that ``_first_candidates`` returns are measured, and then those whose config differs from the best one's in one
    value.
    """
    candidates = work.candidates
    first = _first_candidates(candidates, work.inputs)
    right = work.verify(first)
    if len(right) > WHOLE // 2 and len(candidates) > WHOLE:
        right = _run_short_races(work, right, plan)
    if len(right) > 1:
        work.race(right, plan)
    elif right:
        # The only right candidate wins without a race.
        work.ranking.timings[right[0]] = Timing(0.0, 0.0, 0.0, 0, True)
    for _ in range(CLIMBS if len(candidates) > WHOLE else 0):
        if not _race_neighbours(work, plan):
            break
    seen = work.verified | work.ranking.dropped
    work.ranking.unseen = len(candidates) - len(seen)
    return work.ranking


def _confirm_winners(work: _Search, plan: RacePlan) -> None:
    """Check the time of the race's winner, and multiply the times of its kernel by the factor that the check measured.
    If the winner fails the check, drop it and continue with the next one. The reference (index 0) cannot fail.

    The fastest configs of other kernels near the winner are checked together with it, because the times of the race
    come from the candidates' own processes. After a winner that claimed too short a time, the remaining candidates race
    again, since that time may have ended the race for others too early.
    """
    ranking, confirmed, factors = work.ranking, set[int](), dict[str, float]()
    refuted = 0  # winners since the last race
    together = set[str]()  # kernels that were timed side by side
    while len(ranking.timings) > 1:
        # Beside a refuted winner others may have left the race early. They count again.
        best = min(ranking.timings, key=lambda i: ranking.timings[i].median) if refuted else ranking.order[0]
        if best in confirmed or (best == 0 and not confirmed):
            if refuted and work.seconds_left > 0:
                refuted, together = 0, set()
                _race_trusted_again(work, plan, factors)
                continue
            contender = _next_contender(work, best, factors)
            if contender < 0:
                return _compare_finalists(work, factors, together)
            near = [contender, *_nearby_kernels(work, contender, factors), best]
        else:
            near = [best, *_nearby_kernels(work, best, factors)]
        work.report(f"confirm {', '.join(candidate_label(work.candidates[i]) for i in near)}", 0, 1)
        claims = {i: ranking.timings[i].median for i in near}
        told = work.bench.confirm(claims, _seconds_to_examine(work), confirmed)
        together = {work.candidates[i].kernel for i in near}
        for index, belief in told.items():
            if belief.problem and index:  # the reference is right by definition, and slow at worst
                work.drop(index, "tune.confirm", belief.problem)
                refuted += 1
                continue
            refuted += bool(index) and index not in confirmed and belief.factor > FALSE
            confirmed.add(index)
            kernel = work.candidates[index].kernel
            factors[kernel] = factors.get(kernel, 1.0) * belief.factor
            for other in _timed_configs(work, kernel):
                _scale_timing(ranking, other, belief.factor)  # the error of its clock is the same for all configs


def _seconds_to_examine(work: _Search) -> float:
    """Return about how many seconds the confirmation of a candidate may take. It is a tenth of the budget, or the time
    that the search has taken so far if that is less. It is at least 0.5 s.
    """
    return max(0.5, min(0.1 * work.seconds, monotonic() - work.began))


def _nearby_kernels(work: _Search, best: int, factors: Mapping[str, float]) -> list[int]:
    """Return the indices of the fastest configs of other kernels whose time is at most 1.5 times that of the candidate
    at ``best``.

    There is one index for each kernel, and at most three. Kernels in ``factors`` are left out, since they are confirmed
    already.
    """
    timings, kernels = work.ranking.timings, {work.candidates[best].kernel, *factors}
    near: list[int] = []
    for index in work.ranking.order:
        kernel = work.candidates[index].kernel
        if kernel not in kernels and timings[index].median <= NEAR * timings[best].median:
            kernels.add(kernel)
            near.append(index)
    return near[:BESIDE]


def _race_trusted_again(work: _Search, plan: RacePlan, factors: Mapping[str, float]) -> None:
    """Race the measured candidates again, without those of kernels that a confirmation has shown to be much slower than
    they claim.

    ``factors`` maps each confirmed kernel to its measured time as a multiple of the claimed one. The new times are
    multiplied by these factors.
    """
    honest = [i for i in work.ranking.timings if factors.get(work.candidates[i].kernel, 1.0) <= FALSE]
    work.race(honest, plan)
    for index in honest:
        # The new times are those of the candidates' own clocks, which are off by the same factors.
        _scale_timing(work.ranking, index, factors.get(work.candidates[index].kernel, 1.0))


def _compare_finalists(work: _Search, factors: Mapping[str, float], together: Set[str]) -> None:
    """Measure the confirmed kernels that are nearly as fast as the best by one clock, and correct their times.

    Nothing is measured if all of them are in ``together``, the kernels that were timed side by side before. ``factors``
    maps each confirmed kernel to its measured time as a multiple of the claimed one.
    """
    ranking = work.ranking
    fastest = [min(of, key=lambda i: ranking.timings[i].median) for k in factors if (of := _timed_configs(work, k))]
    best = min((ranking.timings[i].median for i in fastest), default=0.0)
    near = [i for i in fastest if ranking.timings[i].median <= DUEL * best]
    if len(near) < 2 or {work.candidates[i].kernel for i in near} <= together:
        return
    work.report(f"compare {len(near)} candidates", 0, 1)
    times, failed = work.bench.duel(near, best, _seconds_to_examine(work))
    for index, why in failed.items():
        work.drop(index, "tune.confirm", why)
    for index, seconds in times.items():
        factor = seconds / max(ranking.timings[index].median, 1e-12)
        for other in _timed_configs(work, work.candidates[index].kernel):
            _scale_timing(ranking, other, factor)


def _timed_configs(work: _Search, kernel: str) -> list[int]:
    """Return the indices of the candidates of the kernel ``kernel`` that have a time in the ranking."""
    return [i for i in work.ranking.timings if work.candidates[i].kernel == kernel]


def _next_contender(work: _Search, best: int, factors: Mapping[str, float]) -> int:
    """Return the index of the fastest candidate of an unconfirmed kernel whose time is at most 1.5 times that of the
    confirmed candidate at ``best``. Return -1 if there is none.

    The keys of ``factors`` are the confirmed kernels. If there are none, the time does not matter.
    """
    timings = work.ranking.timings
    near = [i for i in work.ranking.order if work.candidates[i].kernel not in factors]
    near = [i for i in near if timings[i].median <= NEAR * timings[best].median] if factors else []
    return near[0] if near else -1


def _scale_timing(ranking: Ranking, index: int, factor: float) -> None:
    """Multiply the times of the candidate at ``index`` by ``factor``, the measured time as a multiple of the claimed
    one, and mark its timing as ``finished``. Do nothing if the candidate has no timing.
    """
    if (t := ranking.timings.get(index)) is not None:
        median, low, high = (value * factor for value in (t.median, t.low, t.high))
        ranking.timings[index] = replace(t, median=median, low=low, high=high, finished=True)


def _run_short_races(work: _Search, right: list[int], plan: RacePlan) -> list[int]:
    """Run short races of the candidates with the indices ``right``, and keep the faster half after each. Return the
    indices that are left.

    The races end when at most 8 candidates are left or the time is over. Their times are marked as unfinished, so they
    rank behind those of full races.
    """
    rounds = 2
    while len(right) > WHOLE // 4 and work.seconds_left > 0:
        work.race(right, replace(plan, rounds=rounds, least=1, hopeless=2.0))
        ranked = sorted((i for i in right if i in work.ranking.timings), key=lambda i: work.ranking.timings[i].median)
        kept = ranked[: max(2, len(ranked) // 2)]
        if len(kept) >= len(right):
            break
        right, rounds = kept, rounds * 2
    # Times of short races do not rank candidates: they only decide which of them continue.
    work.ranking.timings = {i: replace(t, finished=False) for i, t in work.ranking.timings.items()}
    return right


def _first_candidates(candidates: Sequence[Candidate], inputs: Inputs) -> list[int]:
    """Return the indices of the candidates to verify first.

    These are all candidates if there are at most 32. If there are more, they are the first config of each kernel and 32
    others. The others are the best by the kernels' own estimates, or evenly spaced ones if there are no estimates.
    """
    if len(candidates) <= WHOLE:
        return list(range(len(candidates)))
    kernels = [c.kernel for c in candidates]
    first = [i for i, name in enumerate(kernels) if kernels.index(name) == i]
    rest = [i for i in range(len(candidates)) if i not in first]
    scores = {i: _estimate_by_prior(candidates[i], inputs) for i in rest}
    if any(s is not None for s in scores.values()):
        best = sorted(rest, key=lambda i: (scores[i] is None, scores[i] or 0.0))[:WHOLE]
    else:
        # Without a prior, they are taken from the whole list at equal distances.
        best = list(dict.fromkeys(rest[i * len(rest) // WHOLE] for i in range(WHOLE)))
    return [*first, *best]


def _estimate_by_prior(candidate: Candidate, inputs: Inputs) -> float | None:
    """Return the candidate's own estimate of its time on ``inputs``, in an arbitrary unit. Return None if it has none
    or if the estimate raises an error.
    """
    try:
        estimated = candidate.estimate(dict(inputs.call.env))
        return None if estimated is None else float(estimated)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None


def _race_neighbours(work: _Search, plan: RacePlan) -> bool:
    """Verify the untested candidates whose config differs from the best candidate's in one value, and time them and the
    best candidate alternately. Return whether one of them was faster.
    """
    order = work.ranking.order
    if not order or work.seconds_left <= 0:
        return False
    best = order[0]
    seen = work.verified | work.ranking.dropped
    near = [i for i in range(len(work.candidates)) if i not in seen and _differ_in_one_value(work.candidates, i, best)]
    right = work.verify(near)
    if not right:
        return False
    work.race([best, *right], plan)
    return bool(work.ranking.order) and work.ranking.order[0] != best


def _differ_in_one_value(candidates: Sequence[Candidate], a: int, b: int) -> bool:
    """Return whether the candidates at the indices ``a`` and ``b`` have one kernel, with configs that differ in exactly
    one value.
    """
    x, y = candidates[a], candidates[b]
    mine, other = x.config.as_dict(), y.config.as_dict()
    return x.kernel == y.kernel and mine.keys() == other.keys() and sum(mine[n] != other[n] for n in mine) == 1
