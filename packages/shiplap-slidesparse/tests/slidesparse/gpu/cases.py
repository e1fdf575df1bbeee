"""What the GPU tests of slidesparse share: operands, comparison with float64, layers with both forms of a weight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import shiplap as sl
from shiplap_slidesparse import formats, layers, lt, ops
from shiplap_slidesparse.quantise import quantise_weight

FP8, CUDA = torch.float8_e4m3fn, "cuda"
MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SPARSE = {torch.int8: ops.sparse_mm_int8, FP8: ops.sparse_mm_fp8, torch.bfloat16: ops.sparse_mm_bf16}
LAYERS = (layers.linear_int8, layers.linear_fp8, layers.linear_bf16)


@pytest.fixture(scope="module")
def sparse() -> None:
    """cuSPARSELt 0.8.1 or later, in the environment or as a file in ``SHIPLAP_LIBRARY_PATH``."""
    if (why := lt.available(CUDA)) is not True:
        pytest.skip(str(why))


def values(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, (rows, k), device=CUDA, dtype=dtype)
    return torch.randn(rows, k, device=CUDA).to(dtype)


def slid_weight(n: int, k: int, dtype: torch.dtype, pattern: str = "2:4") -> Tensor:
    """A 2:4 weight ``[n, k']`` made of a pruned one."""
    return formats.slide_weight(formats.prune(values(n, k, dtype).float(), pattern), pattern).to(dtype)


def check(out: Tensor, x: Tensor, weight: Tensor, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
    """Integers exactly; else within the rounding of the result and what tensor cores drop of the sum of magnitudes."""
    wide, heavy = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    for scale in (rows[:, None] if rows is not None else None, columns):
        if scale is not None:
            wide, heavy = wide * scale.double(), heavy * scale.double().abs()
    if out.dtype == torch.int32:
        wrong = int((out != wide.to(torch.int32)).sum())
        assert wrong == 0, f"{wrong} of {out.numel()} integers"
        return
    error = (out.double() - wide).abs()
    allowed = wide.abs() * (2**-8 if out.dtype == torch.bfloat16 else 2**-10) + heavy * 2**-11 + 1e-6
    assert (error <= allowed).all(), f"{(error / allowed).max()} times what is allowed"


def layer(op: sl.Op, m: int, n: int, k: int, pairs: int = 4, bias: bool = True) -> tuple:
    """Arguments of a linear op with both forms of its weight."""
    dtype = {layers.linear_int8: torch.int8, layers.linear_fp8: FP8}.get(op, torch.bfloat16)
    pruned = formats.prune(torch.randn(n, k, device=CUDA) / k**0.5, formats.Pattern(pairs))
    weight, scale = quantise_weight(pruned, dtype) if dtype != torch.bfloat16 else (pruned.bfloat16(), None)
    rows = formats.dense_depth(n)
    slid = formats.slide_weight(formats.pad_matrix(weight.float(), rows, k), formats.Pattern(pairs)).to(weight.dtype)
    packed = lt.compress_weight(slid)
    x = torch.randn(m, k, device=CUDA, dtype=torch.bfloat16)
    added = torch.randn(n, device=CUDA, dtype=torch.bfloat16) if bias else None
    return x, scale if scale is not None else n, weight, packed, added, pairs, ops.CUSPARSELT


def captured(
    run: Callable[[Tensor], Tensor], x: Tensor, pool: object = None
) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
    """A graph of ``run`` on a copy of ``x``, after a warm-up on a side stream."""
    static, stream = x.clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = run(static)
    return graph, static, out
