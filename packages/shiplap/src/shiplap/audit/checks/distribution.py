"""``distribution``: random results have the distribution of the reference's, follow their seed alone, and leave other
generators alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, combinations, islice
from typing import Any

import torch
from torch import Tensor

from shiplap import torch_private
from shiplap.audit.check import Check, Observation
from shiplap.dispatch import Op
from shiplap.errors import error_line
from shiplap.sampling.case import SampleCase, arguments_by_name, tree_map
from shiplap.sampling.compare import bitwise_difference
from shiplap.sampling.distribution import RUNS, distribution_difference
from shiplap.sampling.run import call_op, op_effects, results_of, run_on
from shiplap.sampling.samples import Samples

DISTANCES, PAIRS = (3, 8, 16, 24, 29, 32, 48, 61), 4  # bits by which seeds differ, and how many pairs have to be equal
LARGEST_REPEATED = 1 << 15  # elements of a sample that is not repeated
# Kinds of values that random ops treat apart. NaN and infinite results have no distribution to compare.
COMPARED_VALUES = ("normal", "zeros", "large", "positive")


def why_skip_distribution(op: Op) -> str:
    """Return why the check ``distribution`` does not apply to the op, or an empty string if it does. It does not apply
    if the results are not declared to be random.
    """
    return "" if op.spec.random else "its results are not declared to be random"


def distribution_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``distribution`` calls the op.

    They are the base sample, and samples with other scalars, with up to four dtypes, without optional arguments, with
    some kinds of values, and with larger sizes.
    """
    kinds = (c for c in samples.values() if c.recipe.values in COMPARED_VALUES)
    yield from chain(samples.plain(), samples.scalars(), islice(samples.dtypes(), 4), samples.optionals(), kinds)
    yield from islice(samples.grown(2), 2)


def observe_distribution(op: Op, case: SampleCase) -> Observation:
    """Compare the distribution of the op's results over many seeds with that of the reference's. The returned
    observation has a problem if the distributions differ, or if equal seeds do not give equal results.
    """
    if case.numel > LARGEST_REPEATED:
        return Observation(skip="a sample too large to be repeated", limited=True)
    plain = case.recipe == Samples(op, case.seed, case.device).base
    if problem := _why_seed_not_followed(op, case) or (
        (_why_seed_bits_lost(op, case) or _why_compiled_differs_eager(op, case)) if plain else ""
    ):
        return Observation(problem)
    got = [_run_with_seed(op, case, run_on, k) for k in range(RUNS)]
    # Other seeds than the op's: equal seeds need not give equal numbers in two implementations.
    wanted = [_run_with_seed(op, case, _run_reference, RUNS + k) for k in range(RUNS)]
    for index, pair in enumerate(zip(zip(*got, strict=True), zip(*wanted, strict=True), strict=True)):
        one, other = pair if len({t.shape for ts in pair for t in ts}) == 1 else map(_sizes_as_tensors, pair)
        if problem := distribution_difference(list(one), list(other)):
            return Observation(f"result {index}: {problem}", fix="draw as the reference does")
    for first, second in combinations(range(len(got[0])), 2):
        mine, theirs = ([_product_of_magnitudes(run[first], run[second]) for run in runs] for runs in (got, wanted))
        if len({t.shape for t in (*mine, *theirs)}) == 1 and (problem := distribution_difference(mine, theirs)):
            return Observation(f"results {first} and {second}, multiplied: {problem}", fix="draw each number once")
    return Observation(note=f"{RUNS} seeds of each")


def _product_of_magnitudes(a: Tensor, b: Tensor) -> Tensor:
    """Return the elementwise product of the magnitudes of the results ``a`` and ``b`` in float64, or an empty tensor if
    their shapes differ. The product is large on average if both results use the same random numbers.
    """
    return a.abs().double() * b.abs().double() if a.shape == b.shape else torch.zeros(0, dtype=torch.float64)


def _sizes_as_tensors(runs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the shape of each tensor in ``runs`` as a float64 tensor. Shapes are compared instead of values if they
    are random.
    """
    return tuple(torch.tensor(list(t.shape), dtype=torch.float64) for t in runs)


def _run_reference(op: Op, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Call the reference on ``args``, without copying them. Return its results, followed by the arguments that it
    mutates.
    """
    return op_effects(op, args, results_of(op, op.reference, args))


def _seeded_arguments(op: Op, case: SampleCase, seed: int) -> tuple[Any, ...]:
    """Return new copies of the sample's arguments, among which the argument that seeds the op gets a seed made from the
    number ``seed``. Torch's own generator is seeded as well.
    """
    args = case.fresh()
    # An op that draws from torch's generator gets another state with each seed as well.
    torch.manual_seed(seed + 1000)

    def seeded(name: str, value: Any) -> Any:
        """Return the new seed as the type of ``value`` (int, tensor or generator) if ``name`` is the argument that
        seeds the op. Return ``value`` unchanged for another argument, or if it is None.
        """
        if name != op.spec.random or value is None:
            return value
        if isinstance(value, torch.Generator):
            return torch.Generator(value.device).manual_seed(seed + 1)
        return value.fill_(seed + 1) if isinstance(value, Tensor) else seed + 1

    return tuple(seeded(n, v) for n, v in arguments_by_name(op, args).items())


def _run_with_seed(op: Op, case: SampleCase, run: Callable[..., tuple[Tensor, ...]], seed: int) -> tuple[Tensor, ...]:
    """Return copies of the results of ``run(op, args)`` as a tuple. ``args`` are the sample's arguments, seeded with
    the number ``seed``.
    """
    with torch.no_grad():
        return tree_map(torch.clone, run(op, _seeded_arguments(op, case, seed)))


def _draws_globally(op: Op, args: tuple[Any, ...]) -> bool:
    """Return whether a call of the op on ``args`` draws from torch's own generator. It does if the op is declared so,
    or if the argument that seeds it is None.
    """
    return arguments_by_name(op, args).get(op.spec.random) is None


def _generator_state(device: str) -> Tensor:
    """Return the state of torch's own generator. It is that of the current CUDA device if ``device`` is one of CUDA,
    and otherwise that of the CPU.
    """
    return torch.cuda.get_rng_state() if device.startswith("cuda") else torch.get_rng_state()


def _why_seed_not_followed(op: Op, case: SampleCase) -> str:
    """Return a message that says how the op fails to follow its seed, or an empty string if it follows it.

    Equal seeds must give equal bits. The op must not seed torch's own generator. If it is given a seed, it must not
    draw from that generator either.
    """
    first = _run_with_seed(op, case, run_on, 0)
    if problem := bitwise_difference(_run_with_seed(op, case, run_on, 0), first, "the first time"):
        return f"the same seed again: {problem}"
    args = _seeded_arguments(op, case, 0)
    before = _generator_state(case.device)
    with torch.no_grad():
        call_op(op, args)
    after = _generator_state(case.device)
    # An op that leaves torch's generator alone cannot have seeded it.
    if torch.equal(before, after):
        return ""
    if not _draws_globally(op, args):
        return "it draws from torch's own generator, or seeds it, though it is given a seed"
    # Another seed before: equal states afterwards can only come from a seed that the op sets.
    args = _seeded_arguments(op, case, 1)
    with torch.no_grad():
        call_op(op, args)
    return "it seeds torch's own generator" if torch.equal(_generator_state(case.device), after) else ""


def _why_seed_bits_lost(op: Op, case: SampleCase) -> str:
    """Return a message that names two seeds, a power of two apart, for which the op draws the same numbers but the
    reference does not. Return an empty string if none are found.
    """
    given = arguments_by_name(op, case.args).get(op.spec.random)
    limit = (
        torch.iinfo(given.dtype).max if isinstance(given, Tensor) else 1 << 63
    )  # a generator and an integer have 64 bits

    def same(run: Callable[..., tuple[Tensor, ...]], bits: int) -> bool:
        """Return whether ``run`` gives equal bits for both seeds of each of a few pairs. The seeds of a pair are ``1 <<
        bits`` apart.
        """
        return all(
            not bitwise_difference(_run_with_seed(op, case, run, s + (1 << bits)), _run_with_seed(op, case, run, s))
            for s in range(PAIRS)
        )

    # Narrow seeds cannot be that far apart.
    for bits in (b for b in DISTANCES if 2 << b < limit):
        if same(run_on, bits) and not same(_run_reference, bits):
            return f"seeds that are {1 << bits} apart draw the same numbers: the seed loses its upper bits"
    return ""


def _why_compiled_differs_eager(op: Op, case: SampleCase) -> str:
    """Return a message that says how the random numbers of two calls in one compiled graph differ from those of two
    eager calls, or how compilation fails. Return an empty string if the numbers agree.
    """

    def program(*args: Any) -> tuple[Tensor, ...]:
        """Return the results of two calls of the op in one tuple."""
        return (*run_on(op, args), *run_on(op, args))

    torch_private.reset_compiler()
    generators = any(isinstance(v, torch.Generator) for v in case.args)  # at which Dynamo breaks a graph
    with torch.no_grad(), torch_private.data_dependent_sizes():
        wanted = program(*_seeded_arguments(op, case, 0))
        try:
            compiled = torch.compile(program, backend="aot_eager", fullgraph=not generators)
            got = compiled(*_seeded_arguments(op, case, 0))
        except Exception as e:
            return f"compiled: raised {error_line(e)}"
    problem = bitwise_difference(got, wanted, "eager")
    return f"compiled, for the same seed: {problem}" if problem else ""


CHECK = Check(
    "distribution",
    order=75,
    observes="random results: equal bits for equal seeds, eager and compiled; torch's own generator is left alone or "
    f"drawn from, never seeded; over {RUNS} seeds the same distribution as the reference's",
    observe=observe_distribution,
    cases=distribution_cases,
    obligations=("value", "determinism"),
    varies=("seed",),
    skips=why_skip_distribution,
    needs=("numerics", "determinism"),
    fix="draw from the declared seed alone",
    patience=120.0,
    quiet=120.0,  # it compiles, as the check `compile` does
)
