"""A winner of a race, once more: on values that nobody knew, by the clock of this process, and on other inputs.

In a race the same call runs again and again, by the clock of the process that runs it. What wins by that alone,
because it remembers, looks where it is or changes the clock, is refused here, or gets the time that it really takes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor

from shiplap.errors import ShiplapError
from shiplap.op import Op
from shiplap.referee.batch import Batch, Unsupported
from shiplap.referee.case import Case
from shiplap.referee.compare import close, reduction
from shiplap.referee.nudge import nudged
from shiplap.referee.process import Took
from shiplap.referee.recipe import Recipe
from shiplap.referee.run import reference, reference64, tensors
from shiplap.referee.samples import Samples
from shiplap.referee.sizes import EDGES, free_dims
from shiplap.referee.values import KINDS
from shiplap.referee.witness import Expected, Wrong
from shiplap.selection.bench import Belief
from shiplap.selection.candidate import Candidate
from shiplap.selection.hosts import Hosts, Unhosted
from shiplap.selection.inputs import Inputs, given_ones

__all__ = ["Confirmation", "Spells", "expected_of"]

ROUNDS, ATTEMPTS = 3, 3
PATIENCE = 4  # times as many rounds on a busy machine
MOST, ROOM, LONG = 24, 32 << 20, 2e-3  # calls of a batch, bytes of their arguments, seconds that they should take
TIMES, SLACK, COLD = 4.0, 10e-6, 10e9  # of the claim; seconds; bytes in a second of arguments that are in no cache
LEAST = 200e-9  # seconds: no call from Python takes less
MANY, OTHERS, SMALL = 96, 24, 300  # calls of a small size; other inputs, and how large one of their sizes may be


class Asked(Protocol):
    """The bench of the candidates: their processes, and the inputs."""

    op: Op
    inputs: Inputs
    candidates: Sequence[Candidate]
    hosts: Hosts

    def batch(self, index: int, sets: Sequence[Sequence[Any]], poison: int | None = None) -> Batch:
        """Calls of a candidate, ready in its process; index -1 computes nothing."""
        ...

    def ended(self, index: int, e: Exception) -> str:
        """The evidence of an exception; a process that has ended is given up."""
        ...


def expected_of(op: Op, case: Case) -> Expected:
    """The effects of the reference on ``case``, as a process is compared with them."""
    with torch.no_grad():
        own, wide = reference(op, case.args), reference64(op, case.args)
    sums = reduction(op.spec, case.env)
    flat = tensors(case.args)
    written = [t for a, v in zip(op.spec.args, case.args, strict=True) if a.mutated for t in tensors([v])]
    changed = tuple(i for i, t in enumerate(flat) if any(t is w for w in written))

    def against(got: Sequence[Tensor]) -> Any:
        return close(got, own, wide, sums, wide_sums=True)

    return Expected(own, against, changed, aliased=True)


class Spells:
    """Times of candidates on new values, by the clock of this process, side by side.

    ``claimed``: about the seconds of one call, from which the number of calls of a batch follows.
    """

    def __init__(self, bench: Asked, indices: Sequence[int], claimed: float) -> None:
        self.bench, self.indices = bench, indices
        self.op, self.inputs = bench.op, bench.inputs
        size = sum(t.numel() * t.itemsize for t in tensors(self.inputs.real[0].args))
        self.kindest: dict[int, float] = {}  # seconds of one call less those in which it waited for a processor
        self._count = max(1, min(MOST, int(LONG / max(claimed, 1e-9)), ROOM // max(1, size)))

    def drawn(self, count: int) -> list[Case]:
        """Arguments at the sizes of the call, with values of a new secret seed."""
        samples = (Samples(self.op, secrets.randbits(40), self.inputs.device) for _ in range(count))
        return [s.build(self.inputs.recipe) for s in samples]

    def measure(self, rounds: int, seconds: float) -> dict[int, float | str]:
        """Seconds of one call of each candidate, or what is wrong with it.

        The least time counts, less the least time of a batch that computes nothing: load can only add to either. On a
        busy machine there are more rounds, until each had a processor for the whole of one or ``seconds`` have passed.
        """
        ends = monotonic() + seconds
        took: dict[int, list[Took]] = {i: [] for i in (-1, *self.indices)}
        for number in range(PATIENCE * rounds):
            undisturbed = all(any(t.undisturbed for t in each) for each in took.values())
            if number >= rounds and (undisturbed or monotonic() > ends):
                break
            with ExitStack() as stack:
                known, values = self._values()
                batches = {}
                for index in took:
                    try:
                        batches[index] = stack.enter_context(self.bench.batch(index, known))
                    except (Wrong, Unsupported, Unhosted) as e:
                        return {index: self._why(index, e)}
                for cases in values:
                    expected = [expected_of(self.op, case) for case in cases] if any(self.indices) else []
                    for index, batch in batches.items():
                        try:
                            took[index].append(self._go(index, batch, cases, expected))
                        except Wrong as e:
                            return {index: self._why(index, e)}
        empty = min(t.wall for t in took.pop(-1))
        self.kindest = {i: (min(t.quiet for t in each) - empty) / self._count for i, each in took.items()}
        return {i: max(0.0, min(t.wall for t in each) - empty) / self._count for i, each in took.items()}

    def _why(self, index: int, e: Exception) -> str:
        why = self.bench.ended(index, e)
        return f"{why} ({e.check}) on new values" if isinstance(e, Wrong) else why

    def _go(self, index: int, batch: Batch, cases: list[Case], expected: list[Expected]) -> Took:
        prisoner = batch.witness.prisoner
        prisoner.sweep()
        batch.fill([c.args for c in cases])
        prisoner.alone = True
        try:
            return batch.go(expected if index > 0 else None).took
        finally:
            prisoner.alone = False

    def _values(self) -> tuple[list[Any], list[list[Case]]]:
        """Arguments to make calls ready with, and the values on which they then run, one list after another."""
        known = self.drawn(self._count)
        first = self.drawn(self._count) if self.op.sampler is None else known  # a builder's values may decide on sizes
        near = [replace(c, args=nudged(c.args)) for c in first]
        return [c.args for c in known], [first, near] if self.op.sampler is None else [near]


class Confirmation:
    """What is looked at before candidate ``index``, which claims ``claimed`` seconds, may be chosen.

    ``seconds`` is when no further input is tried, and how long a busy machine is waited for.
    """

    def __init__(self, bench: Asked, index: int, claimed: float, seconds: float) -> None:
        self.bench, self.index, self.claimed, self.seconds = bench, index, claimed, seconds
        self.ends = monotonic() + seconds
        self.op, self.inputs = bench.op, bench.inputs
        self.spells = Spells(bench, [index], claimed)

    def belief(self) -> Belief:
        """The verdict: a problem, or how many times the claim it takes."""
        try:
            if self.index:
                self._in_place()
                self._many()
                self._others()
            belief = self._timed()
            if self.index:
                self.bench.hosts.of(self.bench.candidates[self.index].kernel).intact()
            return belief
        except Unsupported as e:
            return Belief(f"does not serve other values of this size: {e}")
        except Wrong as e:
            self.bench.ended(self.index, e)
            return Belief(f"{e.evidence} ({e.check}) on new values")
        except Unhosted as e:
            return Belief(str(e))

    def _timed(self) -> Belief:
        """Compare the claim with the least time by this process's clock, as load on the machine can only add to it.

        A claim is refused only if the time is too long without what load can explain, and nothing else is believed.
        """
        size = sum(t.numel() * t.itemsize for t in tensors(self.inputs.real[0].args))
        if self.index and self.claimed < LEAST:
            return Belief(f"won with {self.claimed * 1e9:.3g} ns, which no call takes")
        least = kindest = float("inf")
        for _ in range(ATTEMPTS if self.index else 1):
            times = self.spells.measure(ROUNDS, self.seconds)
            told = times[self.index if self.index in times else -1]
            if isinstance(told, str):
                return Belief(told)
            least, kindest = min(least, told), min(kindest, self.spells.kindest[self.index])
            if not self.index or kindest <= TIMES * self.claimed + SLACK + size / COLD:
                return Belief(factor=least / max(self.claimed, 1e-9))
        return Belief(f"won with {self.claimed * 1e6:.3g} us, and takes {kindest * 1e6:.3g} us on new values")

    def _in_place(self) -> None:
        """One call on the same tensors again and again, with other values each time: memories are wrong then."""
        known, drawn = self.spells.drawn(2)
        first = drawn if self.op.sampler is None else known
        with self.bench.batch(self.index, [known.args]) as batch:
            for case in (known, first, replace(first, args=nudged(first.args))):
                batch.fill([case.args])
                batch.go([expected_of(self.op, case)])

    def _many(self) -> None:
        """What a candidate does after some calls, on the smallest size that is at hand."""
        if (small := self.inputs.small) is None or self.bench.candidates[self.index].fixed:
            return
        for _ in range(MANY // MOST):
            cases = [Samples(self.op, secrets.randbits(40), "cpu").build(small.recipe) for _ in range(MOST)]
            try:
                with self.bench.batch(self.index, [c.args for c in cases]) as batch:
                    batch.go([expected_of(self.op, case) for case in cases])
            except Unsupported:
                return
            if monotonic() > self.ends:
                return

    def _others(self) -> None:
        """Sizes beside those of the call, and other kinds of values; a candidate may decline them."""
        if self.bench.candidates[self.index].fixed:
            return
        for case in self._cases():
            try:
                expected = [expected_of(self.op, case)]
            except (RuntimeError, ShiplapError):
                continue
            try:
                with self.bench.batch(self.index, [case.args]) as batch:
                    batch.go(expected)
            except Unsupported:
                continue
            except Wrong as e:
                if e.check == "raised":  # it says aloud that it does not serve a size that the choice is not for
                    continue
                raise Wrong(e.check, f"{e.evidence} on {case.label}") from None
            if monotonic() > self.ends:
                return

    def _cases(self) -> Iterator[Case]:
        samples = Samples(self.op, secrets.randbits(40), self.inputs.device)
        for recipe in (*self._small(samples), *self._near()):
            if case := samples.make(recipe):
                yield case

    def _near(self) -> list[Recipe]:
        """Each size of the call a little smaller and larger."""
        recipe = self.inputs.recipe
        sizes = [(n, v) for n, v in recipe.sizes if type(v) is int and v > 2]
        changed = [(n, v + by) for n, v in sizes for by in (-1, 1 + secrets.randbelow(7))]
        secrets.SystemRandom().shuffle(changed)
        return [recipe.but(sizes={n: v}) for n, v in changed]

    def _small(self, samples: Samples) -> list[Recipe]:
        """Small sizes around edges, tiles and numbers in the kernel's own code, and every kind of values, mixed."""
        recipe, base = self.inputs.recipe, samples.base
        same: dict[str, Any] = {"dtypes": dict(recipe.dtypes), "absent": recipe.absent, "layouts": dict(recipe.layouts)}
        near = {v + by for v in (*samples.mined.ints, 16, 64, 128) if 2 < v < SMALL for by in (-1, 0, 1)}
        sizes = [*EDGES[1:], *near, *(secrets.randbelow(SMALL) for _ in range(8))]
        names = [n for n, kind in free_dims(self.op.spec).items() if kind != "variadic"]
        scalars = dict(recipe.scalars)
        plain = base.but(sizes=given_ones(self.op.spec, recipe), scalars=scalars, **same)
        listed = [plain.but(sizes={n: size}) for n in names for size in dict.fromkeys(sizes)]
        listed = secrets.SystemRandom().sample(listed, min(OTHERS, len(listed)))
        return [*(plain.but(values=kind) for kind in KINDS), *listed]
