"""Every shipped op passes its audit, on a fresh seed, within a minute; all of them together are one compiled graph.

``nox -s audits`` (``SHIPLAP_TEST_AUDITS=all``) runs every check, within five minutes an op: several hundred sizes, each
kernel in each config.
"""

from __future__ import annotations

import os

import pytest
import torch

import shiplap as sl
from shiplap import torch_private
from shiplap.audit import CHECKS
from shiplap.sampling.compare import Reduction, compare_within_tolerance
from shiplap.sampling.run import call_op, op_effects
from shiplap.sampling.samples import Samples
from shiplap_sparse3d import (
    bounded,
    grid_sample,
    hashing,
    norms,
    offsets,
    ops,
    planning,
    pooling,
    postprocess,
    rows,
    serialize,
)
from shiplap_testing.effort import sampled

MODULES = (bounded, grid_sample, hashing, norms, offsets, ops, planning, pooling, postprocess, rows, serialize)
ALL = os.environ.get("SHIPLAP_TEST_AUDITS") == "all"
LONG = {"sizes", "kernels"}
OPS = [value for module in MODULES for name in module.__all__ if isinstance(value := vars(module)[name], sl.Op)]


def opname(op: sl.Op) -> str:
    return op.spec.opname


def worked() -> float:
    """Seconds of this process and its children: other work on the machine does not count."""
    return sum(os.times()[:4])


@pytest.mark.parametrize(
    "op", sampled(OPS, long=[n for op in OPS if (n := opname(op)) != "tap_blocks"], name=opname), ids=opname
)
def test_a_shipped_op_passes_its_audit(op):
    """All checks but those that compile it again and again, of which torch's own one is for ops with a gradient."""
    began = worked()
    left_out = set() if ALL else {"compile", *LONG} if op.gradient is not None else {"compile", "opcheck", *LONG}
    left_out |= {"kernels"} if op.kernels and not op.kernels.get("cpu") else set()  # those for a GPU do not run here
    report = sl.audit(op, checks=[c for c in CHECKS if c not in left_out], budget=600)
    assert report.proven, str(report)
    assert sum(f.verdict == "ok" for f in report) >= 10
    assert worked() - began < (300 if ALL else 60)


@pytest.mark.long
def test_all_ops_are_one_graph_for_all_sizes():
    """With a pointwise neighbour on each result, it gives what eager calls give."""
    samples = [Samples(op, torch.seed() % 2**31) for op in OPS]

    def program(*args):
        results = (t for op, a in zip(OPS, args, strict=True) for t in op_effects(op, a, call_op(op, a)))
        return [t * 2 if t.is_floating_point() else t for t in results]

    torch_private.reset_compiler()
    with torch_private.data_dependent_sizes():
        compiled = torch.compile(program, fullgraph=True, dynamic=True)
        for case in zip(*(s.grown(2) for s in samples), strict=True):
            got, want = (tuple(f(*(c.fresh() for c in case))) for f in (compiled, program))
            assert compare_within_tolerance(got, want, want, Reduction(64)).problem == "", [c.label for c in case]
    assert torch_private.compile_counts().recompiles <= 1
    torch_private.reset_compiler()
