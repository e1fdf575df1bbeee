"""Right on small inputs, too: buffers, configs, second passes and widths of warps that end somewhere."""

from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import (
    M,
    V,
    attention,
    doubled,
    ordered,
    row_max,
    row_sum,
    scaled,
)
from shiplap_testing.defects.defect import add, c_kernel, kernel, of
from shiplap_testing.defects.witness import close, randn, same, uniform, wide

size = partial(add, "size")


def turned(ns):
    """Declare the op ``turned`` in the namespace ``ns`` and return it. Its reference returns the transpose of ``x``."""

    @sl.op(f"{ns}::turned")
    def turned(x: M) -> Float[Tensor, "c n"]:
        """Return the transpose of ``x``. Kernels of the op are compared with this reference."""
        return x.T

    return turned


def _tiled_transpose(square):
    """Return a kernel function for the op ``turned``, which transposes ``x`` by tiles of 32 by 32. If ``square`` is
    false, there is no defect. If it is true, there is a defect on purpose: it copies as many tiles along columns as
    along rows, as if ``x`` were square.
    """

    def tiled(x, *, out):
        """Write the transpose of ``x`` to ``out``. If ``square`` (argument of ``_tiled_transpose``) is false, there is
        no defect. If it is true, there is a defect on purpose: columns past the number of rows, rounded up to 32, stay
        zero.
        """
        out.zero_()
        n, c = x.shape
        for i in range(0, n, 32):
            for j in range(0, n if square else c, 32):
                out[j : j + 32, i : i + 32] = x[i : i + 32, j : j + 32].T

    return tiled


size(
    "tiled transpose for square matrices",
    "as many tiles across as down: columns past the height, rounded up to 32, are not written",
    of(turned, kernel(_tiled_transpose(True))),
    of(turned, kernel(_tiled_transpose(False))),
    same(lambda: (randn(3, 70),)),
)


def _rows_at_once(whole):
    """Return a function that registers a CPU kernel with the op ``scaled``.

    The kernel has a constant ``ROWS`` with two values, 1 and 4, from which the tuner chooses the faster one. It
    computes that many rows at once. If ``whole`` is true, there is no defect. If it is false, there is a defect on
    purpose: with 4 rows at once, the last rows stay zero.
    """

    def rows_at_once(x, scale, *, out, ROWS):
        """Write ``x * scale`` to ``out``, ``ROWS`` rows at once. If ``whole`` (argument of ``_rows_at_once``) is true,
        there is no defect. If it is false, there is a defect on purpose: rows past the last multiple of ``ROWS`` stay
        zero.
        """
        out.zero_()
        n = x.shape[0]
        for first in range(0, n if whole or ROWS == 1 else n // ROWS * ROWS, ROWS):
            torch.mul(x[first : first + ROWS], scale, out=out[first : first + ROWS])

    def bind(op):
        """Register ``rows_at_once`` with ``op`` as a CPU kernel whose constant ``ROWS`` is 1 or 4. Also set it as
        ``op.rows_at_once``, so that ``_second_config`` can call it.
        """
        op.kernel("cpu", rows_at_once, configs=[{"ROWS": 1}, {"ROWS": 4}])
        # Calls use the first config: the second can only be called by hand.
        op.rows_at_once = rows_at_once

    return bind


def _second_config(op):
    """Return whether ``op.rows_at_once``, a kernel of ``scaled``, is right for 7 rows with its constant ``ROWS`` set to
    4.
    """
    x, out = randn(7, 3), torch.empty(7, 3)
    op.rows_at_once(x, 2.0, out=out, ROWS=4)
    return close(out, x * 2)


size(
    "config of four rows without a tail",
    "the default config is right; one that tuning may choose loses up to three rows",
    of(scaled, _rows_at_once(False)),
    of(scaled, _rows_at_once(True)),
    _second_config,
)


def _attend(pad):
    """Return a kernel function for the op ``attention``. If ``pad`` is false, there is no defect. If it is true, there
    is a defect on purpose: more than 64 keys are padded with zeros to a multiple of 64. These zeros take part in the
    softmax.
    """

    def attend(q, k, v, *, out):
        """Write the attention of ``q`` over ``k`` and ``v`` to ``out``. If ``pad`` (argument of ``_attend``) is false,
        there is no defect. If it is true, there is a defect on purpose: more than 64 keys are padded with zeros, which
        take part in the softmax.
        """
        if pad and len(k) > 64:
            more = -len(k) % 64
            # A score of zero is not the weight zero: the padding takes part in the softmax.
            k, v = (torch.nn.functional.pad(t, (0, 0, 0, more)) for t in (k, v))
        torch.mm(torch.softmax(q @ k.T * q.shape[1] ** -0.5, 1), v, out=out)

    return attend


size(
    "attention to padded keys",
    "keys are padded with zeros to tiles of 64, and the padding takes part in the softmax",
    of(attention, kernel(_attend(True))),
    of(attention, kernel(_attend(False))),
    same(lambda: (randn(5, 8), randn(70, 8, seed=1), randn(70, 8, seed=2))),
)


def best(ns):
    """Declare the op ``best`` in the namespace ``ns`` and return it. Its reference returns the column of the largest
    element of each row of ``x``.
    """

    @sl.op(f"{ns}::best", requires="c >= 1")
    def best(x: M) -> Int64[Tensor, "n"]:
        """Return the position of the largest element of each row. Kernels of the op are compared with this
        reference.
        """
        return x.max(1).indices

    return best


size(
    "positions kept in 16 bits",
    "the position of the largest value is a short, and wraps in rows of more than 32767",
    of(best, kernel(lambda x, *, out: out.copy_(x.max(1).indices.short()))),
    of(best, kernel(lambda x, *, out: out.copy_(x.max(1).indices))),
    same(lambda: (torch.arange(40_000.0).view(1, -1),)),
)


def pooled(ns):
    """Declare the op ``pooled`` in the namespace ``ns`` and return it. Its reference returns the sum of each segment of
    consecutive rows of ``x``. ``lengths`` has the number of rows of each segment.
    """

    @sl.op(f"{ns}::pooled")
    def pooled(x: M, lengths: Int64[Tensor, "s"]) -> Float[Tensor, "s c"]:
        """Return the sum of each segment of consecutive rows of ``x``. ``lengths`` has the number of rows of each
        segment. Kernels of the op are compared with this reference.
        """
        parts = x[: int(lengths.sum())].split(lengths.tolist())
        return torch.stack([part.sum(0) for part in parts]) if len(lengths) else x.new_zeros(0, x.shape[1])

    @pooled.samples
    def _(rng, sizes, dtype, device):
        """Return sample arguments of ``pooled``, which are a random matrix and random lengths of segments. The lengths
        add up to the number of rows.
        """
        n, s = sizes["n"], sizes["s"]
        x = torch.randn(n, sizes["c"], generator=rng).to(device, dtype)
        return x, torch.bincount(torch.randint(0, max(s, 1), (n,), generator=rng), minlength=s)[:s].to(device)

    return pooled


def _segments(limit):
    """Return a kernel function for the op ``pooled``, which sums at most the first ``limit`` rows of each segment. If
    ``limit`` is larger than any segment, there is no defect. Otherwise there is a defect on purpose: later rows of a
    longer segment are left out.
    """

    def segments(x, lengths, *, out):
        """Write the sum of the rows of each segment of ``x`` to ``out``. If a segment is longer than ``limit``
        (argument of ``_segments``), there is a defect on purpose: rows after the first ``limit`` are left out.
        Otherwise there is no defect.
        """
        first = 0
        for i, length in enumerate(lengths.tolist()):
            out[i] = x[first : first + min(length, limit)].sum(0)
            first += length

    return segments


size(
    "segments cut at 128 rows",
    "one block sums a segment, and has a thread for each of its first 128 rows",
    of(pooled, kernel(_segments(128))),
    of(pooled, kernel(_segments(1 << 62))),
    same(lambda: (uniform(300, 2), torch.tensor([10, 290]))),
)


def _row_total(x, *, out):
    """Write the sum of each row to ``out``. This is a kernel of the op ``row_sum`` without a defect."""
    out.copy_(wide(x).sum(1))


def _few_lanes(x, *, out):
    """Write the sum of each row of ``x`` to ``out``. This kernel of ``row_sum`` has a defect on purpose: it computes 32
    partial sums of at most 64 elements each. Columns after the first 2048 are left out.
    """
    lanes = torch.zeros(x.shape[0], 32, dtype=wide(x).dtype)
    for lane in range(32):
        lanes[:, lane] = wide(x[:, lane : 32 * 64 : 32]).sum(1)
    out.copy_(lanes.sum(1))


size(
    "row sum of 64 elements a lane",
    "a warp of 32 lanes makes a fixed number of 64 steps: columns from 2048 on are not read",
    of(row_sum, kernel(_few_lanes)),
    of(row_sum, kernel(_row_total)),
    same(lambda: (uniform(2, 3000),)),
)


def _two_pass_max(last):
    """Return a kernel function for the op ``row_max``. It computes the maximum of each block of 128 columns, then the
    maximum of the first ``last`` of these. If ``last`` is 0, all are compared, and there is no defect. Otherwise there
    is a defect on purpose: later blocks are left out.
    """

    def two_pass(x, *, out):
        """Write the maximum of each row of ``x`` to ``out``. If ``last`` (argument of ``_two_pass_max``) is 0, there is
        no defect. Otherwise there is a defect on purpose: blocks of 128 columns after the first ``last`` blocks are
        left out.
        """
        blocks = [x[:, i : i + 128].amax(1) for i in range(0, x.shape[1], 128)]
        out.copy_(torch.stack(blocks[: last or None]).amax(0))

    return two_pass


size(
    "second pass over 16 blocks",
    "the maxima of blocks of 128 are reduced by a second kernel that reads 16 of them",
    of(row_max, kernel(_two_pass_max(16))),
    of(row_max, kernel(_two_pass_max(0))),
    same(lambda: (torch.arange(2500.0).view(1, -1),)),
)


def _chunks(overlap):
    """Return a kernel function for the op ``doubled``, which doubles 256 rows at a time in place. If ``overlap`` is 0,
    there is no defect. Otherwise there is a defect on purpose: the first ``overlap`` rows of the next 256 are doubled
    as well, and thus twice.
    """

    def chunks(x, *, out):
        """Write ``2 * x`` to ``out``. If ``overlap`` (argument of ``_chunks``) is 0, there is no defect. Otherwise
        there is a defect on purpose: after each 256 rows, the next ``overlap`` rows are doubled twice.
        """
        out.copy_(x)
        n = x.shape[0]
        for first in range(0, n, 256):
            out[first : min(first + 256 + overlap, n)] *= 2

    return chunks


size(
    "tiles that overlap by a row",
    "the bound of a tile is inclusive: row 256 is doubled twice",
    of(doubled, kernel(_chunks(1))),
    of(doubled, kernel(_chunks(0))),
    same(lambda: (randn(400, 2),)),
)


def window(ns):
    """Declare the op ``window`` in the namespace ``ns`` and return it. Its reference returns a vector whose element
    ``i`` is ``x[i - 1] + x[i] + x[i + 1]``. Elements outside of ``x`` count as zero.
    """

    @sl.op(f"{ns}::window")
    def window(x: V) -> V:
        """Return the sum of each element of ``x`` and its two neighbours, with zeros past the ends. Kernels of the op
        are compared with this reference.
        """
        padded = torch.nn.functional.pad(x, (1, 1))
        return padded[:-2] + padded[1:-1] + padded[2:]

    return window


def _stencil(halo):
    """Return a kernel function for the op ``window``. It computes tiles of 256 elements and reads ``halo`` neighbours
    on each side of a tile. If ``halo`` is 1, there is no defect. If it is 0, there is a defect on purpose: neighbours
    in another tile count as zero.
    """

    def stencil(x, *, out):
        """Write the sum of each element of ``x`` and its two neighbours to ``out``. If ``halo`` (argument of
        ``_stencil``) is 1, there is no defect. If it is 0, there is a defect on purpose: neighbours in another tile of
        256 elements count as zero.
        """
        for first in range(0, len(x), 256):
            last = min(first + 256, len(x))
            part = x[max(first - halo, 0) : last + halo]
            part = torch.nn.functional.pad(part, (int(first < halo), int(last + halo > len(x))))
            part = part if halo else torch.nn.functional.pad(x[first:last], (1, 1))
            out[first:last] = part[:-2] + part[1:-1] + part[2:]

    return stencil


size(
    "stencil without a halo",
    "the neighbours across the edge of a tile of 256 count as zero",
    of(window, kernel(_stencil(0))),
    of(window, kernel(_stencil(1))),
    same(lambda: (uniform(300),)),
)


def _padded_sort(filler):
    """Return a kernel function for the op ``ordered``. From 33 elements on, it pads ``x`` with ``filler`` to a power of
    two, sorts, and cuts the end. If ``filler`` is NaN, which sorts last, there is no defect. If it is zero, there is a
    defect on purpose: zeros take the place of the largest elements.
    """

    def padded_sort(x, *, out):
        """Write the elements of ``x`` in ascending order to ``out``. From 33 elements on, ``x`` is padded with
        ``filler`` (argument of ``_padded_sort``). If ``filler`` is NaN, there is no defect. If it is zero, there is a
        defect on purpose: zeros take the place of the largest elements.
        """
        n = len(x)
        # Sorting networks have a power of two of inputs.
        length = 1 << (n - 1).bit_length() if n > 32 else n
        padded = torch.cat([x, x.new_full((length - n,), filler)])
        out.copy_(padded.sort().values[:n])

    return padded_sort


size(
    "sort padded with zeros",
    "the network for powers of two is filled up with zeros, which sort before positive values",
    of(ordered, kernel(_padded_sort(0.0))),
    of(ordered, kernel(_padded_sort(float("nan")))),
    same(lambda: (randn(50),)),
)


def scaled32(ns):
    """Declare the op ``scaled32`` in the namespace ``ns`` and return it. Its reference returns ``x * scale``."""
    from jaxtyping import Float32

    @sl.op(f"{ns}::scaled32")
    def scaled32(x: Float32[Tensor, "n"], scale: float = 2.0) -> Float32[Tensor, "n"]:
        """Return ``x * scale``. Kernels of the op are compared with this reference."""
        return x * scale

    return scaled32


def _unrolled(tail):
    """Return a function that registers a kernel of the op ``scaled32`` in C. From 64 elements on, its loop computes
    eight elements at a time. ``tail`` is a C expression for the index of the first element after this loop. If it is
    ``n & ~7``, there is no defect. If it is one larger, there is a defect on purpose: an element is left out.
    """
    return c_kernel(f"""
int scaled32(const sl_context* ctx, const DLTensor* x, DLTensor* out, double scale) {{
  const float* from = x->data; float* to = out->data; const float s = (float)scale;
  const int64_t n = x->shape[0]; int64_t i = 0;
  if (n >= 64)
    for (; i + 8 <= n; i += 8)
      for (int j = 0; j < 8; ++j) to[i + j] = from[i + j] * s;
  for (i = n >= 64 ? {tail} : 0; i < n; ++i) to[i] = from[i] * s;
  return SL_OK;
}}""")


size(
    "C: tail after an unrolled loop begins one late",
    "from 64 elements on, the first one of the tail is skipped",
    of(scaled32, _unrolled("(n & ~7) + 1")),
    of(scaled32, _unrolled("(n & ~7)")),
    same(lambda: (torch.full((103,), 3.0), 2.0)),
    needs=["compiler"],
)
