"""The sum of the float32 partial sums that a split-K template stored, added in a fixed order."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from shiplap.kernels.triton.launcher import Launcher, triton_launcher
from shiplap.kernels.triton.replay import CompiledTritonKernel

BLOCK = 2048


def add_partial_sums(partial_sums: Tensor, out: Tensor) -> CompiledTritonKernel | None:
    """Write ``partial_sums.sum(0)``, added in float32 in a fixed order, into ``out``. The two tensors must be
    contiguous. Return the compiled kernel, or None if ``out`` has no elements.
    """
    total = out.numel()
    if not total:
        return None
    compiled: CompiledTritonKernel | None = _partial_sums_kernel()[(-(-total // BLOCK),)](
        partial_sums, out, total, partial_sums.shape[0], BLOCK=BLOCK
    )
    return compiled


@cache
def _partial_sums_kernel() -> Launcher:
    """Return the launcher of the summing kernel. It is made at the first request, since importing Shiplap must not
    import Triton.
    """
    import triton
    import triton.language as tl

    def add(partial_sums, out, total, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Write the sums of ``count`` rows of ``total`` float32 numbers to ``out``. Each program adds one block of
        columns.
        """
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < total
        acc = tl.zeros((BLOCK,), dtype=tl.float32)
        # One after the other, so that the sum does not depend on the launch.
        for split in range(count):
            acc += tl.load(partial_sums + tl.cast(split, tl.int64) * total + at, mask=inside, other=0.0)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)

    add.__globals__["tl"] = tl  # where Triton looks names up
    return triton_launcher(triton.jit(add))
