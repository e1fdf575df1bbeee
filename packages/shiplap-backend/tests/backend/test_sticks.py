"""A runtime of float16 alone, whose memory is in blocks of 64 bytes: what the tutorial says of layouts, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from shiplap_backend.generate import generate_wrappers
from shiplap_backend.metadata import load_metadata
from shiplap_backend.runtimes import find_runtime
from shiplap_testing.forked import python
from tests.backend.examples import EXAMPLE, built

STICKS = EXAMPLE.with_name("runtime-sticks")


def test_it_is_described_without_a_dtype_of_computation() -> None:
    runtime = find_runtime(str(STICKS))
    assert "-DSHIPLAP_BLOCK_LAST=32" in runtime.flags
    text = (STICKS / "ops.yaml").read_text(encoding="utf-8")
    assert "compute" not in text.partition("ops:")[2]
    made = generate_wrappers(load_metadata(STICKS / "ops.yaml"), runtime, units=1)
    assert len(made.wrappers) > 30
    assert "opmath(op.common_dtype())" not in made.files["wrappers_00.cpp"]
    assert "holds(self, op.common_dtype()) && holds(other, op.common_dtype()) && holds(alpha, compute)" in str(
        made.files
    )
    assert "constant(held(at::Scalar(eps), compute), compute)" in str(made.files)
    files = [STICKS / name for name in ("runtime.py", "functions.h", "ops.yaml")]
    assert sum(len(f.read_text(encoding="utf-8").splitlines()) for f in files) < 200


@pytest.mark.long  # building it takes a minute
def test_its_probes_are_equal(request: pytest.FixtureRequest) -> None:
    project = built(request.config, "sticks", STICKS)
    run = python(Path(__file__).with_name("sticks_probes.py"), project.root)
    assert run.stdout.splitlines()[-1:] == ["25 of 25 equal, True"], run.stdout + run.stderr


@pytest.mark.long
def test_numbers_that_float16_does_not_hold_run_on_the_cpu(request: pytest.FixtureRequest) -> None:
    project = built(request.config, "sticks", STICKS)
    run = python(Path(__file__).with_name("sticks_numbers.py"), project.root)
    lines = run.stdout.splitlines()
    assert len(lines) == 25, run.stdout + run.stderr
    assert not [line for line in lines if not line.endswith("equal, as expected")], run.stdout
