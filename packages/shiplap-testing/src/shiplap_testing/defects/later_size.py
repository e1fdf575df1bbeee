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
    def online(x):
        y = wide(x)
        top, total = y.new_full((len(y), 1), -torch.inf), y.new_zeros(len(y), 1)
        for part in y.split(128, 1):
            new = torch.maximum(top, part.amax(1, keepdim=True)) if part.shape[1] else top
            safe = torch.where(new.isinf() & (new < 0), 0, new)
            total = total * (torch.exp(top - safe) if rescaled else 1) + torch.exp(part - safe).sum(1, keepdim=True)
            top = new
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
    @sl.op(f"{ns}::mm32")
    def mm32(a: Float32[Tensor, "m k"], b: Float32[Tensor, "k n"]) -> Float32[Tensor, "m n"]:
        return a @ b

    return mm32


def _stepped(rest):
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
    @sl.op(f"{ns}::sum32")
    def sum32(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n"]:
        return x.sum(1)

    return sum32


def _static(limit):
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
    @sl.op(f"{ns}::doubled32")
    def doubled32(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n c"]:
        return x * 2

    return doubled32


def _counter(kind):
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
    @sl.op(f"{ns}::heads")
    def heads(x: Float[Tensor, "b h s"], scale: Float[Tensor, "h"]) -> Float[Tensor, "b h s"]:
        return x * scale[:, None]

    return heads


def _sixteen(all_heads):
    def fill(x, scale, *, out):
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
    def wide_rows(x, eps, *, out):
        y = wide(x)
        mean = y.square().mean(1, keepdim=True) if right else y[:, :-16].square().sum(1, keepdim=True) / y.shape[1]
        out.copy_(y * torch.rsqrt(mean + eps))

    return kernel(wide_rows, name="wide", supports=lambda x, eps: x.shape[1] >= 320 and x.shape[1] % 16 == 0)


def _rms(x, eps, *, out):
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
    @sl.op(f"{ns}::grouped", requires=("groups >= 1", "c % groups == 0"))
    def grouped(x: M, scale: Float[Tensor, "groups"], groups: int = 2) -> M:
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
    def flash(q, k, v, *, out):
        q, k, v = wide(q) * q.shape[1] ** -0.5, wide(k), wide(v)
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
    def fill(x, index, *, out):
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


def _shares(own):
    """The mean of the means of each thread, as large as the shares may be."""

    def fill(x):
        y = wide(x)
        shares = y.tensor_split(max(1, min(torch.get_num_threads(), len(y))))
        if own or len(shares) == 1:
            return y.mean(0)
        return torch.stack([s.mean(0) for s in shares]).mean(0)

    return filled(fill)


def column_mean(ns):
    @sl.op(f"{ns}::column_mean", requires="n >= 1")
    def column_mean(x: M) -> Float[Tensor, "c"]:
        return x.mean(0)

    return column_mean


def _with_three_threads(op):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        return same(lambda: (uniform(7, 2),))(op)
    finally:
        torch.set_num_threads(before)


size(
    "mean of the means of threads",
    "right where each thread has as many rows as the others",
    of(column_mean, _shares(False)),
    of(column_mean, _shares(True)),
    _with_three_threads,
)


def segments(ns):
    @sl.op(f"{ns}::segments", dims={"s": "p - 1"}, requires="p >= 2")
    def segments(x: M, ends: Int64[Tensor, "p"]) -> Float[Tensor, "s c"]:
        cut = ends.clamp(0, x.shape[0])
        rows = [wide(x)[a:b].sum(0) for a, b in pairwise(cut.tolist())]
        return torch.stack(rows).to(x.dtype)

    @segments.samples
    def _(rng, sizes, dtype, device):
        x = torch.randn(sizes["n"], sizes["c"], generator=rng).to(device, dtype)
        return x, torch.randint(0, sizes["n"] + 1, (sizes["p"],), generator=rng).sort().values.to(device)

    return segments


def _reduced(guarded):
    def fill(x, ends, *, out):
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
    def fill(x, *, out):
        half = len(x) // 2
        torch.mul(x[:half], 2, out=out[:half])
        torch.mul(x[half:], 2, out=out[half:])
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
    def fill(a, b):
        k = a.shape[1]
        if k < 512:
            return a @ b
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
