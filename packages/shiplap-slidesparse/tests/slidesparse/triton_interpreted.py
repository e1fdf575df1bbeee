"""Run by test_triton.py in a process of its own: the Triton kernels of slidesparse, interpreted, on CPU tensors.

``triton_interpreted.py SEED some|every``: some of the cases, which the seed draws, or every one.
bfloat16 cannot be interpreted, and casts to float8 are not rounded to nearest there: it is given values that it has.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import random
import sys
import warnings
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from shiplap_slidesparse import formats, layers, ops
from shiplap_slidesparse.cuda import activations, linear
from shiplap_slidesparse.cuda.finish import finish_product
from shiplap_slidesparse.quantise import MIN_SCALE, quantise_weight

GUARD = 77  # what outputs hold before: everything has to be written
EVERY = sys.argv[2] == "every"
T = TypeVar("T")


def some(cases: Sequence[T], count: int) -> Sequence[T]:
    """So many of the cases, or all of them."""
    return cases if EVERY else random.sample(cases, count)


def same(got: Tensor, want: Tensor, what: str) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    wide = want.element_size() > 1 and want.is_floating_point()
    nan = torch.isnan(want) if wide else torch.zeros_like(want, dtype=torch.bool)
    assert not wide or torch.isnan(got[nan]).all(), what
    different = (got.contiguous().view(bits) != want.contiguous().view(bits)) & ~nan
    assert not different.any(), f"{what}: {got[different][:4]} is not {want[different][:4]}"


def rows_of(m: int, k: int, dtype: torch.dtype, rng: torch.Generator) -> Tensor:
    """Ordinary rows, huge, tiny and empty ones, and some that hold no numbers."""
    x = torch.randn(m, k, generator=rng)
    special = [1e-40, 3e38, float("inf"), float("nan"), -float("inf"), 1e-30, -0.0]
    for row in range(m):
        if k and row % 3 == 1:
            kind = special[row // 3 % len(special)]
            x[row, random.randrange(k)] = kind
        if row % 5 == 2:
            x[row] *= 10.0 ** random.randrange(-37, 5)
        if row % 7 == 6:
            x[row] = 0
    return x.to(dtype)


def quantised(x: Tensor, pairs: int, dtype: torch.dtype = torch.int8) -> None:
    op = ops.quantise_int8 if dtype == torch.int8 else ops.quantise_fp8
    want, scales = op.run_reference((x, pairs))
    q, scale = torch.full(want.shape, GUARD, dtype=torch.uint8).view(dtype), torch.full_like(scales, GUARD)
    what = f"{dtype} {tuple(x.shape)} {x.stride()} {x.dtype} pairs {pairs}"
    activations.launch_quantise(x, pairs, q=q, scale=scale, num_warps=4)
    same(q, want, what)
    same(scale, scales, f"scales of {what}")


def representable(m: int, k: int, rng: torch.Generator) -> Tensor:
    """Rows of values that float8 has once they are scaled: the interpreter's cast to it does not round to nearest."""
    eighths = torch.randint(8, 16, (m, k), generator=rng) * torch.randint(-1, 2, (m, k), generator=rng)
    x = eighths * 2.0 ** torch.randint(-8, 5, (m, k), generator=rng)
    x[:, :1] = -448.0
    x[m // 2, -1:] = random.choice((float("nan"), float("inf"), -float("inf")))
    return x * 2.0 ** torch.randint(-40, 40, (m, 1), generator=rng)


CASES = (
    (1, 64, 2),
    (17, 40, 3),
    (16, 33, 4),
    (0, 32, 5),
    (3, 1, 6),
    (2, 0, 7),
    (5, 100, 8),
    (2, 32, 3),
    (2, 64, 5),
)  # m, k, pairs; the last two: a group lies across the end of what is read


def activation_cases(rng: torch.Generator) -> None:
    for case, (m, k, pairs) in enumerate(some(CASES, 4)):
        x = rows_of(m, k, (torch.float32, torch.float16)[case % 2], rng)
        quantised(x, pairs)
        out = torch.full((-(-m // 16) * 16, formats.lifted_depth(k, pairs)), GUARD, dtype=x.dtype)
        activations.launch_lift(x, pairs, out=out, BLOCK=64, num_warps=4)
        same(out, ops.lift.run_reference((x, pairs)), f"lift {m} x {k} pairs {pairs}")
    for pairs in some((2, 3, 4), 1):
        quantised(representable(5, random.randrange(1, 70), rng), pairs, torch.float8_e4m3fn)
    base = rows_of(12, 2 * 48 + 3, torch.float32, rng)
    views = base[1:, 3::2], base.t()[:16, 2:], base[:, :1].expand(12, 48), base[4:5].expand(9, -1)
    for view in some(views, 2):
        quantised(view, 4)
    activations.WHOLE, kept = 32, activations.WHOLE  # rows that are longer than what is read at once
    for pairs, k in some(((2, 65), (3, 100), (4, 33), (8, 64)), 1):
        quantised(rows_of(9 if EVERY else 3, k, torch.float32, rng), pairs)
    quantised(representable(2, 100 if EVERY else 40, rng), 4, torch.float8_e4m3fn)
    activations.WHOLE = kept
    tiny = torch.tensor([[127 * MIN_SCALE, MIN_SCALE / 2, 0.0, -1e-45]])
    quantised(tiny, 2)
    halves = torch.arange(-127, 128, dtype=torch.float32)[None] / 2  # ties to even, and the largest one last
    halves[0, -1] = 127.0
    quantised(halves, 2)
    wide = torch.rand(32, 8, generator=rng).sub(0.5) * 10.0 ** torch.randint(-30, 30, (32, 1), generator=rng)
    quantised(wide, 3)  # of some rows the largest magnitude is scaled to a little more than 127


def finishing_cases(rng: torch.Generator) -> None:
    for m, n in ((1, 32), (17, 40), (16, 320), (5, 1)):
        total = torch.randint(-(2**31), 2**31 - 1, (-(-m // 16) * 16, -(-n // 32) * 32), generator=rng).int()
        rows = torch.randn(len(total), generator=rng)
        columns = torch.randn(2 * n, generator=rng)[::2]  # as a user's scale may be
        bias = torch.randn(1, generator=rng).expand(n) if m == 17 else torch.randn(n, 2, generator=rng)[:, 1]
        for by_row, by_column, bias_too in ((True, True, True), (True, False, True), (False, False, False)):
            dtype = random.choice((torch.float32, torch.float16))
            added = bias.to(dtype) if dtype != bias.dtype else bias  # a conversion keeps these strides
            added = added if bias_too else None
            want = total[:m, :n].float() * (rows[:m, None] if by_row else 1) * (columns if by_column else 1)
            out = torch.full((m, n), float(GUARD), dtype=dtype)
            finish_product(total, rows if by_row else None, columns if by_column else None, added, out)
            same(out, layers._add_bias(want, added, dtype), f"finish {m} x {n} {dtype}")


def layer_cases(rng: torch.Generator) -> None:
    """The layers of CUDA around products of the CPU: int8 has the reference's bits, fp16 its rounding."""
    for m, n, k, pairs, bias in ((5, 40, 50, 3, True), (16, 32, 64, 2, False)):
        x = torch.randn(m, k, generator=rng)
        added = torch.randn(n, generator=rng) if bias else None
        weight, scale = quantise_weight(
            formats.prune(torch.randn(n, k, generator=rng), formats.Pattern(pairs)), torch.int8
        )
        slid = formats.slide_weight(formats.pad_matrix(weight, formats.dense_depth(n), k), formats.Pattern(pairs))
        want = layers.linear_int8.run_reference((x, scale, weight, None, added, pairs, 0))
        out = torch.full((m, n), float(GUARD))
        linear.slide_8bit(torch.int8, x, scale, formats.compress_two_of_four(slid), added, pairs, 0, out)
        same(out, want, f"slide {m} x {n} x {k} pairs {pairs}")
        if n % 32 == 0 and k % 32 == 0:
            out.fill_(GUARD)
            linear.dense_8bit(torch.int8, x, scale, weight, added, out)
            same(out, want, f"dense {m} x {n} x {k}")
        half, packed = x.half(), formats.compress_two_of_four(slid.half())
        out = torch.full((m, n), float(GUARD), dtype=torch.float16)
        linear.slide_16bit(half, packed, n, None if added is None else added.half(), pairs, 0, out)
        want = half.double() @ weight.double().t() + (0 if added is None else added.half().double())
        assert torch.allclose(out.double(), want, rtol=2**-9, atol=2**-3), f"fp16 {m} x {n} x {k} pairs {pairs}"


def main() -> None:
    warnings.simplefilter("ignore")  # numpy's, of infinities that are there on purpose
    seed = int(sys.argv[1])
    random.seed(seed)
    rng = torch.Generator().manual_seed(seed)
    activation_cases(rng)
    finishing_cases(rng)
    layer_cases(rng)
    print("agree")


main()
