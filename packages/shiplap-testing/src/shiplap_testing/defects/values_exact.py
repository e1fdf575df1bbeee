"""Right on small numbers: sums in narrow dtypes, integers that wrap, negative ones, repeated and missing indices."""

from functools import partial

import torch
from jaxtyping import BFloat16, Bool, Float16, Int8, Int16, Int32, Int64, UInt8
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.defect import add, kernel, of
from shiplap_testing.defects.values_float import filled
from shiplap_testing.defects.witness import same, uniform

values = partial(add, "values")


def rms_half(ns):
    """Declare the op ``rms_half`` in the namespace ``ns`` and return it. Its reference divides each row of ``x`` by its
    root mean square and returns the result, computed in float32 and rounded to half precision.
    """

    @sl.op(f"{ns}::rms_half", requires="c >= 1")
    def rms_half(x: Float16[Tensor, "n c"]) -> Float16[Tensor, "n c"]:
        """Return each row of ``x`` divided by its root mean square, computed in float32. Kernels of the op are compared
        with this reference.
        """
        return (x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6)).half()

    return rms_half


values(
    "squares in half precision",
    "from 256 on, a square exceeds 65504",
    of(rms_half, filled(lambda x: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6))),
    of(rms_half, filled(lambda x: x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-6))),
    same(lambda: (torch.tensor([[300.0, -400.0]]).half(),)),
)


def mean16(ns):
    """Declare the op ``mean16`` in the namespace ``ns`` and return it. Its reference returns the mean of each column of
    ``x``, computed in float32.
    """

    @sl.op(f"{ns}::mean16", requires="n >= 1")
    def mean16(x: BFloat16[Tensor, "n c"]) -> BFloat16[Tensor, "c"]:
        """Return the mean of each column of ``x``, computed in float32. Kernels of the op are compared with this
        reference.
        """
        return x.float().mean(0).bfloat16()

    return mean16


def _narrow_sum(x, *, out):
    """Write the mean of each column of ``x`` to ``out``. This kernel of ``mean16`` has a defect on purpose: the sum is
    kept in bfloat16, in which it stops growing after many rows.
    """
    total = torch.zeros_like(out)
    for line in x:
        total += line
    out.copy_(total / x.shape[0])


values(
    "mean with a sum in bfloat16",
    "adding to a sum of 256 changes nothing any more",
    of(mean16, kernel(_narrow_sum)),
    of(mean16, filled(lambda x: x.float().sum(0) / x.shape[0])),
    same(lambda: (uniform(1000, 3).bfloat16(),)),
)


def dot16(ns):
    """Declare the op ``dot16`` in the namespace ``ns`` and return it. Its reference returns the matrix product ``a @
    b``, computed in float32.
    """

    @sl.op(f"{ns}::dot16")
    def dot16(a: Float16[Tensor, "m k"], b: Float16[Tensor, "k n"]) -> Float16[Tensor, "m n"]:
        """Return the matrix product ``a @ b``, computed in float32. Kernels of the op are compared with this
        reference.
        """
        return (a.float() @ b.float()).half()

    return dot16


def _slices(dtype):
    """Return a function that registers a kernel of the op ``dot16``, the matrix product ``a @ b``. The kernel adds
    eight products at a time to a sum in ``dtype``. If it is float32, there is no defect. If it is float16, there is a
    defect on purpose: the sum is rounded at each step and may overflow.
    """

    def slices(a, b, *, out):
        """Write ``a @ b`` to ``out``. If ``dtype`` (argument of ``_slices``) is float32, there is no defect. If it is
        float16, there is a defect on purpose: the sum is rounded to it after each eight products and may overflow.
        """
        total = torch.zeros(out.shape, dtype=dtype)
        for i in range(0, a.shape[1], 8):
            total += (a[:, i : i + 8].float() @ b[i : i + 8].float()).to(dtype)
        out.copy_(total)

    return kernel(slices)


values(
    "product with partial sums in half precision",
    "each step of 8 is rounded to half: the error grows with k, and partial sums overflow that cancel later",
    of(dot16, _slices(torch.float16)),
    of(dot16, _slices(torch.float32)),
    same(lambda: (torch.cat([torch.ones(1, 800), -torch.ones(1, 800)], 1).half() * 100, torch.ones(1600, 1).half())),
)


def divided(ns):
    """Declare the op ``divided`` in the namespace ``ns`` and return it. Its reference returns ``x / k`` rounded
    down.
    """

    @sl.op(f"{ns}::divided", requires="k >= 1")
    def divided(x: Int32[Tensor, "n"], k: int = 3) -> Int32[Tensor, "n"]:
        """Return ``x / k`` rounded down. Kernels of the op are compared with this reference."""
        return torch.div(x, k, rounding_mode="floor")

    return divided


values(
    "integer division as in C",
    "-1 / 3 is 0 in C, and -1 by the declaration",
    of(divided, filled(lambda x, k: torch.div(x, k, rounding_mode="trunc"))),
    of(divided, filled(lambda x, k: x // k)),
    same(lambda: (torch.tensor([-1, -7, 7]).int(), 3)),
)


def bucket(ns):
    """Declare the op ``bucket`` in the namespace ``ns`` and return it. Its reference returns the remainder of ``x``
    modulo ``k``, from 0 to ``k - 1``.
    """

    @sl.op(f"{ns}::bucket", requires="k >= 1")
    def bucket(x: Int64[Tensor, "n"], k: int = 16) -> Int64[Tensor, "n"]:
        """Return the remainder of ``x`` modulo ``k``, from 0 to ``k - 1``. Kernels of the op are compared with this
        reference.
        """
        return torch.remainder(x, k)

    return bucket


values(
    "remainder as in C",
    "-1 % 16 is -1 in C, and 15 by the declaration",
    of(bucket, filled(lambda x, k: torch.fmod(x, k))),
    of(bucket, filled(lambda x, k: torch.remainder(x, k))),
    same(lambda: (torch.tensor([-1, 17]), 16)),
)
values(
    "remainder by a mask",
    "x & (k - 1) is the remainder where k is a power of two, as the default is",
    of(bucket, filled(lambda x, k: x & (k - 1))),
    of(bucket, filled(lambda x, k: torch.remainder(x, k))),
    same(lambda: (torch.tensor([5, 17]), 12)),
)


def midpoint(ns):
    """Declare the op ``midpoint`` in the namespace ``ns`` and return it. Its reference returns the mean of ``a`` and
    ``b`` rounded down, computed in int64.
    """

    @sl.op(f"{ns}::midpoint")
    def midpoint(a: Int32[Tensor, "n"], b: Int32[Tensor, "n"]) -> Int32[Tensor, "n"]:
        """Return the mean of ``a`` and ``b`` rounded down, computed in int64. Kernels of the op are compared with this
        reference.
        """
        return ((a.long() + b.long()) // 2).int()

    return midpoint


values(
    "midpoint that overflows",
    "the sum of two large ints wraps before it is halved",
    of(midpoint, filled(lambda a, b: (a + b) // 2)),
    of(midpoint, filled(lambda a, b: (a.long() + b.long()) // 2)),
    same(lambda: (torch.tensor([2_000_000_000]).int(), torch.tensor([1_900_000_000]).int())),
)


def saturating(ns):
    """Declare the op ``saturating`` in the namespace ``ns`` and return it. Its reference returns ``a + b`` clamped to
    the range of int8.
    """

    @sl.op(f"{ns}::saturating")
    def saturating(a: Int8[Tensor, "n"], b: Int8[Tensor, "n"]) -> Int8[Tensor, "n"]:
        """Return ``a + b`` clamped to the range of int8. Kernels of the op are compared with this reference."""
        return (a.short() + b.short()).clamp(-128, 127).to(torch.int8)

    return saturating


values(
    "8-bit sum that wraps",
    "100 + 100 is -56 where the declaration saturates",
    of(saturating, filled(lambda a, b: (a + b).clamp(-128, 127))),
    of(saturating, filled(lambda a, b: (a.int() + b).clamp(-128, 127))),
    same(lambda: (torch.tensor([100, 3]).to(torch.int8), torch.tensor([100, 4]).to(torch.int8))),
)


def mm8(ns):
    """Declare the op ``mm8`` in the namespace ``ns`` and return it. Its reference returns the matrix product ``a @ b``
    in int32.
    """

    @sl.op(f"{ns}::mm8")
    def mm8(a: Int8[Tensor, "m k"], b: Int8[Tensor, "k n"]) -> Int32[Tensor, "m n"]:
        """Return the matrix product ``a @ b`` in int32. Kernels of the op are compared with this reference."""
        return a.int() @ b.int()

    return mm8


values(
    "8-bit product with sums in 16 bits",
    "three products of 127 by 127 exceed 32767",
    of(mm8, filled(lambda a, b: a.short() @ b.short())),
    of(mm8, filled(lambda a, b: a.int() @ b.int())),
    same(lambda: (torch.full((1, 4), 127).to(torch.int8), torch.full((4, 1), 127).to(torch.int8))),
)


def magnitude(ns):
    """Declare the op ``magnitude`` in the namespace ``ns`` and return it. Its reference returns the magnitude of ``x``
    in int16.
    """

    @sl.op(f"{ns}::magnitude")
    def magnitude(x: Int8[Tensor, "n"]) -> Int16[Tensor, "n"]:
        """Return the magnitude of ``x`` in int16. Kernels of the op are compared with this reference."""
        return x.short().abs()

    return magnitude


values(
    "magnitude of the smallest int8",
    "|-128| is taken in 8 bits, where it is -128",
    of(magnitude, filled(lambda x: x.abs())),
    of(magnitude, filled(lambda x: x.short().abs())),
    same(lambda: (torch.tensor([-128, -5]).to(torch.int8),)),
)


def difference(ns):
    """Declare the op ``difference`` in the namespace ``ns`` and return it. Its reference returns the magnitude of ``a -
    b``.
    """

    @sl.op(f"{ns}::difference")
    def difference(a: UInt8[Tensor, "n"], b: UInt8[Tensor, "n"]) -> UInt8[Tensor, "n"]:
        """Return the magnitude of ``a - b``. Kernels of the op are compared with this reference."""
        return (a.short() - b.short()).abs().to(torch.uint8)

    return difference


values(
    "difference of unsigned pixels",
    "3 - 5 is 254",
    of(difference, filled(lambda a, b: a - b)),
    of(difference, filled(lambda a, b: torch.maximum(a, b) - torch.minimum(a, b))),
    same(lambda: (torch.tensor([3, 9]).to(torch.uint8), torch.tensor([5, 2]).to(torch.uint8))),
)


def whole_sum(ns):
    """Declare the op ``whole_sum`` in the namespace ``ns`` and return it. Its reference returns the sum of each column
    of ``x``.
    """

    @sl.op(f"{ns}::whole_sum")
    def whole_sum(x: Int64[Tensor, "n c"]) -> Int64[Tensor, "c"]:
        """Return the sum of each column of ``x``. Kernels of the op are compared with this reference."""
        return x.sum(0)

    return whole_sum


values(
    "integers summed as floats",
    "beyond 2^24 a float has no odd numbers",
    of(whole_sum, filled(lambda x: x.float().sum(0).long())),
    of(whole_sum, filled(lambda x: x.sum(0))),
    same(lambda: (torch.tensor([[100_000_001], [2]]),)),
)


def histogram(ns):
    """Declare the op ``histogram`` in the namespace ``ns`` and return it. Its reference returns a vector of ``bins``
    counts. Count ``i`` is the number of elements of ``x`` with ``x % bins == i``.
    """

    @sl.op(f"{ns}::histogram", requires="bins >= 1")
    def histogram(x: Int64[Tensor, "n"], bins: int = 8) -> Int64[Tensor, "bins"]:
        """Return the number of elements of ``x`` in each of ``bins`` classes modulo ``bins``. Kernels of the op are
        compared with this reference.
        """
        return torch.bincount(x % bins, minlength=bins)

    return histogram


values(
    "histogram with counters of a byte",
    "a bin that is hit 256 times is empty again: skewed data, or few bins",
    of(histogram, filled(lambda x, bins: torch.bincount(x % bins, minlength=bins).to(torch.uint8))),
    of(histogram, filled(lambda x, bins: torch.bincount(x % bins, minlength=bins).to(torch.int32))),
    same(lambda: (torch.zeros(300, dtype=torch.int64), 4)),
)


def set_bits(ns):
    """Declare the op ``set_bits`` in the namespace ``ns`` and return it. Its reference returns, for each row of
    ``mask``, the number of elements that are set.
    """

    @sl.op(f"{ns}::set_bits")
    def set_bits(mask: Bool[Tensor, "n c"]) -> Int64[Tensor, "n"]:
        """Return, for each row of ``mask``, the number of elements that are set. Kernels of the op are compared with
        this reference.
        """
        return mask.sum(1)

    return set_bits


values(
    "mask counted in a byte",
    "256 set entries count as none",
    of(set_bits, filled(lambda mask: mask.to(torch.uint8).sum(1, dtype=torch.uint8))),
    of(set_bits, filled(lambda mask: mask.to(torch.uint8).sum(1, dtype=torch.int64))),
    same(lambda: (torch.ones(2, 300, dtype=torch.bool),)),
)
