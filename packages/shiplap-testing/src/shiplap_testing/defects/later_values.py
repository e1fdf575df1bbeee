"""Later ones: right for ordinary numbers."""

from functools import partial

import torch
from jaxtyping import Float, Float16, Float32, Int8, Int64, UInt8
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, scaled
from shiplap_testing.defects.defect import add, c_kernel, kernel, of
from shiplap_testing.defects.values_float import binary, filled, unary
from shiplap_testing.defects.witness import close, ints, randn, same, uniform, wide

values = partial(add, "values", later=True)
scalars = partial(add, "scalars", later=True)
promotion = partial(add, "promotion", later=True)

values(
    "truncation through integers",
    "what is beyond 2^63, NaN, or minus zero does not come back from an integer",
    of(unary("truncated", torch.trunc), filled(lambda x: x.long().to(x.dtype))),
    of(unary("truncated", torch.trunc), filled(torch.trunc)),
    same(lambda: (torch.tensor([[1.5, 1e20]]),)),
)


values(
    "halves rounded away from zero",
    "C's roundf, where torch rounds halves to even",
    of(unary("rounded", torch.round), filled(lambda x: (x.abs() + 0.5).floor().copysign(x))),
    of(unary("rounded", torch.round), filled(torch.round)),
    same(lambda: (torch.tensor([[0.5, 1.5]]),)),
)


def peaked(ns):
    """Declare the op ``peaked`` in the namespace ``ns`` and return it. Its reference returns ``x`` divided by the
    largest magnitude of its row.
    """

    @sl.op(f"{ns}::peaked", requires="c >= 1")
    def peaked(x: M) -> M:
        """Return ``x`` divided by the largest magnitude of its row. Kernels of the op are compared with this
        reference.
        """
        return x / x.abs().amax(1, keepdim=True)

    return peaked


values(
    "division by a reciprocal",
    "one over a denormal number is infinite",
    of(peaked, filled(lambda x: x * (1 / x.abs().amax(1, keepdim=True)))),
    of(peaked, filled(lambda x: x / x.abs().amax(1, keepdim=True))),
    same(lambda: (torch.tensor([[1e-40, 5e-41]]),)),
)


def _quantised(ns):
    """Declare the op ``quantised`` in the namespace ``ns`` and return it. Its reference rounds ``16 * x`` to integers,
    adds ``zero``, and returns the sum clamped to the range of int8.
    """

    @sl.op(f"{ns}::quantised")
    def quantised(x: Float[Tensor, "n c"], zero: int = 0) -> Int8[Tensor, "n c"]:
        """Return ``16 * x`` rounded, plus the zero point ``zero``, clamped to the range of int8. Kernels of the op are
        compared with this reference.
        """
        return (torch.nan_to_num(wide(x) * 16).round().clamp(-1e6, 1e6) + zero).clamp(-128, 127).to(torch.int8)

    return quantised


def _saturated_late(right):
    """Return a function that registers a kernel of the op ``quantised``. If ``right`` is true, there is no defect. If
    it is false, there is a defect on purpose: numbers are clamped before ``zero`` is added, and the sum wraps around.
    """

    def fill(x, zero):
        """Return ``16 * x`` rounded plus ``zero``, clamped to the range of int8. If ``right`` (argument of
        ``_saturated_late``) is true, there is no defect. If it is false, there is a defect on purpose: a number near
        the ends of the range wraps around when ``zero`` is added.
        """
        y = torch.nan_to_num(wide(x) * 16).round()
        if right:
            return (y.clamp(-1e6, 1e6) + zero).clamp(-128, 127).to(torch.int8)
        return (y.clamp(-128, 127) + zero).long().to(torch.int8)

    return filled(fill)


values(
    "int8 saturated before the zero point",
    "the zero point is added to what was saturated, and wraps",
    of(_quantised, _saturated_late(False)),
    of(_quantised, _saturated_late(True)),
    same(lambda: (torch.tensor([[100.0, -100.0]]), 3)),
)


def nibbles(ns):
    """Declare the op ``nibbles`` in the namespace ``ns`` and return it. Its reference takes the high four bits of each
    byte of ``x`` as a signed number and returns this number times ``scale``, in float32.
    """

    @sl.op(f"{ns}::nibbles")
    def nibbles(x: UInt8[Tensor, "n c"], scale: float = 1.0) -> Float32[Tensor, "n c"]:
        """Return the high four bits of each byte of ``x`` as a signed number, times ``scale``. Kernels of the op are
        compared with this reference.
        """
        high = (x >> 4).to(torch.int8)
        return torch.where(high > 7, high - 16, high).float() * scale

    return nibbles


values(
    "nibble without its sign",
    "the high four bits of a byte, of which those above 7 stand for negative numbers",
    of(nibbles, filled(lambda x, scale: (x >> 4).float() * scale)),
    of(nibbles, filled(lambda x, scale: ((x.to(torch.int8)) >> 4).float() * scale)),
    same(lambda: (torch.tensor([[15, 240]], dtype=torch.uint8), 1.0)),
)
values(
    "integers multiplied as doubles",
    "beyond 2^53 a double has no room for the last bits",
    of(unary("tripled", lambda x: x * 3, Int64[Tensor, "n"]), filled(lambda x: (x.double() * 3).long())),
    of(unary("tripled", lambda x: x * 3, Int64[Tensor, "n"]), filled(lambda x: x + x + x)),
    same(lambda: (torch.tensor([2**55 + 1, 3]),)),
)
values(
    "sum of logarithms of two infinities",
    "the difference of the two is NaN",
    of(
        binary("logadd", torch.logaddexp),
        filled(lambda x, y: torch.maximum(x, y) + torch.log1p(torch.exp(-(wide(x) - wide(y)).abs())).to(x.dtype)),
    ),
    of(binary("logadd", torch.logaddexp), filled(lambda x, y: torch.logaddexp(wide(x), wide(y)).to(x.dtype))),
    same(lambda: (torch.full((1, 2), float("inf")), torch.full((1, 2), float("inf")))),
)


def highest(ns):
    """Declare the op ``highest`` in the namespace ``ns`` and return it. Its reference returns the column of the maximum
    of each row of ``x``. For a row with NaN, it is the column of the first NaN.
    """

    @sl.op(f"{ns}::highest", requires="c >= 1")
    def highest(x: M) -> Int64[Tensor, "n"]:
        """Return the position of the maximum of each row, or of the first NaN. Kernels of the op are compared with this
        reference.
        """
        return x.argmax(1)

    return highest


values(
    "place of the maximum that passes over NaN",
    "no comparison with NaN is true; torch says where the first NaN is",
    of(highest, filled(lambda x: torch.where(x.isnan(), -torch.inf, x).argmax(1))),
    of(highest, filled(lambda x: x.argmax(1))),
    same(lambda: (torch.tensor([[1.0, float("nan"), 2.0]]),)),
)


def brightest(ns):
    """Declare the op ``brightest`` in the namespace ``ns`` and return it. Its reference returns the largest byte of
    each row.
    """

    @sl.op(f"{ns}::brightest", requires="c >= 1")
    def brightest(x: UInt8[Tensor, "n c"]) -> UInt8[Tensor, "n"]:
        """Return the largest byte of each row. Kernels of the op are compared with this reference."""
        return x.amax(1)

    return brightest


def _bytes(kind):
    """Return a function that registers a kernel of the op ``brightest`` in C. The kernel compares bytes as numbers of
    the C type ``kind``. If it is ``unsigned char``, there is no defect. If it is ``signed char``, there is a defect on
    purpose: bytes above 127 count as negative.
    """
    return c_kernel(f"""
int brightest(const sl_context* ctx, const DLTensor* x, DLTensor* out) {{
  const {kind}* from = x->data; {kind}* to = out->data; const int64_t c = x->shape[1];
  for (int64_t i = 0; i < x->shape[0]; ++i) {{
    {kind} top = from[i * c];
    for (int64_t j = 1; j < c; ++j) if (from[i * c + j] > top) top = from[i * c + j];
    to[i] = top;
  }}
  return SL_OK;
}}""")


values(
    "C: pixels compared as signed bytes",
    "what is above 127 is less than zero",
    of(brightest, _bytes("signed char")),
    of(brightest, _bytes("unsigned char")),
    same(lambda: (torch.tensor([[3, 200]], dtype=torch.uint8),)),
    needs=["compiler"],
)


def attended(ns):
    """Declare the op ``attended`` in the namespace ``ns`` and return it. Its reference returns the attention of the
    queries ``q`` over the keys ``k`` and values ``v``, computed in float32, or in float64 for float64.
    """

    @sl.op(f"{ns}::attended", requires=("n >= 1", "d >= 1"))
    def attended(q: Float[Tensor, "m d"], k: Float[Tensor, "n d"], v: Float[Tensor, "n e"]) -> Float[Tensor, "m e"]:
        """Return the attention of the queries ``q`` over the keys ``k`` and values ``v``, computed in a wide dtype.
        Kernels of the op are compared with this reference.
        """
        scores = wide(q) @ wide(k).T * q.shape[1] ** -0.5
        return (torch.softmax(scores, 1) @ wide(v)).to(v.dtype)

    return attended


def _scores_in_half(early):
    """Return a function that registers a kernel of the op ``attended``. If ``early`` is true, ``q`` is scaled before
    the product with ``k``, and there is no defect. If it is false, there is a defect on purpose: scores are stored in
    the dtype of ``q`` before they are scaled. They overflow in half precision.
    """

    def fill(q, k, v, *, out):
        """Write the attention of ``q`` over ``k`` and ``v`` to ``out``. If ``early`` (argument of ``_scores_in_half``)
        is true, there is no defect. If it is false, there is a defect on purpose: scores are stored in the dtype of
        ``q`` before they are scaled, and overflow in half precision.
        """
        if early:
            scores = wide(q) * q.shape[1] ** -0.5 @ wide(k).T
        else:
            scores = wide((wide(q) @ wide(k).T).to(q.dtype)) * q.shape[1] ** -0.5
        out.copy_(torch.softmax(scores, 1) @ wide(v))

    return kernel(fill)


values(
    "attention scores kept in the dtype of the queries",
    "the product is stored before it is scaled, and is infinite in half precision",
    of(attended, _scores_in_half(False)),
    of(attended, _scores_in_half(True)),
    same(
        lambda: ((uniform(2, 64) * 120).half(), (uniform(5, 64, seed=1) * 120).half(), randn(5, 3).half()),
    ),
)


def running(ns):
    """Declare the op ``running`` in the namespace ``ns`` and return it. Its reference returns the cumulative sum of
    each row of ``x``. It is computed in float32, or in float64 for float64, and rounded at the end.
    """

    @sl.op(f"{ns}::running")
    def running(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        """Return the cumulative sum of each row of ``x``, kept in a wide dtype. Kernels of the op are compared with
        this reference.
        """
        return wide(x).cumsum(1).to(x.dtype)

    return running


def _carry(narrow):
    """Return a function that registers a kernel of the op ``running``. The kernel sums 64 columns at a time and carries
    the sum on to the next 64. If ``narrow`` is false, there is no defect. If it is true, there is a defect on purpose:
    the carried sum is rounded to the dtype of the result.
    """

    def fill(x, *, out):
        """Write the cumulative sum of each row of ``x`` to ``out``. If ``narrow`` (argument of ``_carry``) is false,
        there is no defect. If it is true, there is a defect on purpose: the sum carried from 64 columns to the next 64
        is rounded. Errors then grow with the length of the row.
        """
        carry = wide(x).new_zeros(len(x), 1)
        for start in range(0, x.shape[1], 64):
            part = wide(x)[:, start : start + 64].cumsum(1) + carry
            out[:, start : start + 64] = part
            carry = wide(out[:, start : start + 64][:, -1:]) if narrow else part[:, -1:]
            if narrow:
                carry = wide(carry.to(torch.float16 if x.dtype == torch.float16 else x.dtype))

    return kernel(fill)


values(
    "running sum whose carry is rounded",
    "between chunks of 64 the carry is kept in the dtype of the result",
    of(running, _carry(True)),
    of(running, _carry(False)),
    lambda op: close(op(x := uniform(1, 4000).bfloat16()).float()[0, -1:], x.float().sum(1), rtol=5e-3),
)


def looked_up(ns):
    """Declare the op ``looked_up`` in the namespace ``ns`` and return it. Its reference returns how often each number
    of ``index`` occurs among ``keys``.
    """

    @sl.op(f"{ns}::looked_up")
    def looked_up(keys: Int64[Tensor, "n"], index: Int64[Tensor, "m"]) -> Int64[Tensor, "m"]:
        """Return how often each number of ``index`` occurs among ``keys``. Kernels of the op are compared with this
        reference.
        """
        return (index[:, None] == keys[None]).sum(1)

    return looked_up


def _counted(at_most):
    """Return a function that registers a kernel of the op ``looked_up``, which counts occurrences of numbers. The
    kernel counts up to ``at_most``. If this is more than the number of keys, there is no defect. If it is smaller,
    there is a defect on purpose: further occurrences are not counted.
    """
    return filled(lambda keys, index: (index[:, None] == keys[None]).sum(1).clamp_max(at_most))


values(
    "a key that occurs nine times",
    "a chain of a hash table is followed for eight steps",
    of(looked_up, _counted(8)),
    of(looked_up, _counted(2**40)),
    same(lambda: (torch.zeros(12).long(), torch.arange(3))),
)


def _gelu(x):
    """Return the exact GELU of ``x``."""
    return torch.nn.functional.gelu(x)


def _erf(constant):
    """Return a function that registers a kernel of the op ``gelu``. The kernel multiplies ``x`` by ``constant`` in the
    error function. If it is the exact square root of 1/2, there is no defect. If it has only seven digits, there is a
    defect on purpose: results of float64 are not precise.
    """
    return filled(lambda x: (wide(x) * 0.5 * (1 + torch.erf(wide(x) * constant))).to(x.dtype))


promotion(
    "constant of seven digits",
    "enough for float32, and not for the float64 that is declared as well",
    of(unary("gelu", _gelu), _erf(0.7071068)),
    of(unary("gelu", _gelu), _erf(0.5**0.5)),
    same(lambda: (randn(3, 4).double(),), rtol=1e-9),
)


def half_sum(ns):
    """Declare the op ``half_sum`` in the namespace ``ns`` and return it. Its reference multiplies ``x`` by ``scale`` in
    float32 and returns the sum of each row, rounded to half precision.
    """

    @sl.op(f"{ns}::half_sum")
    def half_sum(x: Float16[Tensor, "n c"], scale: float = 1.0) -> Float16[Tensor, "n"]:
        """Return the sum of each row of ``x`` times ``scale``, computed in float32. Kernels of the op are compared with
        this reference.
        """
        return (x.float() * scale).sum(1).half()

    return half_sum


promotion(
    "scale applied in half precision",
    "the scaled element is infinite where the scaled sum is not",
    of(half_sum, filled(lambda x, scale: ((x * scale).float()).sum(1))),
    of(half_sum, filled(lambda x, scale: (x.float() * scale).sum(1))),
    same(lambda: (torch.tensor([[60000.0, -60000.0, 1.0]]).half(), 2.0)),
)
scalars(
    "scale through half precision",
    "0.1 in eleven bits is 0.09998",
    of(scaled, filled(lambda x, scale: x * float(torch.tensor(scale).half()))),
    of(scaled, filled(lambda x, scale: x * scale)),
    same(lambda: (randn(2, 3), 0.1)),
)


def bucketed(ns):
    """Declare the op ``bucketed`` in the namespace ``ns`` and return it. Its reference returns a vector of ``bins``
    counts, of which element ``i`` is the number of elements of ``x`` with ``x % bins == i``.
    """

    @sl.op(f"{ns}::bucketed", requires="bins >= 1")
    def bucketed(x: Int64[Tensor, "n"], bins: int = 4) -> Int64[Tensor, "bins"]:
        """Return the number of elements of ``x`` in each of ``bins`` classes modulo ``bins``. Kernels of the op are
        compared with this reference.
        """
        return torch.zeros(bins, dtype=torch.int64).index_add(0, x % bins, torch.ones_like(x))

    return bucketed


values(
    "histogram that merges equal neighbours twice",
    "a run of more than four equal numbers is counted as four",
    of(
        bucketed,
        filled(
            lambda x, bins: torch.zeros(bins, dtype=torch.int64).index_add(
                0,
                torch.unique_consecutive(x % bins),
                torch.unique_consecutive(x % bins, return_counts=True)[1].clamp_max(4),
            )
        ),
    ),
    of(bucketed, filled(lambda x, bins: torch.bincount(x % bins, minlength=bins))),
    same(lambda: (ints(3, 4, 9), 4)),
)
