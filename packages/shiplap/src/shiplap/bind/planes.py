"""Planes of float32 that a template wrote, added up in their order."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from shiplap.bind.triton import Launcher, triton_launcher

__all__ = ["add_planes"]

BLOCK = 2048


def add_planes(planes: Tensor, out: Tensor) -> None:
    """``out = planes.sum(0)``, summed in float32; both are contiguous."""
    if total := out.numel():
        _kernel()[(-(-total // BLOCK),)](planes, out, total, planes.shape[0], BLOCK=BLOCK)


@cache
def _kernel() -> Launcher:
    """Compiled when it is first needed: an import of shiplap imports no Triton."""
    import triton
    import triton.language as tl

    def add(planes, out, total, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < total
        acc = tl.zeros((BLOCK,), dtype=tl.float32)
        for plane in range(count):
            acc += tl.load(planes + tl.cast(plane, tl.int64) * total + at, mask=inside, other=0.0)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)

    add.__globals__["tl"] = tl  # where Triton looks names up
    return triton_launcher(triton.jit(add))
