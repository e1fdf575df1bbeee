"""Triton templates as kernels of their own, without a GPU: run by Triton's interpreter against the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parent / "direct_cases.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A process of its own: Triton reads once whether it interprets."""
    home = tmp_path_factory.mktemp("direct")
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"), "SHIPLAP_CACHE_DIR": str(home / "shiplap")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row.pop("name"): row for row in rows}


RIGHT = [
    "mm", "mm bias", "mm transposed", "mm offset", "mm expanded", "mm strided", "mm one buffer", "mm one row",
    "mm no rows", "mm no columns", "mm even", "bmm", "int8_mm", "int8_mm even", "grouped_mm", "conv2d",
    "conv2d dilated", "conv2d channels apart", "gather", "gather unordered", "gather bias alone", "gather reflected",
    "gather scaled", "gather groups", "gather second config", "gather one row", "gather no rows", "gather of nothing",
    "gather views", "gather half",
]  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_template_alone_is_right(results, name):
    found = results[name]
    assert "error" in found, found
    assert found["error"] < (2e-3 if name in ("mm even", "gather half") else 1e-6), found


def test_a_planted_bug_is_seen(results):
    """The comparison that all others rest on can fail."""
    assert results["planted bug"]["error"] > 1e-2


def test_the_first_config_that_takes_the_call_runs(results):
    assert "BLOCK_K=16" in results["gather"]["config"]
    assert "BLOCK_K=32" in results["gather second config"]["config"]
    assert results["gather too wide"] == {"refused": "BLOCK_K=16, BLOCK_N=16 do not hold a group"}
    assert results["mm nothing to add"] == {"refused": "k = 0"}
    assert "float64" in results["mm float64"]["refused"]


def test_what_an_eager_call_runs(results):
    assert results["eager template"] == {"ran": ["gathered"], "said": []}
    assert results["eager library"] == {"ran": [], "said": []}, "torch's product is no slow path"
    assert results["eager reference"]["ran"] == []
    (said,) = results["eager reference"]["said"]
    assert said.endswith("runs its reference (gathered: BLOCK_K=16, BLOCK_N=16 do not hold a group): correct, not fast")


def test_new_sizes_compile_nothing(results):
    found = results["renderings"]
    assert found["before"] == found["after"] > 0
    assert found["source"].startswith("def gathered_gathered(feats, weight, table, order, bias, out_ptr, size_table_0")


def test_a_table_is_built_once_for_the_sizes_that_it_looks_at(results):
    assert results["tables"] == {"tables": 2, "looked_at": ["dilation", "kh", "kw", "padding"]}


@pytest.mark.parametrize("name", ["fused", "fused reflected", "fused groups"])
def test_the_same_source_is_fused_by_inductor(results, name):
    found = results[name]
    assert "failed" not in found, found
    assert [k[:16] for k in found["kernels"]] == ["triton_tem_fused"]
    assert found["error"] < 1e-6
