"""Right for the scalars that a test passes: negative, zero and large ones, flags, strings, lists of other lengths."""

from functools import partial

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, V, rms_norm
from shiplap_testing.defects.defect import add, c_kernel, kernel, of
from shiplap_testing.defects.values_float import filled
from shiplap_testing.defects.witness import randn, same, uniform, wide

scalars = partial(add, "scalars")


def leaky(ns):
    """Declare the op ``leaky`` in the namespace ``ns`` and return it. Its reference returns ``x`` where it is at least
    zero, and ``slope * x`` elsewhere.
    """

    @sl.op(f"{ns}::leaky")
    def leaky(x: M, slope: float = 0.01) -> M:
        """Return ``x`` where it is at least zero, and ``slope * x`` elsewhere. Kernels of the op are compared with this
        reference.
        """
        return torch.where(x >= 0, x, slope * x)

    return leaky


scalars(
    "leaky relu as a maximum",
    "max(x, slope * x) is something else for a slope above one",
    of(leaky, filled(lambda x, slope: torch.maximum(x, slope * x))),
    of(leaky, filled(lambda x, slope: torch.where(x < 0, slope * x, x))),
    same(lambda: (randn(2, 5), 1.5)),
)


def power(ns):
    """Declare the op ``power`` in the namespace ``ns`` and return it. Its reference returns ``x`` to the power of
    ``p``.
    """

    @sl.op(f"{ns}::power")
    def power(x: M, p: int = 2) -> M:
        """Return ``x`` to the power of ``p``. Kernels of the op are compared with this reference."""
        return torch.pow(x, p)

    return power


def _repeated(x, p, *, out):
    """Write ``x`` to the power of ``p`` to ``out``, computed by repeated products. This kernel of ``power`` has a
    defect on purpose: for a negative ``p``, the result is 1.
    """
    out.fill_(1)
    for _ in range(p):
        out.mul_(x)


scalars(
    "power by repeated products",
    "no product at all for a negative exponent",
    of(power, kernel(_repeated)),
    of(power, kernel(lambda x, p, *, out: torch.pow(x, p, out=out))),
    same(lambda: (uniform(2, 3) + 1, -1)),
)


def reduced(ns):
    """Declare the op ``reduced`` in the namespace ``ns`` and return it. For each row of ``x``, its reference returns
    the sum if ``mode`` is ``sum``, the maximum if it is ``max``, and the mean otherwise.
    """

    @sl.op(f"{ns}::reduced", requires="c >= 1")
    def reduced(x: M, mode: str = "mean") -> V:
        """Return, for each row of ``x``, the sum if ``mode`` is ``sum``, the maximum if it is ``max``, and the mean
        otherwise. Kernels of the op are compared with this reference.
        """
        if mode == "sum":
            return x.sum(1)
        return x.amax(1) if mode == "max" else x.mean(1)

    return reduced


def _modes(*known):
    """Return a function that registers a kernel of the op ``reduced``. If ``known`` contains ``max``, there is no
    defect. Otherwise there is a defect on purpose: the kernel returns the mean for the mode ``max``.
    """

    def modes(x, mode):
        """Return the sum, the maximum or the mean of each row of ``x``, depending on ``mode``. If ``known`` (argument
        of ``_modes``) contains ``max``, there is no defect. Otherwise there is a defect on purpose: the mean is
        returned for the mode ``max``.
        """
        if mode == "sum":
            return wide(x).sum(1)
        return x.amax(1) if mode in known else wide(x).mean(1)

    return filled(modes)


scalars(
    "reduction that has no maximum",
    "a mode that the kernel does not know is taken for the default",
    of(reduced, _modes()),
    of(reduced, _modes("max")),
    same(lambda: (randn(2, 3), "max")),
)


def causal(ns):
    """Declare the op ``causal`` in the namespace ``ns`` and return it. Its reference returns the softmax of each row of
    ``scores``. If ``masked`` is true, scores right of the diagonal are set to -10000 first.
    """

    @sl.op(f"{ns}::causal", requires="n >= 1")
    def causal(scores: Float[Tensor, "m n"], masked: bool = False) -> Float[Tensor, "m n"]:
        """Return the softmax of each row of ``scores``. If ``masked`` is true, scores right of the diagonal are set to
        -10000 first. Kernels of the op are compared with this reference.
        """
        later = torch.ones(scores.shape, dtype=torch.bool).triu(1)
        return torch.softmax(scores.masked_fill(later, -1e4) if masked else scores, 1)

    return causal


def _causal(diagonal):
    """Return a function that registers a kernel of the op ``causal``. The kernel hides scores on the diagonal number
    ``diagonal`` and to the right of it. If ``diagonal`` is 1, there is no defect. If it is 0, there is a defect on
    purpose: the main diagonal is hidden as well.
    """

    def fill(scores, masked):
        """Return the softmax of each row of ``scores``. If ``masked`` is true, scores right of the diagonal are hidden.
        If ``diagonal`` (argument of ``_causal``) is 1, there is no defect. If it is 0, there is a defect on purpose:
        scores on the main diagonal are hidden as well.
        """
        later = torch.ones(scores.shape, dtype=torch.bool).triu(diagonal)
        return torch.softmax(scores.masked_fill(later, -1e4) if masked else scores, 1)

    return filled(fill)


scalars(
    "causal mask that hides the diagonal",
    "i <= j where the declaration has i < j, behind a flag that is off by default",
    of(causal, _causal(0)),
    of(causal, _causal(1)),
    same(lambda: (randn(4, 4), True)),
)
scalars(
    "eps written into the kernel",
    "the default is compiled in, and the argument not read",
    of(rms_norm, filled(lambda x, eps: wide(x) * torch.rsqrt(wide(x).square().mean(1, True) + 1e-6))),
    of(rms_norm, filled(lambda x, eps: wide(x) * torch.rsqrt(wide(x).square().mean(1, True) + eps))),
    same(lambda: (randn(2, 8), 0.1)),
)
scalars(
    "eps outside the root",
    "hardly different for 1e-6 and rows of size one",
    of(rms_norm, filled(lambda x, eps: wide(x) / (wide(x).square().mean(1, True).sqrt() + eps))),
    of(rms_norm, filled(lambda x, eps: wide(x) / (wide(x).square().mean(1, True) + eps).sqrt())),
    same(lambda: (randn(2, 8), 0.3)),
)


def blended(ns):
    """Declare the op ``blended`` in the namespace ``ns`` and return it. Its reference returns ``alpha * x + beta *
    y``.
    """

    @sl.op(f"{ns}::blended")
    def blended(x: M, y: M, alpha: float = 1.0, beta: float = 0.5) -> M:
        """Return ``alpha * x + beta * y``. Kernels of the op are compared with this reference."""
        return alpha * x + beta * y

    return blended


def _shortcut(x, y, alpha, beta):
    """Return ``alpha * x + beta * y``. This kernel of ``blended`` has a defect on purpose: if ``alpha`` is zero, it
    returns zeros instead of ``beta * y``.
    """
    return torch.zeros_like(x) if alpha == 0 else alpha * x + beta * y


scalars(
    "alpha of zero drops the other term",
    "the short cut returns zero where beta * y remains",
    of(blended, filled(_shortcut)),
    of(blended, filled(lambda x, y, alpha, beta: alpha * x + beta * y)),
    same(lambda: (randn(2, 3), randn(2, 3, seed=1), 0.0, 0.5)),
)


def rolled(ns):
    """Declare the op ``rolled`` in the namespace ``ns`` and return it. Its reference returns the vector ``x`` rotated
    right by ``k``. Elements that leave at the end come in at the start.
    """

    @sl.op(f"{ns}::rolled")
    def rolled(x: V, k: int = 1) -> V:
        """Return ``x`` shifted by ``k`` places to the right, where elements that leave at the end come in at the start.
        Kernels of the op are compared with this reference.
        """
        return torch.roll(x, k)

    return rolled


scalars(
    "roll by more than the length",
    "slices at -k, without the remainder",
    of(rolled, filled(lambda x, k: torch.cat([x[-k:], x[:-k]]))),
    of(rolled, filled(lambda x, k: torch.cat([x[-k % max(len(x), 1) :], x[: -k % max(len(x), 1)]]))),
    # More than the length, so that the remainder counts.
    same(lambda: (torch.arange(5.0), 7)),
)


def lower(ns):
    """Declare the op ``lower`` in the namespace ``ns`` and return it. Its reference returns the lower triangle of ``x``
    up to diagonal ``k``, with zeros above it.
    """

    @sl.op(f"{ns}::lower")
    def lower(x: M, k: int = 0) -> M:
        """Return the lower triangle of ``x`` up to diagonal ``k``, with zeros above it. Kernels of the op are compared
        with this reference.
        """
        return torch.tril(x, k)

    return lower


scalars(
    "diagonals below the main one",
    "a negative number of the diagonal is taken to be zero",
    of(lower, filled(lambda x, k: torch.tril(x, max(k, 0)))),
    of(lower, filled(lambda x, k: torch.tril(x, k))),
    same(lambda: (randn(4, 4), -1)),
)


def polynomial(ns):
    """Declare the op ``polynomial`` in the namespace ``ns`` and return it.

    Its reference evaluates a polynomial at each element of ``x``. The first of ``coefficients`` is that of the highest
    power.
    """

    @sl.op(f"{ns}::polynomial")
    def polynomial(x: V, coefficients: list[float] = (1.0, 2.0, 0.5)) -> V:
        """Return the value at ``x`` of the polynomial with the coefficients ``coefficients``.

        The first is that of the highest power. Kernels of the op are compared with this reference.
        """
        out = torch.zeros_like(x)
        for c in coefficients:
            out = out * x + c
        return out

    return polynomial


def _horner(limit):
    """Return a function that registers a kernel of the op ``polynomial``. If ``limit`` is None, the kernel reads all
    coefficients, and there is no defect. If it is a number, there is a defect on purpose: the kernel reads only the
    first ``limit`` coefficients.
    """

    def horner(x, coefficients, *, out):
        """Write the polynomial at each element of ``x`` to ``out``. If ``limit`` (argument of ``_horner``) is None,
        there is no defect. Otherwise there is a defect on purpose: coefficients after the first ``limit`` are not read.
        """
        out.zero_()
        for c in list(coefficients)[:limit]:
            out.mul_(x).add_(c)

    return kernel(horner)


scalars(
    "polynomial of four coefficients",
    "constant memory for four of them: a fifth is not read",
    of(polynomial, _horner(4)),
    of(polynomial, _horner(None)),
    same(lambda: (uniform(4), [1.0, 1.0, 1.0, 1.0, 1.0])),
)


def shifted(ns):
    """Declare the op ``shifted`` in the namespace ``ns`` and return it. Its reference returns the sum of several copies
    of the vector ``x``, one for each number in ``shifts``. Each copy is rotated right by its number.
    """

    @sl.op(f"{ns}::shifted")
    def shifted(x: V, shifts: list[int] = (1, 2)) -> V:
        """Return the sum of ``x`` shifted by each of ``shifts`` places. Kernels of the op are compared with this
        reference.
        """
        return sum((torch.roll(x, s) for s in shifts), torch.zeros_like(x))

    return shifted


scalars(
    "two shifts, however many there are",
    "the list is unpacked into the two that the default has",
    of(shifted, filled(lambda x, shifts: torch.roll(x, shifts[0]) + torch.roll(x, shifts[1]))),
    of(shifted, filled(lambda x, shifts: sum((torch.roll(x, s) for s in shifts), torch.zeros_like(x)))),
    same(lambda: (randn(5), [1])),
)


def offset(ns):
    """Declare the op ``offset`` in the namespace ``ns`` and return it. Its reference returns ``x + k``."""

    @sl.op(f"{ns}::offset")
    def offset(x: Int64[Tensor, "n"], k: int = 1) -> Int64[Tensor, "n"]:
        """Return ``x + k``. Kernels of the op are compared with this reference."""
        return x + k

    return offset


def _offset(kind):
    """Return a function that registers a C kernel of the op ``offset``, which adds ``k`` to ``x``. The kernel keeps
    ``k`` in the C type ``kind``. If it is ``int64_t``, there is no defect. If it is ``int``, there is a defect on
    purpose: a ``k`` of more than 32 bits wraps around.
    """
    return c_kernel(f"""
int offset(const sl_context* ctx, const DLTensor* x, DLTensor* out, int64_t k) {{
  const int64_t* from = x->data; int64_t* to = out->data; const {kind} step = ({kind})k;
  for (int64_t i = 0; i < x->shape[0]; ++i) to[i] = (int64_t)((uint64_t)from[i] + (uint64_t)(int64_t)step);
  return SL_OK;
}}""")


scalars(
    "C: int argument cut to 32 bits",
    "the kernel keeps it in an int",
    of(offset, _offset("int")),
    of(offset, _offset("int64_t")),
    # Beyond 32 bits.
    same(lambda: (torch.tensor([1]), 5_000_000_000)),
    needs=["compiler"],
)


def scaled64(ns):
    """Declare the op ``scaled64`` in the namespace ``ns`` and return it. Its reference returns ``x * scale`` in
    float64.
    """

    @sl.op(f"{ns}::scaled64")
    def scaled64(x: Float64[Tensor, "n"], scale: float = 0.5) -> Float64[Tensor, "n"]:
        """Return ``x * scale`` in float64. Kernels of the op are compared with this reference."""
        return x * scale

    return scaled64


scalars(
    "float argument kept in single precision",
    "0.5 is exact in a float, 0.1 is not",
    of(scaled64, filled(lambda x, scale: x * float(torch.tensor(scale, dtype=torch.float32)))),
    of(scaled64, filled(lambda x, scale: x * float(torch.tensor(scale, dtype=torch.float64)))),
    same(lambda: (uniform(5).double(), 0.1), rtol=1e-12),
)


def clamped(ns):
    """Declare the op ``clamped`` in the namespace ``ns`` and return it. Its reference returns ``x`` clamped to the
    interval from ``low`` to ``high``. If ``high`` is below ``low``, it returns ``high``.
    """

    @sl.op(f"{ns}::clamped")
    def clamped(x: V, low: float = -1.0, high: float = 1.0) -> V:
        """Return ``x`` clamped to the interval from ``low`` to ``high``. If ``high`` is below ``low``, return ``high``.
        Kernels of the op are compared with this reference.
        """
        return torch.clamp(x, low, high)

    return clamped


scalars(
    "clamp in the other order",
    "where low exceeds high, low wins instead of high",
    of(clamped, filled(lambda x, low, high: x.clamp_max(high).clamp_min(low))),
    of(clamped, filled(lambda x, low, high: x.clamp_min(low).clamp_max(high))),
    same(lambda: (randn(5), 1.0, -1.0)),
)


def standardised(ns):
    """Declare the op ``standardised`` in the namespace ``ns`` and return it.

    Its reference returns ``x``, changed row by row. If ``center`` is true, the mean of each row is subtracted. If
    ``scale`` is true, each row is then divided by its root mean square.
    """

    @sl.op(f"{ns}::standardised", requires="c >= 1")
    def standardised(x: M, center: bool = False, scale: bool = False) -> M:
        """Return the rows of ``x``.

        If ``center`` is true, their means are subtracted first. If ``scale`` is true, the result is divided by its root
        mean square. Kernels of the op are compared with this reference.
        """
        x = x - x.mean(1, keepdim=True) if center else x
        return x / (x.square().mean(1, keepdim=True) + 1e-3).sqrt() if scale else x

    return standardised


def _standardised(first):
    """Return a function that registers a kernel of the op ``standardised``. If ``first`` is true, there is no defect.
    If it is false, there is a defect on purpose: rows are divided by the root mean square that they had before their
    means were subtracted.
    """

    def fill(x, center, scale):
        """Return ``x``, with the mean of each row subtracted if ``center`` is true. If ``scale`` is true, divide each
        row by its root mean square. If ``first`` (argument of ``_standardised``) is true, there is no defect. If it is
        false, there is a defect on purpose: the root mean square is that of rows before their means are subtracted.
        """
        x = wide(x)
        moved = x - x.mean(1, keepdim=True) if center else x
        size = moved if first else x
        return moved / (size.square().mean(1, keepdim=True) + 1e-3).sqrt() if scale else moved

    return filled(fill)


scalars(
    "two flags that are wrong together",
    "centred and scaled: the scale is that of the values before they were centred",
    of(standardised, _standardised(False)),
    of(standardised, _standardised(True)),
    same(lambda: (randn(2, 6) + 2, True, True)),
)
