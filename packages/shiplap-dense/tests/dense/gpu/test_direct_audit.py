"""Triton templates as kernels of their own on a GPU: their audits."""

from __future__ import annotations

import pytest
import torch

import shiplap as sl
from shiplap_dense import ops
from shiplap_testing.effort import DEVICE_CHECKS
from tests.dense import direct_ops
from tests.dense.direct_ops import gathered

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True, scope="module")
def bound() -> None:
    direct_ops.attach("cuda")


@pytest.mark.parametrize("op", [gathered, ops.int8_mm, ops.grouped_mm], ids=lambda op: op.spec.opname)
def test_the_audit(op):
    for finding in sl.audit(op, checks=DEVICE_CHECKS, device="cuda", budget=40):
        assert finding.verdict != "fail", finding
