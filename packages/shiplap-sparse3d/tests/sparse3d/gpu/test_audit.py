"""Audits, on the GPU, of every op of sparse3d."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap.dispatch import registry
from shiplap_testing.effort import DEVICE_CHECKS, sampled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
OPS = sorted(op.spec.opname for op in registry.declared_op_list() if op.spec.namespace == "sparse3d")
# A template, a launch program, a kernel that Python launches and its gradient, one that writes to its arguments.
WHOLE = ("conv", "subm_plan", "segment_mean", "indice_weighted_sum", "hash_insert")


def failed(name: str, checks: Collection[str] | None = None, budget: float = 40) -> list[str]:
    """Return what the checks of an audit of one op have found wrong in ``budget`` seconds."""
    report = sl.audit(registry.find_declared_op(f"sparse3d::{name}"), checks=checks, device="cuda", budget=budget)
    sparse3d.synchronize()
    return [f"{f.check}: {f.evidence} [{f.input}]" for f in report if f.verdict == "fail"]


@pytest.mark.parametrize("name", [name for name in OPS if name not in WHOLE])
def test_an_op_passes_the_checks_of_its_kernels(name: str) -> None:
    assert failed(name, DEVICE_CHECKS, budget=25) == []


@pytest.mark.parametrize("name", sampled(OPS, long=[name for name in OPS if name not in WHOLE]))
def test_an_op_passes_its_full_audit(name: str) -> None:
    assert failed(name) == []
