"""``bound``: a data-dependent size stays within the declared bound, and within the range of the fake."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

import torch

from shiplap import torch_private
from shiplap.audit.check import Check, Observation
from shiplap.dispatch import Op
from shiplap.sampling.case import Case, tree_map
from shiplap.sampling.run import call, outputs, split
from shiplap.sampling.samples import Samples, other


def skips(op: Op) -> str:
    """Return the reason why the check does not apply to an op, empty where it does."""
    return "" if op.spec.bounds else "no output size depends on data"


def cases(samples: Samples) -> Iterable[Case]:
    """Yield samples of all kinds of values, twice each, and larger, edge and scalar samples."""
    more = [other(samples.op, c) for c in samples.values()]
    yield from chain(samples.values(), more, islice(samples.grown(2), 2), samples.edges(), samples.scalars())


def observe(op: Op, case: Case) -> Observation:
    """Compare the sizes of the results with the bound and with the range of the fake."""
    outs = call(op, case.fresh())
    promised = _promised(op, case)
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


def _promised(op: Op, case: Case) -> list[list[tuple[float, float]]]:
    """Return for each dim of each output the range that the fake gave it."""
    inputs = case.fresh()
    with torch.no_grad(), torch_private.fake_mode(symbolic=True) as mode:
        fakes = tree_map(lambda t: torch_private.fakify(mode, t, dynamic=False), inputs)
        positional, named = split(op.spec, fakes)
        outs = outputs(op.overload(*positional, **named))
        return [[torch_private.size_range(s) for s in out.shape] for out in outs]


CHECK = Check(
    "bound",
    order=10,
    observes="observed sizes are within the declared bound and the fake's range",
    observe=observe,
    cases=cases,
    fix="correct bounds= (the largest size over all inputs), or the kernel",
    skips=skips,
    error="at most {:.0%} of the bound used",
)
