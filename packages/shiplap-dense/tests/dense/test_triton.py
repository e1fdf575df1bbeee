"""Triton templates without a GPU: rendered and fused by Inductor, run by Triton's interpreter, compared with eager."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shiplap_testing.forked import interpreted

pytest.importorskip("triton")
SCRIPT = Path(__file__).parent / "triton_cases.py"


def ran(home: Path, *names: str) -> dict[str, dict[str, Any]]:
    """A process of its own: Triton reads once whether it interprets."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"), "SHIPLAP_CACHE_DIR": str(home / "shiplap")}
    done = interpreted("-W", "ignore", SCRIPT, *names, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row.pop("name"): row for row in rows}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What no test marked ``long`` asks for."""
    return ran(tmp_path_factory.mktemp("triton"), *(name for name in FUSED if name not in LONG), *ALONE)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return ran(tmp_path_factory.mktemp("triton"))


# One kernel each: everything around the product is inside.
FUSED = [
    "bias inside, gelu",
    "raw kept",
    "siblings",
    "prologue",
    "cast",
    "dynamic",
    "transposed views",
    "offset views",
    "one row",
    "three dims",
    "seed",
    "bulk copies",
    "bmm",
    "int8",
    "grouped",
    "conv",
    "conv dilated",
    "twice one buffer",
]
# Each is compiled and interpreted for a second; what the others are is another template, or another kind of neighbour.
LONG = (
    "raw kept",
    "siblings",
    "bulk copies",
    "conv",
    "bmm",
    "grouped",
    "prologue",
    "cast",
    "transposed views",
    "offset views",
    "one row",
    "three dims",
    "seed",
    "conv dilated",
)
# Those that have tests of their own.
ALONE = ("reduction after", "no rows", "fusion off", "templates off", "bf16", "training", "planted bug")


@pytest.mark.parametrize("name", [name for name in FUSED if name not in LONG])
def test_one_kernel_with_the_values_of_eager(results, name):
    one_kernel(name, results[name])


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_one_kernel_with_the_values_of_eager_in_more_cases(everything, name):
    one_kernel(name, everything[name])


def one_kernel(name: str, result: dict[str, Any]) -> None:
    assert "failed" not in result, result["failed"]
    if name == "twice one buffer":  # two arguments are views of one buffer: the floor, and no wrong kernel
        assert result["chosen"] == ["reference"]
    else:
        assert len(result["kernels"]) == 1, result
        assert result["kernels"][0].startswith("triton_tem_fused"), result
    assert result["error"] < (2e-3 if name in ("cast", "seed", "bulk copies") else 2e-6), result
    assert not result["verdicts"] or name == "twice one buffer", result


def test_a_reduction_is_a_kernel_of_its_own(results):
    assert [k.split("_")[1] for k in results["reduction after"]["kernels"]] == ["tem", "per"]
    assert results["reduction after"]["error"] < 2e-6


def test_an_empty_product_takes_the_fallback(results):
    assert results["no rows"]["chosen"] in ([], ["reference"])


def test_controls(results):
    disjoint, off = results["fusion off"], results["templates off"]
    assert [k.split("_")[1] for k in disjoint["kernels"]] == ["tem", "poi"]
    assert not any("_tem_" in k for k in off["kernels"])
    assert off["chosen"] == ["reference"]
    assert disjoint["error"] < 2e-6
    assert off["error"] < 2e-6


def test_bfloat16_is_refused_by_the_interpreter_and_never_trusted(results):
    result = results["bf16"]
    assert "bf16 is wrong in Triton's interpreter" in json.dumps(result)
    assert result.get("chosen", ["reference"]) == ["reference"]


def test_training_goes_through_templates_forward_and_backward(results):
    result = results["training"]
    assert result["chosen"].count("reference") == 0, result
    assert len(result["chosen"]) == 3
    assert result["error"] < 2e-6


def test_a_planted_bug_in_an_epilogue_is_seen(results):
    """The comparison that all others rest on can fail."""
    assert len(results["planted bug"]["kernels"]) == 1
    assert results["planted bug"]["error"] > 1e-2
