"""The full audit, on the GPU, of every op of sparse3d that the files of its kind do not audit there themselves."""

from __future__ import annotations

import pytest
import torch

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap.dispatch import registry
from shiplap_testing.effort import sampled
from tests.sparse3d.gpu import test_lowlevel, test_maps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ELSEWHERE = {*test_maps.NAMES, *test_lowlevel.OPS}
REST = sorted({op.spec.opname for op in registry.declared_op_list() if op.spec.namespace == "sparse3d"} - ELSEWHERE)


@pytest.mark.parametrize("name", sampled(REST, long=("max_pool_with_taps", "sum_pool", "global_sum_pool")))
def test_an_op_passes_its_full_audit(name):
    findings = sl.audit(registry.find_declared_op(f"sparse3d::{name}"), device="cuda", budget=40)
    assert [f"{f.check}: {f.evidence} [{f.input}]" for f in findings if f.verdict == "fail"] == []
    sparse3d.synchronize()
