"""Rewrites that are placed on GPUs alone, without one: Triton's interpreter runs what Inductor renders for a model."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shiplap_testing.forked import interpreted

pytest.importorskip("triton")


@pytest.mark.long
def test_what_is_rewritten_for_a_gpu_is_a_triton_template_with_its_neighbours_inside(tmp_path: Path) -> None:
    """A process of its own: Triton reads once whether it interprets."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "SHIPLAP_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("triton_cases.py")
    done = interpreted("-W", "ignore", script, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    fired = ["linear_gelu", "rms_norm_linear", "int8_linear_float32", "conv_norm_dense"]
    assert [f["fired"] for f in rows] == [[name] for name in fired]
    for row in rows:
        assert row["error"] < 2e-5, row
        assert sum("_tem_" in k for k in row["kernels"]) == 1, row
    assert [len(rows[i]["kernels"]) for i in (0, 2)] == [1, 1]  # the activation is inside; int8 is never unpacked
