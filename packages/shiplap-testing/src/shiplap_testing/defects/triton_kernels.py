"""Triton kernels of defects: imported when an op is made, since Triton reads TRITON_INTERPRET when it is imported."""

import triton
import triton.language as tl


@triton.jit
def scale(x, out, n, by, BLOCK: tl.constexpr):
    """Write ``x * by`` to ``out`` for the ``BLOCK`` elements of this program. ``x`` has ``n`` elements."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    tl.store(out + place, tl.load(x + place, mask=inside) * by, mask=inside)


@triton.jit
def row_max(x, out, rows, columns, OTHER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the maximum of each of ``ROWS`` rows to ``out``, or NaN if the row has one. Each row is loaded as a block
    of ``BLOCK`` elements, with ``OTHER`` behind its end. If ``OTHER`` is minus infinity, there is no defect. Otherwise
    there is a defect on purpose: a row of smaller numbers gets ``OTHER``.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (place[None, :] < columns)
    values = tl.load(x + row[:, None] * columns + place[None, :], mask=inside, other=OTHER)
    missing = tl.sum(tl.where(values != values, 1, 0), axis=1)  # a maximum passes over NaN
    tl.store(out + row, tl.where(missing > 0, float("nan"), tl.max(values, axis=1)), mask=row < rows)


@triton.jit
def softmax(x, out, rows, columns, GUARDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the softmax of each of ``ROWS`` rows to ``out``. Three loops over blocks of ``BLOCK`` columns compute the
    maximum, the sum and the result. If ``GUARDED`` is true, there is no defect. If it is false, there is a defect on
    purpose: the sum also counts the padding of the last block behind the end of a row.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK)
    top = tl.full([ROWS, BLOCK], -float("inf"), tl.float32)
    for first in range(0, columns, BLOCK):
        inside = (row[:, None] < rows) & (first + lanes[None, :] < columns)
        part = tl.load(x + row[:, None] * columns + first + lanes[None, :], mask=inside, other=-float("inf"))
        top = tl.maximum(top, part)
    peak = tl.max(top, axis=1)[:, None]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        inside = (row[:, None] < rows) & (first + lanes[None, :] < columns)
        part = tl.load(x + row[:, None] * columns + first + lanes[None, :], mask=inside, other=0.0)
        part = tl.exp(part - peak)
        # Lanes beyond the row have loaded 0, whose exponential is not 0.
        total += tl.where(inside, part, 0.0) if GUARDED else part
    scale = tl.sum(total, axis=1)[:, None]
    for first in range(0, columns, BLOCK):
        inside = (row[:, None] < rows) & (first + lanes[None, :] < columns)
        place = row[:, None] * columns + first + lanes[None, :]
        part = tl.exp(tl.load(x + place, mask=inside, other=0.0) - peak) / scale
        tl.store(out + place, part, mask=inside)


@triton.jit
def product(a, b, out, M, N, K, BLOCK: tl.constexpr, REST: tl.constexpr):
    """Write one tile of ``BLOCK`` by ``BLOCK`` of ``a @ b`` to ``out``. The loop goes over ``K`` in steps of ``BLOCK``.
    If ``REST`` is true, there is no defect. If it is false, there is a defect on purpose: the mask of the last step
    does not end at ``K``, and the products of the last column of ``a`` are added several times.
    """
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
        total += tl.dot(x, y, input_precision="ieee")
    tl.store(out + rows[:, None] * N + columns[None, :], total, mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def centre(x, out, x_stride, out_stride, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Subtract the mean of each row of ``x`` from that row and write the result to ``out``, for ``ROWS`` rows of at
    most ``BLOCK`` columns. ``x_stride`` and ``out_stride`` are the strides between rows of ``x`` and ``out``.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (place[None, :] < columns)
    values = tl.load(x + row[:, None] * x_stride + place[None, :], mask=inside, other=0.0)
    centred = values - (tl.sum(values, axis=1) / columns)[:, None]
    tl.store(out + row[:, None] * out_stride + place[None, :], centred, mask=inside)


@triton.jit
def accumulate(x, index, out, n, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    """Add ``BLOCK`` elements of the ``n`` elements of ``x`` to ``out`` at the positions ``index``. If ``ATOMIC`` is
    true, there is no defect. If it is false, there is a defect on purpose: if several elements of a block have one
    position, only one of them is added.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    values = tl.load(x + place, mask=inside, other=0.0)
    target = out + tl.load(index + place, mask=inside, other=0)
    if ATOMIC:
        tl.atomic_add(target, values, mask=inside)
    else:
        # Lanes with one target load the same old value, and only one of their stores remains.
        tl.store(target, tl.load(target, mask=inside, other=0.0) + values, mask=inside)


@triton.jit
def norm(x, out, rows, columns, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``ROWS`` rows of ``x``, each less its mean and divided by the root of its variance plus 0.001, to ``out``.
    If ``MASKED`` is true, there is no defect. If it is false, there is a defect on purpose: the variance also counts
    the padding of the block behind the end of a row.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, BLOCK)
    inside = (row[:, None] < rows) & (place[None, :] < columns)
    values = tl.load(x + row[:, None] * columns + place[None, :], mask=inside, other=0.0)
    centred = values - (tl.sum(values, axis=1) / columns)[:, None]
    # Lanes beyond the row hold minus the mean, which the variance must not count.
    if MASKED:
        centred = tl.where(inside, centred, 0.0)
    spread = tl.sum(centred * centred, axis=1) / columns
    result = centred / tl.sqrt(spread + 1e-3)[:, None]
    tl.store(out + row[:, None] * columns + place[None, :], result, mask=inside)


@triton.jit
def grouped(a, b, out, M, N, K, GROUP: tl.constexpr, BLOCK: tl.constexpr, CLIPPED: tl.constexpr):
    """Write one tile of ``BLOCK`` by ``BLOCK`` of ``a @ b`` to ``out``. Programs with neighbouring numbers compute
    tiles of one group of ``GROUP`` rows of tiles. If ``CLIPPED`` is true, the last group may have fewer rows of tiles,
    and there is no defect. If it is false, there is a defect on purpose: it is taken to have ``GROUP``.
    """
    program = tl.program_id(0)
    down, across = tl.cdiv(M, BLOCK), tl.cdiv(N, BLOCK)
    group = program // (GROUP * across)
    first = group * GROUP
    # The last group may have fewer rows of tiles.
    height = tl.minimum(down - first, GROUP) if CLIPPED else GROUP
    tile_m = first + program % (GROUP * across) % height
    tile_n = program % (GROUP * across) // height
    rows = tile_m * BLOCK + tl.arange(0, BLOCK)
    columns = tile_n * BLOCK + tl.arange(0, BLOCK)
    steps = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, K, BLOCK):
        left = (rows[:, None] < M) & (start + steps[None, :] < K)
        right = (start + steps[:, None] < K) & (columns[None, :] < N)
        x = tl.load(a + rows[:, None] * K + (start + steps)[None, :], mask=left, other=0.0)
        y = tl.load(b + (start + steps)[:, None] * N + columns[None, :], mask=right, other=0.0)
        total += tl.dot(x, y, input_precision="ieee")
    tl.store(out + rows[:, None] * N + columns[None, :], total, mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def shift(x, bias, out, rows, columns, OWN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Write ``x`` plus the ``bias`` of each column to ``out``, for a tile of ``ROWS`` by ``BLOCK``. If ``OWN`` is true,
    there is no defect. If it is false, there is a defect on purpose: each tile gets the first ``BLOCK`` elements of
    ``bias``.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK)
    place = tl.program_id(1) * BLOCK + lanes
    inside = (row[:, None] < rows) & (place[None, :] < columns)
    values = tl.load(x + row[:, None] * columns + place[None, :], mask=inside, other=0.0)
    added = tl.load(bias + (place if OWN else lanes), mask=place < columns, other=0.0)
    tl.store(out + row[:, None] * columns + place[None, :], values + added[None, :], mask=inside)
