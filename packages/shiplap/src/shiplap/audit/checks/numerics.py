"""``numerics``: the kernel computes the results of the reference, which is evaluated in float64."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from shiplap.audit.check import Check, Observation
from shiplap.dispatch import Op
from shiplap.sampling.argument_effects import revealing_samples
from shiplap.sampling.case import SampleCase
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.pairwise import pairs_of_scalars, scalars_of_sizes, scalars_of_ties
from shiplap.sampling.run import reference_effects
from shiplap.sampling.samples import Samples, with_other_values


def numerics_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``numerics`` calls the op. They are samples with each kind of values, with
    other dtypes, without optional arguments, with other scalars, and with larger sizes. Samples for arguments
    that have changed no result yet come last.
    """
    big = list(islice(samples.grown(2), 2))
    usual = chain(samples.values(), samples.dtypes(), samples.optionals(), samples.scalars(), big)
    combined = chain(pairs_of_scalars(samples), scalars_of_sizes(samples), scalars_of_ties(samples))
    known: list[SampleCase] = []
    for case in chain(usual, combined, (with_other_values(samples.op, c) for c in big)):
        known.append(case)
        yield case
    yield from revealing_samples(samples, known)


def observe_numerics(op: Op, case: SampleCase) -> Observation:
    """Compare the op's results on one sample with the reference's. The returned observation has a problem if they
    differ by more than rounding.
    """
    difference = against_reference(op, case, own=reference_effects(op, case.args))
    return Observation(difference.problem, error=difference.error)


CHECK = Check(
    "numerics",
    order=20,
    observes="equals the reference in float64 within eps * (4 + 2 sqrt(terms)); integers, NaN and inf exactly",
    observe=observe_numerics,
    cases=numerics_cases,
    fix="correct the kernel: the reference defines the right result",
)
