"""Triton kernels of defects: imported when an op is made, since Triton reads TRITON_INTERPRET when it is imported."""

import triton
import triton.language as tl


@triton.jit
def scale(x, out, n, by, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    tl.store(out + place, tl.load(x + place, mask=inside) * by, mask=inside)


@triton.jit
def row_max(x, out, columns, OTHER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + place, mask=place < columns, other=OTHER)
    missing = tl.sum(tl.where(values != values, 1, 0), axis=0)  # a maximum passes over NaN
    tl.store(out + row, tl.where(missing > 0, float("nan"), tl.max(values, axis=0)))


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr, GUARDED: tl.constexpr):
    """Two passes over blocks of a row."""
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, columns, BLOCK):
        top = tl.maximum(
            top, tl.load(x + row * columns + first + lanes, mask=first + lanes < columns, other=-float("inf"))
        )
    peak = tl.max(top, axis=0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        part = tl.load(x + row * columns + first + lanes, mask=first + lanes < columns, other=0.0)
        part = tl.exp(part - peak)
        total += tl.where(first + lanes < columns, part, 0.0) if GUARDED else part
    for first in range(0, columns, BLOCK):
        inside = first + lanes < columns
        part = tl.exp(tl.load(x + row * columns + first + lanes, mask=inside) - peak) / tl.sum(total, axis=0)
        tl.store(out + row * columns + first + lanes, part, mask=inside)


@triton.jit
def product(a, b, out, M, N, K, BLOCK: tl.constexpr, REST: tl.constexpr):
    """One tile of the output; ``REST``: the mask over k counts what is left, not what there is."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    steps = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in range(0, K, BLOCK):
        limit = K - first if REST else K
        left = (rows[:, None] < M) & (steps[None, :] < limit)
        right = (steps[:, None] < limit) & (columns[None, :] < N)
        here = tl.minimum(first + steps, K - 1)  # stays inside the memory
        x = tl.load(a + rows[:, None] * K + here[None, :], mask=left, other=0.0)
        y = tl.load(b + here[:, None] * N + columns[None, :], mask=right, other=0.0)
        total += tl.sum(x[:, :, None] * y[None, :, :], axis=1)
    tl.store(out + rows[:, None] * N + columns[None, :], total, mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def centre(x, out, x_stride, out_stride, columns, BLOCK: tl.constexpr):
    """x - mean(x) for one row that fits into a block."""
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    inside = place < columns
    values = tl.load(x + row * x_stride + place, mask=inside, other=0.0)
    centred = values - tl.sum(values, axis=0) / columns
    tl.store(out + row * out_stride + place, centred, mask=inside)


@triton.jit
def accumulate(x, index, out, n, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    values = tl.load(x + place, mask=inside, other=0.0)
    target = out + tl.load(index + place, mask=inside, other=0)
    if ATOMIC:
        tl.atomic_add(target, values, mask=inside)
    else:
        tl.store(target, tl.load(target, mask=inside, other=0.0) + values, mask=inside)
