"""Kernels in CUDA C++ by ``sl.source``: sound ones are proven on a GPU, and broken ones fail for their cause.

The sound ones are the six of ``examples/cuda_kernels.py``, and those of ``cuda_sources.py``, which has the broken
ones, and of ``more_cuda_sources.py``.
"""

from __future__ import annotations

import runpy
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import shiplap as sl
from shiplap.audit import audit
from shiplap_testing.paths import REPOSITORY
from tests.gpu import cuda_sources, more_cuda_sources

SEED = 20261129
# A few checks that reach the kernel in each way of a call. The long test runs all of them.
SHORT = ["numerics", "edges", "sizes", "kernels", "determinism", "stateless", "workspace", "cuda_graph"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc"),
]
EXAMPLES = ("bias_gelu", "prefix_sums", "half_matmul", "unit_norm", "row_max", "lookup")


@pytest.fixture(scope="module")
def examples() -> dict[str, Any]:
    return runpy.run_path(str(REPOSITORY / "examples" / "cuda_kernels.py"))


def built(op: sl.Op) -> sl.Op:
    if op.spec.name == "cuda_sources::cluster_sum" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("its library is for compute capability 9.0")
    op.build()
    return op


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_checks_of_calls_pass_for_an_example(examples: dict[str, Any], name: str) -> None:
    report = audit(built(examples[name]), checks=SHORT, seed=SEED, device="cuda")
    assert report.proven, str(report)


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_proven(examples: dict[str, Any], name: str) -> None:
    report = audit(built(examples[name]), seed=SEED, device="cuda")
    assert report.proven, str(report)


@pytest.mark.long
@pytest.mark.parametrize(
    "op", [*cuda_sources.SOUND, *more_cuda_sources.SOUND], ids=lambda op: op.spec.name.partition("::")[2]
)
def test_a_kernel_of_another_form_is_proven(op: sl.Op) -> None:
    report = audit(built(op), seed=SEED, device="cuda")
    assert report.proven, str(report)


@pytest.mark.parametrize("name", sorted(cuda_sources.BROKEN))
def test_a_broken_kernel_fails_for_its_cause(name: str) -> None:
    op = built(getattr(cuda_sources, name.partition("::")[2]))
    (finding,) = audit(op, checks=[cuda_sources.BROKEN[name]], seed=SEED, device="cuda")
    assert finding.verdict == "fail", finding
    assert finding.fix


def test_cuda_graphs_of_compiled_code_are_looked_at_in_every_thread(examples: dict[str, Any]) -> None:
    """``shiplap audit --jobs`` audits ops in threads; torch 2.11 makes its tables of CUDA graphs for one thread."""
    ops = [built(examples[name]) for name in ("row_max", "lookup")]
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda op: audit(op, checks=["cudagraph_trees"], seed=SEED, device="cuda"), ops))
    assert all(report.proven for report in reports), "\n".join(map(str, reports))
