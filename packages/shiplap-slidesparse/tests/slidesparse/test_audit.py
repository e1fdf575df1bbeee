"""Every op passes its audit: all of it for the two that have every kind of argument, less for the others.

All but what compiles graphs, and the hundreds of sizes of ``sizes`` and ``kernels``, for one op of each kind;
values and arguments for those that are the same code and the same dims (of which fakes are made) with another dtype.
``nox -s audits`` (``SHIPLAP_TEST_AUDITS=all``) is all of it for all, and takes minutes: before a release.
"""

from __future__ import annotations

import importlib
import os

import pytest

import shiplap as sl
from shiplap_slidesparse import layers, ops
from shiplap_testing.effort import sampled

NAMED = {name: op for module in (ops, layers) for name, op in vars(module).items() if isinstance(op, sl.Op)}
OPS = [op for name, op in NAMED.items() if not name.startswith("_")]
ALL = os.environ.get("SHIPLAP_TEST_AUDITS") == "all"
WHOLE = OPS if ALL else [ops.quantise_fp8, layers.linear_int8]
TWINS = [
    ops.quantise_int8,
    ops.mm_fp8,
    ops.sparse_mm_fp16,
    ops.sparse_mm_bf16,
    layers.linear_fp16,
    layers.linear_fp8,
    layers.experts_fp8,
]
COMPILES = {"compile", "opcheck", "requires_grad"}
LONG = {"sizes", "kernels"}
VALUES = {"numerics", "edges", "schema", "arguments", "stateless"}


def checks_of(op: sl.Op) -> list[str]:
    checks = importlib.import_module("shiplap.audit").CHECKS
    if op in WHOLE:
        return [c for c in checks if ALL or c not in LONG]
    return [c for c in checks if (c in VALUES if op in TWINS else c not in COMPILES | LONG)]


SLOW = ("linear_int8", "linear_bf16", "lift", "quantise_fp8", "sparse_mm_int8", "sparse_mm_fp16")


@pytest.mark.parametrize(
    "op",
    sampled(OPS, 1, long=SLOW, name=lambda op: op.spec.opname),
    ids=lambda op: op.spec.opname,
)
def test_an_op_passes_its_audit(op: sl.Op) -> None:
    report = sl.audit(op, checks=checks_of(op), budget=300)
    assert report.proven, str(report)
    assert sum(f.verdict == "ok" for f in report) >= (15 if op in WHOLE else len(VALUES) - 1 if op in TWINS else 12)


def test_the_samples_are_not_empty() -> None:
    """An argument ``n`` in whole tiles was once drawn as 0: an audit of nothing passes."""
    verify = importlib.import_module("shiplap.sampling.samples")
    for op in OPS:
        case = verify.Samples(op, 0).build(verify.Samples(op, 0).base)
        assert all(size > 0 for name, size in case.env.items() if isinstance(size, int) and name != "layout")
