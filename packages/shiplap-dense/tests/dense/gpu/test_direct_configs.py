"""Every config of the dense templates as a kernel of its own on a GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from shiplap_dense import ops
from shiplap_testing.effort import sampled
from tests.dense import direct_ops
from tests.dense.gpu.eager import EAGER, TOLERANCE, error, reference

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True, scope="module")
def bound() -> None:
    direct_ops.attach("cuda")


CASES = {f"{case}-{dtype}": (case, dtype) for case in EAGER for dtype in TOLERANCE}
# Each template in one dtype of 16 bits, and two in float32, whose products the assembler takes long to unroll.
SHORT = {"mm-torch.bfloat16", "bmm-torch.float32", "grouped_mm-torch.float32"}
SHORT |= {f"{case}-torch.float16" for case in EAGER if case != "mm"}


@pytest.mark.parametrize("name", sampled(CASES, long=CASES.keys() - SHORT))
def test_every_config_of_the_dense_templates(name):
    from triton.runtime.errors import OutOfResources

    case, dtype = CASES[name]
    op, args = getattr(ops, case.partition(" ")[0]), EAGER[case](dtype)
    call, want, seen = op.bind(args), reference(op, args), set()
    for kernel in op.kernels["cuda"]:
        for config in kernel.space.configs(call.env):
            if kernel.with_config(config).why_refused(call):
                continue
            try:
                (got,) = kernel.with_config(config).run_call(call)
            except OutOfResources:  # a tile of this dtype is too large for the shared memory
                continue
            assert error(got, want) < max(TOLERANCE[dtype], 2e-3 if case == "int8_mm" else 0), (kernel.name, config)
            seen.add(kernel.name)
    assert case.partition(" ")[0] in seen
    if case == "mm even" and dtype.itemsize == 2 and torch.cuda.get_device_capability() >= (9, 0):
        assert "mm_tma" in seen, "with memory for its descriptors"
