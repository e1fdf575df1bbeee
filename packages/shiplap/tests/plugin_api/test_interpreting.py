"""The public harness for Triton without a GPU, as somebody outside of the repository uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shiplap_testing import forked

pytest.importorskip("triton")

TEMPLATE = """\
{{def_kernel()}}
    N = {{size("x", 0)}}
    M = {{size("x", 1)}}
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    col = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (row < N) & (col < M)
    {{load_input("x", "value", ("row", "col"), mask="mask", indent_width=4, index_shape=("BLOCK_M", "BLOCK_N"))}}
    value = value * 2.0
    {{store_output(("row", "col"), "value", "mask", val_shape=("BLOCK_M", "BLOCK_N"))}}
"""

BESIDE = """\
{{def_kernel()}}
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < {{size("out", 0)}} * {{size("out", 1)}}
    row = at // {{size("out", 1)}}
    col = at % {{size("out", 1)}}
    value = tl.load(x + row * {{stride("x", 0)}} + col % {{size("x", 1)}} * {{stride("x", 1)}}, mask=mask, other=0.0)
    {{store_output(("row", "col"), "value", "mask", val_shape=("BLOCK",))}}
"""

PROGRAM = """\
import json
from shiplap.plugin_api.interpreting import interpret, run_interpreted

BROKEN = []
interpret(lambda source: source.replace("* 2.0", "* 2.5") if BROKEN else source)

import torch
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl


@triton.jit
def twice_kernel(x, out, numel_x, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < numel_x) * 2, mask=at < numel_x)


@sl.op("mine::twice")
def twice(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    return x * 2


twice.kernel("cuda", sl.triton(twice_kernel, grid="cdiv(n, BLOCK)", constants={"BLOCK": 16}))


@sl.op("mine::both")
def both(x: Float32[Tensor, "n m"]) -> Float32[Tensor, "n m"]:
    return x * 2


both.template(
    "cpu",
    "both.triton.jinja",
    configs=[{"BLOCK_M": 16, "BLOCK_N": 16}],
    grid=lambda sizes, config, cdiv: (cdiv(sizes["n"], config["BLOCK_M"]), cdiv(sizes["m"], config["BLOCK_N"]), 1),
)

@sl.op("mine::beside")
def beside(x: Float32[Tensor, "n m"]) -> Float32[Tensor, "n 2*m"]:
    return torch.cat([x, x], 1)


beside.template(
    "cpu",
    "beside.triton.jinja",
    configs=[{"BLOCK": 16}],
    grid=lambda sizes, config, cdiv: (cdiv(2 * sizes["n"] * sizes["m"], config["BLOCK"]), 1, 1),
)

if __name__ == "__main__":
    (finding,) = sl.audit(twice, checks=("numerics",), seed=0)
    plain = run_interpreted(lambda x: twice(x).relu() + 1, torch.randn(40))
    fused = run_interpreted(lambda x: both(x).relu() + 1, torch.randn(20, 30))
    sized = run_interpreted(lambda x: beside(x) + 1, torch.randn(5, 6), dynamic=True)
    BROKEN.append(True)
    broken = run_interpreted(lambda x: both(x) - 1, torch.randn(20, 30))
    runs = {"plain": plain, "fused": fused, "sized": sized, "broken": broken}
    print(json.dumps({"audit": finding.verdict} | {n: [r.error, r.kernels] for n, r in runs.items()}))
"""


def python(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A fresh process: Triton must not be imported when the program begins."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True)


@pytest.mark.long
def test_a_plain_kernel_and_a_template_run_outside_of_the_repository(tmp_path: Path) -> None:
    """The kernel is audited and compiled, the template fused with what follows it, and a planted defect is seen."""
    (tmp_path / "both.triton.jinja").write_text(TEMPLATE)
    (tmp_path / "beside.triton.jinja").write_text(BESIDE)
    (tmp_path / "program.py").write_text(PROGRAM)
    done = python("-W", "ignore", "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    shown = json.loads(done.stdout.splitlines()[-1])
    assert shown["audit"] == "ok"
    assert shown["plain"][0] == 0
    ((error, kernels), (wrong, _)) = shown["fused"], shown["broken"]
    assert error < 1e-6
    assert len(kernels) == 1
    assert "_tem_" in kernels[0], "the addition and the activation went into the template"
    assert wrong > 0.05
    assert shown["sized"][0] == 0
    assert "_tem_" in shown["sized"][1][0], "a size that is an expression was one operand of // and of %"


def test_triton_that_was_imported_before_is_refused(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "import triton\nfrom shiplap.plugin_api.interpreting import interpret\n"
        "try: interpret()\nexcept Exception as e: print(e)\n"
    )
    done = forked.python("late.py", cwd=tmp_path)  # where Triton has been imported, too
    assert "SL603: Triton has been imported already" in done.stdout, done.stderr
    assert "interpret() before the first import of Triton" in done.stdout
