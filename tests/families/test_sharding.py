"""Sharding rules of the families' ops and of the eight kernels of the examples: which are proven, and for which there
are none.
"""

from __future__ import annotations

import json
import re
from importlib import import_module

import pytest

from shiplap.audit.check import AuditSubject
from shiplap.audit.checks.sharding import CHECK
from shiplap.dispatch import Op, registry
from shiplap.sampling.samples import Samples

# The dims along which an op may be cut; "declared" for rules that its author has declared.
PROVEN = {
    "dense::bmm": "batch m k n",
    "dense::conv2d": "batch ci co",
    "dense::grouped_mm": "k n",
    "dense::int8_mm": "m k n",
    "dense::mm": "m k n",
    "slidesparse::linear_bf16": "declared",
    "slidesparse::linear_fp16": "declared",
    "slidesparse::linear_fp8": "declared",
    "slidesparse::linear_int8": "declared",
    "slidesparse::mm_fp8": "m k n",
    "slidesparse::mm_int8": "m k n",
    "slidesparse::sparse_mm_bf16": "m",
    "slidesparse::sparse_mm_fp16": "m",
    "slidesparse::sparse_mm_fp8": "m",
    "slidesparse::sparse_mm_int8": "m",
    "sparse3d::conv": "co k m",
    "sparse3d::conv_table": "m",
    "sparse3d::conv_weight_grad": "m co k",
    "sparse3d::global_max_pool": "c",
    "sparse3d::global_sum_pool": "n c",
    "sparse3d::hash_lookup": "m",
    "sparse3d::hash_lookup_3d": "m",
    "sparse3d::hilbert_decode": "n",
    "sparse3d::hilbert_encode": "n",
    "sparse3d::indice_weighted_sum": "c q k",
    "sparse3d::indice_weighted_sum_grad": "q c k",
    "sparse3d::max_pool_grad": "c n",
    "sparse3d::max_pool_with_taps": "c m",
    "sparse3d::nearest_map": "l",
    "sparse3d::norm_relu": "n c",
    "sparse3d::segment_mean": "n c",
    "sparse3d::sum_pool": "c m k",
    "sparse3d::transpose_table": "k",
    "sparse3d::trilinear_map": "l",
    "sparse3d::z_order_decode": "n",
    "sparse3d::z_order_encode": "n",
}
QUICK = {"dense::bmm", "dense::mm", "slidesparse::linear_int8", "slidesparse::sparse_mm_int8", "sparse3d::hash_lookup"}
EIGHT = {"eight::rope", "eight::squash", "eight::swish", "eight::swish_grad", "eight::transform"}

PROGRAM = """
import json, sys
sys.path.insert(0, "examples")
import eight_kernels
from shiplap.audit.check import AuditSubject
from shiplap.audit.checks.sharding import CHECK
from shiplap.dispatch import registry
from shiplap.sampling.samples import Samples
eight_kernels.build()
found = {op.spec.name: CHECK.run(AuditSubject(op, Samples(op, 0))) for op in registry.declared_op_list()}
print(json.dumps({name: [f.verdict, f.evidence] for name, f in found.items()}))
"""


def of_family(name: str) -> Op:
    import_module(f"shiplap_{name.partition('::')[0]}")
    op = registry.find_declared_op(name)
    assert op is not None, name
    return op


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in PROVEN]
)
def test_the_op_of_the_shards_is_the_shard_of_the_op(name: str) -> None:
    op = of_family(name)
    finding = CHECK.run(AuditSubject(op, Samples(op, 0)))
    assert finding.verdict == "ok", finding.evidence
    noted = finding.evidence.partition("; ")[2].partition("; largest error")[0]
    cut = {dim.strip() for part in noted.split(";") for dim in part.strip().removeprefix("cut along ").split(",")}
    assert cut == set(PROVEN[name].split())


@pytest.mark.parametrize(
    ("inputs", "output", "evidence"),
    [
        ({"a": 0}, "sum", "do not fit together"),
        ({"a": 1, "b": 0}, "max", "result 0"),
        ({"b": 1}, 0, "shape|sizes disagree"),  # the latter where a bias has the right size
    ],
    ids=["rows as partial sums", "a maximum for a sum", "columns as rows"],
)
def test_a_wrong_rule_for_a_familys_op_is_caught(inputs: dict[str, int], output: str | int, evidence: str) -> None:
    op = of_family("dense::mm")
    before = op.shardings
    op.shardings = None
    try:
        op.sharding(inputs, output)
        finding = CHECK.run(AuditSubject(op, Samples(op, 0)))
    finally:
        op.shardings = before
    assert finding.verdict == "fail"
    assert re.search(evidence, finding.evidence)


@pytest.mark.long
def test_the_eight_kernels_have_proven_rules_or_a_reason() -> None:
    done = interpreted("-W", "ignore", "-c", PROGRAM)
    assert done.returncode == 0, done.stderr[-2000:]
    findings = json.loads(done.stdout.splitlines()[-1])
    assert {name for name, (verdict, _) in findings.items() if verdict == "ok"} == EIGHT
    assert all(evidence for verdict, evidence in findings.values() if verdict == "skip")
    assert not [name for name, (verdict, _) in findings.items() if verdict == "fail"]
