"""``bound``: a data-dependent size stays within the declared bound, and within the range of the fake."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

import torch

from shiplap import torch_private
from shiplap.audit.check import Check, Observation
from shiplap.dispatch import Op
from shiplap.dispatch.outputs import flatten_op_results
from shiplap.sampling.case import SampleCase, tree_map
from shiplap.sampling.run import call_op
from shiplap.sampling.samples import Samples, with_other_values


def why_skip_bound(op: Op) -> str:
    """Return why the check ``bound`` does not apply to the op, or an empty string if it does. It does not apply if no
    output size depends on data.
    """
    return "" if op.spec.bounds else "no output size depends on data"


def bound_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``bound`` calls the op.

    They are two samples for each kind of values, samples with larger sizes, samples with sizes of 0, of 1 and near
    powers of two, and samples with other scalars.
    """
    more = [with_other_values(samples.op, c) for c in samples.values()]
    yield from chain(samples.values(), more, islice(samples.grown(2), 2), samples.edges(), samples.scalars())


def observe_bound(op: Op, case: SampleCase) -> Observation:
    """Compare the data-dependent sizes of the results with the declared bounds and with the ranges that the fake
    implementation promised.

    The returned observation has a problem if a size is outside of either. Otherwise its ``error`` is the largest
    fraction of a bound that a size reached.
    """
    outs = call_op(op, case.fresh())
    promised = _ranges_of_fake(op, case)
    env, fullest = dict(case.env), 0.0
    for index, (out, declared) in enumerate(zip(outs, op.spec.outputs, strict=True)):
        for axis, dim in enumerate(declared.tensor.dims):
            if dim.text not in op.spec.dynamic:
                continue
            size, bound = out.shape[axis], op.spec.dynamic[dim.text](env)
            low, high = promised[index][axis]
            if not 0 <= size <= bound:
                return Observation(f"{dim.text} = {size}, bound {op.spec.dynamic[dim.text]} = {bound}")
            if not low <= size <= high:
                return Observation(
                    f"{dim.text} = {size}, the fake promised {low} <= {dim.text} <= {high}",
                    fix="give new_dynamic_size the true min and max, or none",
                )
            # The report shows how tight the bound is: one that is never approached wastes memory.
            fullest = max(fullest, size / bound if bound else 0.0)
    return Observation(error=fullest)


def _ranges_of_fake(op: Op, case: SampleCase) -> list[list[tuple[float, float]]]:
    """Return, for each output, a list with the range ``(low, high)`` of sizes that the fake implementation promises for
    each dim.
    """
    inputs = case.fresh()
    with torch.no_grad(), torch_private.fake_mode(symbolic=True) as mode:
        fakes = tree_map(lambda t: torch_private.make_fake_tensor(mode, t, dynamic=False), inputs)
        positional, named = op.spec.split(fakes)
        outs = flatten_op_results(op.overload(*positional, **named))
        return [[torch_private.size_range(s) for s in out.shape] for out in outs]


CHECK = Check(
    "bound",
    order=10,
    observes="observed sizes are within the declared bound and the fake's range",
    observe=observe_bound,
    cases=bound_cases,
    fix="correct bounds= (the largest size over all inputs), or the kernel",
    skips=why_skip_bound,
    error="at most {:.0%} of the bound used",
)
