"""Which of the shipped ops can be captured in a CUDA graph today, and why the others cannot: a table.

``SHIPLAP_CAPTURE_JSON`` names a file for the same as JSON, with device, versions and date. ``test_audit.py`` has the
same check of each op.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import shiplap_sparse3d as sparse3d
from shiplap.audit import audit
from shiplap.dispatch import Op
from shiplap.render.facts import facts

SEED = 20261121
OPS = sorted((v for v in vars(sparse3d).values() if isinstance(v, Op)), key=lambda op: op.spec.name)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def rows():
    for op in OPS:
        (finding,) = audit(op, checks=["cuda_graph"], seed=SEED, device="cuda")
        kernels = [k.name for k in op.kernels.get("cuda", ())] or ["reference"]
        yield {
            "op": op.spec.name,
            "runs": "/".join(kernels),
            "verdict": finding.verdict,
            "evidence": finding.evidence,
            "input": finding.input,
            "fix": finding.fix,
        }


@pytest.mark.long
def test_every_shipped_op_is_captured_or_says_why_not():
    table = list(rows())
    for row in table:
        print(f"\n{row['op']:28} {row['runs']:12} {row['verdict']:5} {row['evidence']}")
    if path := os.environ.get("SHIPLAP_CAPTURE_JSON"):
        about = facts(seed=SEED, device=torch.cuda.get_device_name(), cuda=torch.version.cuda)
        Path(path).write_text(json.dumps({"facts": about, "ops": table}, indent=2) + "\n")
    assert [row["op"] for row in table] == [op.spec.name for op in OPS]
    for row in table:  # silence is no verdict, and a wrong replay is not a reason
        assert row["evidence"]
        assert "replay" not in row["evidence"].partition(";")[0] or row["verdict"] == "ok", row
