"""The generated kernel that docs/fuse.md shows is what Inductor generates now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shiplap_testing.forked import interpreted
from shiplap_testing.paths import REPOSITORY

pytest.importorskip("triton")
PAGE = REPOSITORY / "docs" / "assets" / "relu_mm.txt"


def test_the_kernel_on_the_page_is_the_one_that_is_generated(tmp_path: Path) -> None:
    script = Path(__file__).parent / "seed_source.py"
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = interpreted("-W", "ignore", script, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = PAGE.read_text(encoding="utf-8")
    head, _, body = done.stdout.partition("\n")
    assert head.startswith("# triton_tem_fused_mm_relu_0: dense::mm, aten.relu in one kernel; torch ")
    assert body.count("tl.store(") == 1
    assert "maximum(" in body[body.index("tl.dot(") :]
    if head == shown.partition("\n")[0]:  # other versions of torch and Triton write it otherwise
        assert done.stdout == shown, f"python {script.relative_to(REPOSITORY)} > {PAGE.relative_to(REPOSITORY)}"
