"""``opcheck``: torch's own test of a registration, on generated samples."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

import torch

from shiplap.audit.check import Check, Observation
from shiplap.dispatch import Op
from shiplap.errors import error_line
from shiplap.sampling.case import SampleCase, is_float8, tensors_among, tree_map
from shiplap.sampling.run import all_finite, reference_effects, why_no_backward
from shiplap.sampling.samples import Samples
from shiplap.torch_private.symbolic_sizes import unknown_size_error

OPCHECK_TESTS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)  # all it has
DATA_FIX = (
    "compute sizes and slices at the line under 'evidence' without the values of tensors, which no graph knows: in "
    "place of x[first:last] with numbers out of a tensor, take all rows, and set those outside to zero with torch.where"
)


def opcheck_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``opcheck`` calls the op.

    They are the base sample, samples with transposed tensors, samples without optional arguments, and a larger one. If
    the reference returns infinity or NaN for a sample, a sample with positive values takes its place.
    """
    transposed = (c for c in samples.layouts() if dict(c.recipe.layouts).get("every") == "transposed")
    for case in chain(samples.plain(), transposed, samples.optionals(), islice(samples.grown(1), 1)):
        positive = (
            None
            if all_finite(reference_effects(samples.op, case.args))
            else samples.make(case.recipe.but(values="positive"))
        )
        yield positive or case


def observe_opcheck(op: Op, case: SampleCase) -> Observation:
    """Run ``torch.library.opcheck`` on one sample. The returned observation has the first failed test as its
    problem.
    """
    args = case.fresh()
    if not why_no_backward(op, case):
        args = tree_map(lambda t: t.requires_grad_() if t.is_floating_point() else t, args)
    positional, named = op.spec.split(args)
    narrow = any(is_float8(t) for t in tensors_among(args))
    note = "test_schema left out: it compares arguments, which torch cannot do with float8" if narrow else ""
    tests: tuple[str, ...] = OPCHECK_TESTS[1:] if narrow else OPCHECK_TESTS
    if not all_finite(reference_effects(op, case.args)):  # torch's test compares NaN with NaN
        tests, note = tests[:-1], "test_aot_dispatch_dynamic left out: it takes NaN for a difference"
    results = torch.library.opcheck(op.overload, positional, named, test_utils=tests, raise_exception=False)
    failed: list[tuple[str, Any]] = [(test, e) for test, e in results.items() if e != "SUCCESS"]
    if not failed:
        return Observation(note=note)
    test, problem = failed[0]
    fix = DATA_FIX if isinstance(problem, unknown_size_error()) else ""
    return Observation(f"{test}: {error_line(problem)}", note=note, fix=fix)


CHECK = Check(
    "opcheck",
    order=230,
    observes="torch.library.opcheck passes: schema, autograd registration, fake tensor, AOT dispatch",
    observe=observe_opcheck,
    cases=opcheck_cases,
    obligations=("fake",),
    needs=("determinism",),
    patience=120.0,
    quiet=120.0,
    fix="see the message; torch.library.opcheck(op, args) alone fails the same way",
)
