"""``edges``: empty, single and just-around-a-tile sizes, and every memory layout, give the values of plain input."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from shiplap.audit.check import Check, Observation
from shiplap.audit.reference_errors import observe_reference_error
from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.pairwise import layouts_of_dtypes, layouts_of_ones
from shiplap.sampling.run import reference_effects
from shiplap.sampling.samples import Samples


def edges_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``edges`` calls the op.

    Samples with sizes of 0, of 1 and near powers of two come first. Samples in all layouts follow, with the base sizes,
    with larger ones, with several dims in the place of a variadic one, with single elements and with other dtypes.
    """
    others = chain(islice(samples.grown(1), 1), islice(samples.ranks(), 1))
    laid_out = chain.from_iterable(samples.layouts(c.recipe) for c in others)
    yield from chain(samples.edges(), samples.layouts(), laid_out, layouts_of_ones(samples), layouts_of_dtypes(samples))


def observe_edges(op: Op, case: SampleCase) -> Observation:
    """Compare the op's results on one sample with the reference's. The returned observation has a problem if they
    differ or if the reference raises an error.
    """
    try:
        own = reference_effects(op, case.args)
    except Exception as e:
        return observe_reference_error(op, case, e)
    difference = against_reference(op, case, own=own)
    return Observation(difference.problem, error=difference.error)


CHECK = Check(
    "edges",
    order=30,
    observes="0, 1, 15, 16, 17, 31, 33 in every dim, and offset, padded, strided, transposed, reversed and expanded "
    "inputs give the reference's values",
    observe=observe_edges,
    cases=edges_cases,
    fix="return early for empty input, mask the tail of the last tile, and use the strides (or contiguous=(...))",
)
