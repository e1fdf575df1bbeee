"""Right in float32: dtypes that are mixed, narrowed on the way, or not thought of."""

import sys
from functools import partial

import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, doubled, matmul, row_sum
from shiplap_testing.defects.defect import add, kernel, of
from shiplap_testing.defects.values_float import filled
from shiplap_testing.defects.witness import close, randn, same, uniform, wide

promotion = partial(add, "promotion")


def rotated(ns):
    """Declare the op ``rotated`` in the namespace ``ns`` and return it. Its reference multiplies row ``i`` of ``x`` by
    the cosine of ``position[i] * rate``. This angle is computed in float64.
    """

    @sl.op(f"{ns}::rotated")
    def rotated(x: M, position: Int64[Tensor, "n"], rate: float = 0.7) -> M:
        """Return each row of ``x`` times the cosine of its ``position`` times ``rate``, with angles in float64. Kernels
        of the op are compared with this reference.
        """
        return (wide(x) * torch.cos(position.double() * rate)[:, None].to(wide(x).dtype)).to(x.dtype)

    return rotated


def _rotated(narrow):
    """Return a function that registers a kernel of the op ``rotated``. If ``narrow`` is false, angles are computed in
    float64, and there is no defect. If it is true, there is a defect on purpose: they are computed in the dtype of
    ``x``.
    """

    def fill(x, position, rate):
        """Return ``x`` with row ``i`` multiplied by the cosine of ``position[i] * rate``. If ``narrow`` (argument of
        ``_rotated``) is false, there is no defect. If it is true, there is a defect on purpose: ``position`` is first
        rounded to the dtype of ``x``.
        """
        angle = position.to(x.dtype if narrow else torch.float64) * rate
        return wide(x) * torch.cos(angle)[:, None].to(wide(x).dtype)

    return filled(fill)


promotion(
    "angles in the dtype of the values",
    "position times frequency in bfloat16: wrong by radians from position 256 on",
    of(rotated, _rotated(True)),
    of(rotated, _rotated(False)),
    same(lambda: (torch.ones(3, 2).bfloat16(), torch.tensor([3, 501, 2003]))),
)
promotion(
    "float64 computed in float32",
    "the kernel has one body, for float",
    of(matmul, filled(lambda a, b: a.float() @ b.float())),
    of(matmul, kernel(lambda a, b, *, out: torch.mm(a, b, out=out))),
    same(lambda: (randn(3, 20).double(), randn(20, 3).double())),
)


def decayed(ns):
    """Declare the op ``decayed`` in the namespace ``ns`` and return it. Its reference multiplies column ``j`` of ``x``
    by ``rate[j] - 1``.
    """

    @sl.op(f"{ns}::decayed")
    def decayed(x: M, rate: Float32[Tensor, "c"]) -> M:
        """Return each column of ``x`` times its ``rate`` less one. Kernels of the op are compared with this
        reference.
        """
        return (wide(x) * (rate.double() - 1).to(wide(x).dtype)).to(x.dtype)

    return decayed


promotion(
    "float32 weights cast to the dtype of the values",
    "a rate of 1.001 is 1 in bfloat16, and one less is nothing",
    of(decayed, filled(lambda x, rate: x * (rate.to(x.dtype) - 1))),
    of(decayed, filled(lambda x, rate: wide(x) * (rate.double() - 1).to(wide(x).dtype))),
    same(lambda: (torch.full((2, 2), 1000.0).bfloat16(), torch.tensor([1.001, 0.999]))),
)


def _not_in_brain_floats(x, *, out):
    """Write ``2 * x`` to ``out``. This kernel of ``doubled`` has a defect on purpose: it raises ``TypeError`` for
    bfloat16, although that dtype is declared.
    """
    if x.dtype == torch.bfloat16:
        raise TypeError("expected float, half or double")
    torch.mul(x, 2, out=out)


promotion(
    "a dtype that is declared and refused",
    "the declaration admits bfloat16, the kernel raises for it",
    of(doubled, kernel(_not_in_brain_floats)),
    of(doubled, kernel(lambda x, *, out: torch.mul(x, 2, out=out))),
    same(lambda: (torch.ones(2, 2).bfloat16(),)),
)


def spaced(ns):
    """Declare the op ``spaced`` in the namespace ``ns`` and return it. Its reference returns ``index * step`` in
    int64.
    """

    @sl.op(f"{ns}::spaced")
    def spaced(index: Int32[Tensor, "n"], step: int = 1000) -> Int64[Tensor, "n"]:
        """Return ``index * step`` in int64. Kernels of the op are compared with this reference."""
        return index.long() * step

    return spaced


promotion(
    "int32 times int before it is widened",
    "the product of an int32 and a large step wraps",
    of(spaced, filled(lambda index, step: index * step)),
    of(spaced, filled(lambda index, step: index.long() * step)),
    same(lambda: (torch.tensor([3_000_000]).int(), 1000)),
)


def _sum_in_dtype(x, *, out):
    """Write the sum of each row of ``x`` to ``out``. This kernel of ``row_sum`` has a defect on purpose: the sum is
    kept in the dtype of ``out``. In narrow dtypes it is rounded after every four columns.
    """
    out.zero_()
    for part in x.split(4, 1):
        # The output has the narrow dtype, so each addition rounds.
        out.add_(part.sum(1))


promotion(
    "row sum kept in the output's dtype",
    "partial sums of four columns are rounded to bfloat16 or half each time",
    of(row_sum, kernel(_sum_in_dtype)),
    of(row_sum, filled(lambda x: wide(x).sum(1))),
    same(lambda: (uniform(2, 4096).bfloat16(),)),
)


def located(ns):
    """Declare the op ``located`` in the namespace ``ns`` and return it. Its reference returns ``index * scale`` rounded
    down, computed in float64.
    """

    @sl.op(f"{ns}::located")
    def located(index: Int64[Tensor, "n"], scale: float = 1.0) -> Int64[Tensor, "n"]:
        """Return ``index * scale`` rounded down, computed in float64. Kernels of the op are compared with this
        reference.
        """
        return torch.floor(index.double() * scale).long()

    return located


promotion(
    "positions through float32",
    "an index times a float is float32 by promotion: 2^24 + 1 becomes 2^24",
    of(located, filled(lambda index, scale: torch.floor(index * scale).long())),
    of(located, filled(lambda index, scale: torch.floor(index.double() * scale).long())),
    # The first integer that float32 does not have.
    same(lambda: (torch.tensor([16_777_217]), 1.0)),
)


def _exiting(x, *, out):
    """Write ``2 * x`` to ``out``. This kernel of ``doubled`` has a defect on purpose: for float64 it calls
    ``sys.exit``, which raises ``SystemExit``.
    """
    if x.dtype == torch.float64:
        sys.exit("doubled: float64 is not supported")
    torch.mul(x, 2, out=out)


def _survives(op):
    """Return whether ``op`` (``doubled``) is right for float64. If it raises ``SystemExit``, the result is False."""
    try:
        return close(op(torch.ones(2, 2).double()), torch.full((2, 2), 2.0).double())
    except SystemExit:
        return False


promotion(
    "sys.exit for an unknown dtype",
    "a message for users of a script, the end of a program that calls the op",
    of(doubled, kernel(_exiting)),
    of(doubled, kernel(lambda x, *, out: torch.mul(x, 2, out=out))),
    _survives,
    breaks=True,
)


def averaged(ns):
    """Declare the op ``averaged`` in the namespace ``ns`` and return it. Its reference returns the mean of the squared
    differences of ``x`` and ``y``, computed in float32.
    """

    @sl.op(f"{ns}::averaged", requires="m >= 1")
    def averaged(x: Float[Tensor, "m"], y: Float32[Tensor, "m"]) -> Float32[Tensor, ""]:
        """Return the mean of the squared differences of ``x`` and ``y``, computed in float32. Kernels of the op are
        compared with this reference.
        """
        return (x.float() - y).square().mean()

    return averaged


promotion(
    "difference taken in the narrower dtype",
    "float32 targets are rounded to the dtype of the predictions before they are compared",
    of(averaged, kernel(lambda x, y: (x - y.to(x.dtype)).float().square().mean())),
    of(averaged, kernel(lambda x, y: (x.float() - y).square().mean())),
    same(lambda: (torch.full((4,), 1000.0).half(), torch.full((4,), 1000.2)), rtol=1e-2),
)
