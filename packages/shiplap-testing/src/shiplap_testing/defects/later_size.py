"""Later ones: right within one tile, one chunk or one group."""

from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, attention, doubled, gather, matmul, rms_norm, softmax
from shiplap_testing.defects.defect import add, c_kernel, kernel, of
from shiplap_testing.defects.values_float import filled
from shiplap_testing.defects.witness import randn, same, uniform, wide

size = partial(add, "size", later=True)


def _online(rescaled):
    """Return a function that registers a kernel of the op ``softmax``. The kernel keeps a running sum of exponentials
    over chunks of 128 columns. If ``rescaled`` is true, there is no defect. If it is false, there is a defect on
    purpose: the sum is not rescaled when a later chunk has a larger maximum.
    """

    def online(x):
        """Return the softmax of each row of ``x``, with a running sum of exponentials over chunks of 128 columns.

        If ``rescaled`` (argument of ``_online``) is true, there is no defect. If it is false, there is a defect on
        purpose: the sum is not rescaled when a later chunk has a larger maximum.
        """
        y = wide(x)
        top, total = y.new_full((len(y), 1), -torch.inf), y.new_zeros(len(y), 1)
        for part in y.split(128, 1):
            new = torch.maximum(top, part.amax(1, keepdim=True)) if part.shape[1] else top
            # Minus infinity less itself would be NaN in a row that begins with masked elements.
            safe = torch.where(new.isinf() & (new < 0), 0, new)
            total = total * (torch.exp(top - safe) if rescaled else 1) + torch.exp(part - safe).sum(1, keepdim=True)
            top = new
        # Infinities and NaN are left to torch, so that the defect shows in the size alone.
        return torch.softmax(y, 1) if (top.isinf() | top.isnan()).any() else torch.exp(y - top) / total

    return filled(online)


size(
    "online softmax that does not rescale",
    "the sum of the first chunks stays as it is when a later chunk of 128 has a larger maximum",
    of(softmax, _online(False)),
    of(softmax, _online(True)),
    same(lambda: (torch.arange(300.0)[None] / 100,)),
)


def mm32(ns):
    """Declare the op ``mm32`` in the namespace ``ns`` and return it. Its reference returns the matrix product ``a @ b``
    in float32.
    """

    @sl.op(f"{ns}::mm32")
    def mm32(a: Float32[Tensor, "m k"], b: Float32[Tensor, "k n"]) -> Float32[Tensor, "m n"]:
        """Return the matrix product ``a @ b`` in float32. Kernels of the op are compared with this reference."""
        return a @ b

    return mm32


def _stepped(rest):
    """Return a function that registers a kernel of the op ``mm32`` in C. From a ``k`` of 48 on, the kernel sums over
    ``k`` in steps of 16. ``rest`` is the condition, in C, of the loop over the elements after the last whole step. If
    it is ``p < k``, there is no defect. If it is ``0``, there is a defect on purpose: these elements are left out.
    """
    return c_kernel(f"""
int mm32(const sl_context* ctx, const DLTensor* a, const DLTensor* b, DLTensor* out) {{
  const float *A = a->data, *B = b->data; float* C = out->data;
  const int64_t m = a->shape[0], k = a->shape[1], n = b->shape[1];
  for (int64_t i = 0; i < m; ++i) for (int64_t j = 0; j < n; ++j) {{
    double sum = 0; int64_t p = 0;
    if (k < 48) for (; p < k; ++p) sum += (double)A[i * k + p] * B[p * n + j];
    for (; p + 16 <= k; p += 16) for (int64_t q = p; q < p + 16; ++q) sum += (double)A[i * k + q] * B[q * n + j];
    for (; {rest}; ++p) sum += (double)A[i * k + p] * B[p * n + j];
    C[i * n + j] = (float)sum;
  }}
  return SL_OK;
}}""")


size(
    "C: k loop of whole steps",
    "from 48 on, k is walked in steps of 16 and what is left is dropped",
    of(mm32, _stepped("0")),
    of(mm32, _stepped("p < k")),
    same(lambda: (uniform(2, 50), uniform(50, 3, seed=1))),
    needs=["compiler"],
)


def sum32(ns):
    """Declare the op ``sum32`` in the namespace ``ns`` and return it. Its reference returns the sum of each row of
    ``x``.
    """

    @sl.op(f"{ns}::sum32")
    def sum32(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n"]:
        """Return the sum of each row of ``x``. Kernels of the op are compared with this reference."""
        return x.sum(1)

    return sum32


def _static(limit):
    """Return a function that registers a kernel of the op ``sum32`` in C. The kernel copies each row to a buffer, 1024
    numbers at a time, and sums the buffer. ``limit`` is a C expression for the number of columns to sum. If it is
    ``c``, there is no defect. If it is at most 1024, there is a defect on purpose: later columns are left out.
    """
    return c_kernel(f"""
int sum32(const sl_context* ctx, const DLTensor* x, DLTensor* out) {{
  float row[1024]; const float* from = x->data; float* to = out->data;
  const int64_t c = x->shape[1];
  for (int64_t i = 0; i < x->shape[0]; ++i) {{
    double total = 0;
    for (int64_t start = 0; start < {limit}; start += 1024) {{
      const int64_t width = c - start < 1024 ? c - start : 1024;
      for (int64_t j = 0; j < width; ++j) row[j] = from[i * c + start + j];
      for (int64_t j = 0; j < width; ++j) total += row[j];
    }}
    to[i] = (float)total;
  }}
  return SL_OK;
}}""")


size(
    "C: buffer of 1024 columns",
    "a row is staged through a buffer, once",
    of(sum32, _static("(c < 1024 ? c : 1024)")),
    of(sum32, _static("c")),
    same(lambda: (uniform(2, 1500),)),
    needs=["compiler"],
)


def doubled32(ns):
    """Declare the op ``doubled32`` in the namespace ``ns`` and return it. Its reference returns ``2 * x``."""

    @sl.op(f"{ns}::doubled32")
    def doubled32(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n c"]:
        """Return ``2 * x``. Kernels of the op are compared with this reference."""
        return x * 2

    return doubled32


def _counter(kind):
    """Return a function that registers a kernel of the op ``doubled32`` in C. The kernel counts rows in the C type
    ``kind``. If it is ``int64_t``, there is no defect. If it is ``unsigned char``, there is a defect on purpose: the
    count wraps, and row 256 is computed from row 0.
    """
    return c_kernel(f"""
int doubled32(const sl_context* ctx, const DLTensor* x, DLTensor* out) {{
  const float* from = x->data; float* to = out->data; const int64_t n = x->shape[0], c = x->shape[1];
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < c; ++j) {{ const {kind} row = ({kind})i; to[i * c + j] = 2 * from[(int64_t)row * c + j]; }}
  return SL_OK;
}}""")


size(
    "C: row number in a byte",
    "row 256 reads row 0",
    of(doubled32, _counter("unsigned char")),
    of(doubled32, _counter("int64_t")),
    same(lambda: (randn(300, 2),)),
    needs=["compiler"],
)


def heads(ns):
    """Declare the op ``heads`` in the namespace ``ns`` and return it. Its reference returns ``x`` with head ``h``, the
    slice at index ``h`` of the second dim, multiplied by ``scale[h]``.
    """

    @sl.op(f"{ns}::heads")
    def heads(x: Float[Tensor, "b h s"], scale: Float[Tensor, "h"]) -> Float[Tensor, "b h s"]:
        """Return ``x`` times the scale of its head, which is the second dim of ``x``. Kernels of the op are compared
        with this reference.
        """
        return x * scale[:, None]

    return heads


def _sixteen(all_heads):
    """Return a function that registers a kernel of the op ``heads``, which multiplies each head of ``x`` by its scale.
    If ``all_heads`` is true, there is no defect. If it is false, there is a defect on purpose: from the seventeenth
    head on, the scales of the first sixteen are repeated.
    """

    def fill(x, scale, *, out):
        """Write ``x`` with each head multiplied by its ``scale`` to ``out``. If ``all_heads`` (argument of
        ``_sixteen``) is true, there is no defect. If it is false, there is a defect on purpose: head ``16 + i`` gets
        the scale of head ``i``.
        """
        torch.mul(x, scale[:, None], out=out)
        if not all_heads:
            out[:, 16:] = x[:, 16:] * scale[:16].repeat(8)[: max(x.shape[1] - 16, 0)][:, None]

    return kernel(fill)


size(
    "scales of sixteen heads",
    "the scales lie in shared memory for sixteen heads; head 16 takes that of head 0",
    of(heads, _sixteen(False)),
    of(heads, _sixteen(True)),
    same(lambda: (randn(1, 20, 3), randn(20, seed=1))),
)


def _aligned_only(right):
    """Return a function that registers a second kernel of the op ``rms_norm``.

    This kernel is used for rows of at least 320 columns whose number is a multiple of 16. If ``right`` is true, there
    is no defect. If it is false, there is a defect on purpose: the mean square lacks the last 16 columns.
    """

    def wide_rows(x, eps, *, out):
        """Write the RMS norm of each row of ``x`` to ``out``, with ``eps`` added to the mean square. If ``right``
        (argument of ``_aligned_only``) is true, there is no defect. If it is false, there is a defect on purpose: the
        mean square lacks the last 16 columns.
        """
        y = wide(x)
        mean = y.square().mean(1, keepdim=True) if right else y[:, :-16].square().sum(1, keepdim=True) / y.shape[1]
        out.copy_(y * torch.rsqrt(mean + eps))

    # A second kernel: it is called only where ``supports`` is true, and the general one elsewhere.
    return kernel(wide_rows, name="wide", supports=lambda x, eps: x.shape[1] >= 320 and x.shape[1] % 16 == 0)


def _rms(x, eps, *, out):
    """Write the RMS norm of each row of ``x`` to ``out``, with ``eps`` added to the mean square. This is a sound kernel
    of the op ``rms_norm``.
    """
    y = wide(x)
    out.copy_(y * torch.rsqrt(y.square().mean(1, keepdim=True) + eps))


size(
    "kernel for wide aligned rows that loses a step",
    "chosen from 320 columns on, where their number is a multiple of 16; its last step is not summed",
    of(rms_norm, kernel(_rms, name="any"), _aligned_only(False)),
    of(rms_norm, kernel(_rms, name="any"), _aligned_only(True)),
    same(lambda: (uniform(2, 320) + 1, 1e-6)),
)


def grouped(ns):
    """Declare the op ``grouped`` in the namespace ``ns`` and return it. Its reference returns ``x`` with its columns in
    ``groups`` equal blocks, where block ``g`` is multiplied by ``scale[g]``.
    """

    @sl.op(f"{ns}::grouped", requires=("groups >= 1", "c % groups == 0"))
    def grouped(x: M, scale: Float[Tensor, "groups"], groups: int = 2) -> M:
        """Return ``x`` with its columns in ``groups`` equal blocks, where block ``g`` is multiplied by ``scale[g]``.
        Kernels of the op are compared with this reference.
        """
        return x * scale.repeat_interleave(x.shape[1] // groups)

    return grouped


size(
    "groups that alternate",
    "channel i belongs to group i // (c / groups), not to i % groups",
    of(grouped, filled(lambda x, scale, groups: x * scale.repeat(x.shape[1] // groups))),
    of(grouped, filled(lambda x, scale, groups: x * scale.repeat_interleave(x.shape[1] // groups))),
    same(lambda: (randn(2, 6), randn(2, seed=1), 2)),
)


def _flash(rescaled):
    """Return a function that registers a kernel of the op ``attention``. The kernel reads each block of 64 keys once
    and keeps a running sum of weighted values. If ``rescaled`` is true, there is no defect. If it is false, there is a
    defect on purpose: that sum is not rescaled when a later block has a larger score.
    """

    def flash(q, k, v, *, out):
        """Write the attention of ``q`` over ``k`` and ``v`` to ``out``, computed by blocks of 64 keys.

        If ``rescaled`` (argument of ``_flash``) is true, there is no defect. If it is false, there is a defect on
        purpose: the running sum of weighted values is not rescaled when a later block has a larger score.
        """
        q, k, v = wide(q) * q.shape[1] ** -0.5, wide(k), wide(v)
        # Infinities and NaN are left to torch, so that the defect shows in the size alone.
        if not (q.isfinite().all() and k.isfinite().all() and v.isfinite().all()):
            out.copy_(torch.softmax(q @ k.T, 1) @ v)
            return
        top, total = q.new_full((len(q), 1), -torch.inf), q.new_zeros(len(q), 1)
        sums = q.new_zeros(len(q), v.shape[1])
        for keys, values in zip(k.split(64), v.split(64), strict=True):
            score = q @ keys.T
            new = torch.maximum(top, score.amax(1, keepdim=True))
            weight, old = torch.exp(score - new), torch.exp(top - new)
            total = total * old + weight.sum(1, keepdim=True)
            sums = sums * (old if rescaled else 1) + weight @ values
            top = new
        out.copy_(sums / total)

    return kernel(flash)


size(
    "attention that rescales the sum and not the values",
    "when a later block of 64 keys has a larger score, the values summed so far keep their weight",
    of(attention, _flash(False)),
    of(attention, _flash(True)),
    same(lambda: (uniform(3, 4), uniform(200, 4, seed=1) * torch.arange(200)[:, None] / 50, uniform(200, 5, seed=2))),
)


def _prefetched(last):
    """Return a function that registers a kernel of the op ``gather``. The kernel reads 96 indices at a time. If
    ``last`` is true, there is no defect. If it is false, there is a defect on purpose: if fewer than 96 indices are
    left at the end, as many from the start of the 96 before are used instead.
    """

    def fill(x, index, *, out):
        """Write the rows of ``x`` at ``index`` to ``out``, with zeros for -1. If ``last`` (argument of ``_prefetched``)
        is true, there is no defect. If it is false, there is a defect on purpose: if fewer than 96 indices are left at
        the end, as many from the start of the 96 before are used instead.
        """
        table = torch.cat([x, x.new_zeros(1, x.shape[1])])
        for start in range(0, len(index), 96):
            part = index[start : start + 96]
            if not last and start and len(part) < 96:
                part = index[start - 96 : start][: len(part)]  # the prefetch of the last part never came
            out[start : start + 96] = table[part]

    return kernel(fill)


size(
    "gather whose last prefetch is missing",
    "a last part of less than 96 indices is answered with those of the part before",
    of(gather, _prefetched(False)),
    of(gather, _prefetched(True)),
    same(lambda: (randn(9, 2), torch.arange(130) % 9)),
)


def _mean_of_shares(own):
    """Return a function that registers a kernel of the op ``column_mean``. If ``own`` is true, there is no defect. If
    it is false, there is a defect on purpose: the result is the mean of the means of several shares of rows, one for
    each thread of torch. It is wrong if the shares have different numbers of rows.
    """

    def fill(x):
        """Return the mean of each column of ``x``. If ``own`` (argument of ``_mean_of_shares``) is true, there is no
        defect. If it is false, there is a defect on purpose: the result is the mean of the means of several shares of
        rows. It is wrong if the shares have different numbers of rows.
        """
        y = wide(x)
        # The shares of tensor_split differ in size by one row at most.
        shares = y.tensor_split(max(1, min(torch.get_num_threads(), len(y))))
        if own or len(shares) == 1:
            return y.mean(0)
        return torch.stack([s.mean(0) for s in shares]).mean(0)

    return filled(fill)


def column_mean(ns):
    """Declare the op ``column_mean`` in the namespace ``ns`` and return it. Its reference returns the mean of each
    column of ``x``.
    """

    @sl.op(f"{ns}::column_mean", requires="n >= 1")
    def column_mean(x: M) -> Float[Tensor, "c"]:
        """Return the mean of each column of ``x``. Kernels of the op are compared with this reference."""
        return x.mean(0)

    return column_mean


def _with_three_threads(op):
    """Return whether ``op`` (``column_mean``) agrees with its reference on 7 rows while torch has three threads. The
    number of threads is restored afterwards.
    """
    before = torch.get_num_threads()
    # Seven rows cannot be shared equally among three threads.
    torch.set_num_threads(3)
    try:
        return same(lambda: (uniform(7, 2),))(op)
    finally:
        torch.set_num_threads(before)


size(
    "mean of the means of threads",
    "right where each thread has as many rows as the others",
    of(column_mean, _mean_of_shares(False)),
    of(column_mean, _mean_of_shares(True)),
    _with_three_threads,
)


def segments(ns):
    """Declare the op ``segments`` in the namespace ``ns`` and return it. Its reference returns a matrix of sums, whose
    row ``i`` is the sum of the rows of ``x`` from ``ends[i]`` to ``ends[i + 1] - 1``.
    """

    @sl.op(f"{ns}::segments", dims={"s": "p - 1"}, requires="p >= 2")
    def segments(x: M, ends: Int64[Tensor, "p"]) -> Float[Tensor, "s c"]:
        """Return, for each pair of neighbours in ``ends``, the sum of the rows of ``x`` from the first end up to the
        second. Kernels of the op are compared with this reference.
        """
        cut = ends.clamp(0, x.shape[0])
        rows = [wide(x)[a:b].sum(0) for a, b in pairwise(cut.tolist())]
        return torch.stack(rows).to(x.dtype)

    @segments.samples
    def _(rng, sizes, dtype, device):
        """Return sample arguments of ``segments``, which are a random matrix and a random ascending vector of ends of
        segments.
        """
        x = torch.randn(sizes["n"], sizes["c"], generator=rng).to(device, dtype)
        return x, torch.randint(0, sizes["n"] + 1, (sizes["p"],), generator=rng).sort().values.to(device)

    return segments


def _reduced(guarded):
    """Return a function that registers a kernel of the op ``segments``. If ``guarded`` is true, there is no defect. If
    it is false, there is a defect on purpose: the sum of an empty segment is the row at its start instead of zeros.
    """

    def fill(x, ends, *, out):
        """Write the sum of the rows of each segment of ``x`` to ``out``. If ``guarded`` (argument of ``_reduced``) is
        true, there is no defect. If it is false, there is a defect on purpose: the sum of an empty segment is the row
        at its start.
        """
        cut = ends.clamp(0, x.shape[0]).tolist()
        for i, (a, b) in enumerate(pairwise(cut)):
            out[i] = wide(x)[a : b if guarded else max(b, a + 1)].sum(0)

    return kernel(fill)


size(
    "empty segment that takes a row",
    "as in NumPy's reduceat: where a segment is empty, its first row is the next one's",
    of(segments, _reduced(False)),
    of(segments, _reduced(True)),
    same(lambda: (uniform(5, 2), torch.tensor([0, 2, 2, 5]))),
)


def _in_halves(odd):
    """Return a function that registers a kernel of the op ``doubled``. The kernel computes the first and the second
    half of the rows one after the other.

    If ``odd`` is true, there is no defect. If it is false, there is a defect on purpose: the last row may be computed
    from the last but one. This happens for more than 200 rows, if their number is ``4 * n + 3``.
    """

    def fill(x, *, out):
        """Write ``2 * x`` to ``out``.

        If ``odd`` (argument of ``_in_halves``) is true, there is no defect. If it is false, there is a defect on
        purpose: the last row may be twice the last but one of ``x``. This happens for more than 200 rows, if their
        number is ``4 * n + 3``.
        """
        half = len(x) // 2
        torch.mul(x[:half], 2, out=out[:half])
        torch.mul(x[half:], 2, out=out[half:])
        # Up to 200 rows the result is right: the path with four rows a warp is for large inputs.
        if not odd and len(x) > 200 and len(x) % 4 == 3:
            out[-1] = x[-2] * 2

    return kernel(fill)


size(
    "last row of 4n + 3 rows",
    "four rows a warp, from 200 rows on: the third of an unfinished warp takes its neighbour's",
    of(doubled, _in_halves(False)),
    of(doubled, _in_halves(True)),
    same(lambda: (randn(203, 2),)),
)


def _two_halves_of_k(both):
    """Return a function that registers a kernel of the op ``mm``, the matrix product ``a @ b``. From a ``k`` of 512 on,
    the kernel adds the products of the first and the second half of ``k``.

    If ``both`` is true, the halves cover ``k``, and there is no defect. If it is false, there is a defect on purpose:
    the length of each half is rounded down to a multiple of 32, and the middle of ``k`` is left out.
    """

    def fill(a, b):
        """Return ``a @ b``.

        If ``both`` (argument of ``_two_halves_of_k``) is true, there is no defect. If it is false, there is a defect on
        purpose: from a ``k`` of 512 on, elements in the middle of ``k`` may not be summed.
        """
        k = a.shape[1]
        if k < 512:
            return a @ b
        # Rounded down so that each part is a whole number of steps of 32.
        half = k // 2 if both else k // 2 - k // 2 % 32
        return (
            wide(a)[:, :half] @ wide(b)[:half]
            + wide(a)[:, k - half - k % 2 * both :] @ wide(b)[k - half - k % 2 * both :]
        )

    return filled(fill)


size(
    "split-K that leaves the middle out",
    "from 512 on, k is cut into two parts whose length is rounded down to 32",
    of(matmul, _two_halves_of_k(False)),
    of(matmul, _two_halves_of_k(True)),
    same(lambda: (uniform(2, 600), uniform(600, 3, seed=1))),
)
