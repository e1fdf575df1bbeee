"""Right on random normal numbers: NaN, infinities, signed zeros, denormals, ties, saturation and cancellation."""

from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, V, masked_mean, ordered, relu, row_max, softmax
from shiplap_testing.defects.defect import add, kernel, of
from shiplap_testing.defects.witness import randn, same, wide

values = partial(add, "values")
INF, NAN = float("inf"), float("nan")


def unary(name, fn, annotation=M):
    """Return a function that declares the op ``name`` of one argument in a given namespace. ``fn`` computes its
    reference. ``annotation`` is the type of the argument and of the result.
    """

    def declare(ns):
        """Declare the op ``name`` in the namespace ``ns`` and return it. Its reference returns ``fn(x)``. Both ``name``
        and ``fn`` are arguments of ``unary``.
        """

        @sl.op(f"{ns}::{name}")
        def op(x: annotation) -> annotation:
            """Return ``fn(x)``, where ``fn`` and the type ``annotation`` are arguments of ``unary``. Kernels of the op
            are compared with this reference.
            """
            return fn(x)

        return op

    return declare


def binary(name, fn, annotation=M):
    """Return a function that declares the op ``name`` of two arguments in a given namespace. ``fn`` computes its
    reference. ``annotation`` is the type of both arguments and of the result.
    """

    def declare(ns):
        """Declare the op ``name`` in the namespace ``ns`` and return it. Its reference returns ``fn(x, y)``. Both
        ``name`` and ``fn`` are arguments of ``binary``.
        """

        @sl.op(f"{ns}::{name}")
        def op(x: annotation, y: annotation) -> annotation:
            """Return ``fn(x, y)``, where ``fn`` and the type ``annotation`` are arguments of ``binary``. Kernels of the
            op are compared with this reference.
            """
            return fn(x, y)

        return op

    return declare


def filled(fn):
    """Return a function that registers a CPU kernel with the op that is passed to it. The kernel calls ``fn`` with the
    arguments of the op by position, and copies the result to its output.
    """

    def bind(op):
        """Register the CPU kernel ``fill`` with ``op``, and return the result of ``op.kernel``. The kernel copies the
        result of ``fn`` (argument of ``filled``) to its output.
        """
        names = [a.name for a in op.spec.args]

        def fill(out, **named):
            """Call ``fn`` (argument of ``filled``) with the arguments ``named`` in declared order. Copy the result to
            ``out``, in the dtype of ``out``.
            """
            out.copy_(fn(*[named[name] for name in names]))

        return kernel(fill)(op)

    return bind


def row(*numbers, dtype=torch.float32):
    """Return a function that ``same`` calls for the arguments of an op. It returns a tuple of one tensor, a matrix of
    ``dtype`` with ``numbers`` as its only row.
    """
    return lambda: (torch.tensor([numbers], dtype=dtype),)


values(
    "relu as a product with its mask",
    "minus infinity times zero is NaN",
    of(relu, filled(lambda x: x * (x > 0))),
    of(relu, filled(lambda x: x.clamp_min(0))),
    same(row(1.0, -2.0, -INF)),
)
values(
    "relu that swallows NaN",
    "the larger of NaN and zero is taken to be zero",
    of(relu, filled(lambda x: torch.where(x > 0, x, 0))),
    of(relu, filled(lambda x: x.clamp_min(0))),
    same(row(1.0, -2.0, NAN)),
)
values(
    "row maximum that starts at the smallest finite number",
    "a row that is minus infinity throughout yields -3.4e38",
    of(row_max, filled(lambda x: x.clamp_min(torch.finfo(x.dtype).min).amax(1))),
    of(row_max, filled(lambda x: x.clamp_min(-INF).amax(1))),
    same(row(-INF, -INF)),
)
values(
    "row maximum that starts at zero",
    "a row of negative numbers yields zero",
    of(row_max, filled(lambda x: x.clamp_min(0).amax(1))),
    of(row_max, filled(lambda x: x.amax(1))),
    same(row(-1.0, -2.0)),
)


def _ignoring(x):
    """Return the maximum of each row of ``x``. This kernel of ``row_max`` has a defect on purpose: it ignores NaN,
    where the reference returns NaN.
    """
    return torch.where(x.isnan(), -INF, x).amax(1)


values(
    "row maximum that passes over NaN",
    "comparisons with NaN are false, so the running maximum stays",
    of(row_max, filled(_ignoring)),
    of(row_max, filled(lambda x: x.amax(1))),
    same(row(1.0, NAN, 3.0)),
)
values(
    "softmax without subtracting the maximum",
    "exp overflows from 89 on",
    of(softmax, filled(lambda x: wide(x).exp() / wide(x).exp().sum(1, keepdim=True))),
    of(softmax, filled(lambda x: torch.softmax(wide(x), 1))),
    same(row(100.0, 90.0, 0.0)),
)


def logsumexp(ns):
    """Declare the op ``logsumexp`` in the namespace ``ns`` and return it. Its reference returns, for each row of ``x``,
    the natural logarithm of the sum of the exponentials of its elements.
    """

    @sl.op(f"{ns}::logsumexp", requires="c >= 1")
    def logsumexp(x: M) -> V:
        """Return the logarithm of the sum of exponentials of each row. Kernels of the op are compared with this
        reference.
        """
        return torch.logsumexp(x, 1)

    return logsumexp


values(
    "logsumexp without subtracting the maximum",
    "logits of -200 all underflow, and the result is minus infinity",
    of(logsumexp, filled(lambda x: wide(x).exp().sum(1).log())),
    of(logsumexp, filled(lambda x: torch.logsumexp(wide(x), 1))),
    same(row(-200.0, -201.0)),
)
values(
    "logsumexp of a row of minus infinity",
    "the maximum is subtracted, and -inf - -inf is NaN",
    of(logsumexp, filled(lambda x: (x - x.amax(1, True)).exp().sum(1).log() + x.amax(1))),
    of(logsumexp, filled(lambda x: torch.logsumexp(x, 1))),
    same(row(-INF, -INF)),
)
values(
    "tanh from exponentials",
    "inf / inf from 45 on",
    of(unary("tanh", torch.tanh), filled(lambda x: ((2 * x).exp() - 1) / ((2 * x).exp() + 1))),
    of(unary("tanh", torch.tanh), filled(lambda x: torch.tanh(x))),
    same(row(0.5, 100.0)),
)
values(
    "softplus as it is written in a book",
    "log(1 + exp(x)) overflows from 89 on",
    of(unary("softplus", F.softplus), filled(lambda x: wide(x).exp().add(1).log())),
    of(unary("softplus", F.softplus), filled(lambda x: F.softplus(wide(x)))),
    same(row(1.0, 120.0)),
)
values(
    "log of the sigmoid in two steps",
    "the sigmoid of -120 is zero, and its logarithm minus infinity",
    of(unary("logsigmoid", F.logsigmoid), filled(lambda x: torch.sigmoid(wide(x)).log())),
    of(unary("logsigmoid", F.logsigmoid), filled(lambda x: F.logsigmoid(wide(x)))),
    same(row(1.0, -120.0)),
)
values(
    "log1p as log(1 + x)",
    "nothing is left of 1e-10 once one is added",
    of(unary("log1p", torch.log1p), filled(lambda x: (1 + x).log())),
    of(unary("log1p", torch.log1p), filled(lambda x: torch.log1p(x))),
    same(row(1e-10, 3e-9), rtol=1e-12),
)


def variance(ns):
    """Declare the op ``variance`` in the namespace ``ns`` and return it. Its reference returns the variance of each row
    of ``x``, without Bessel's correction.
    """

    @sl.op(f"{ns}::variance", requires="c >= 1")
    def variance(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n"]:
        """Return the variance of each row of ``x``, without Bessel's correction. Kernels of the op are compared with
        this reference.
        """
        return (x - x.mean(1, keepdim=True)).square().mean(1)

    return variance


values(
    "variance as a difference of means",
    "E[x^2] - E[x]^2 cancels where the mean is large beside the spread",
    of(variance, filled(lambda x: x.square().mean(1) - x.mean(1).square())),
    of(variance, filled(lambda x: x.double().var(1, correction=0))),
    same(lambda: (randn(2, 64) + 3000,), rtol=1e-2),
)
values(
    "hypotenuse without scaling",
    "the squares overflow although the result does not",
    of(binary("hypot", torch.hypot, Float32[Tensor, "n c"]), filled(lambda x, y: (x * x + y * y).sqrt())),
    of(binary("hypot", torch.hypot, Float32[Tensor, "n c"]), filled(lambda x, y: torch.hypot(x, y))),
    same(lambda: (torch.tensor([[3e30]]), torch.tensor([[4e30]]))),
)


def _large_angle(x):
    """Return the sine of ``x``. This kernel of ``sine`` has a defect on purpose: multiples of 2 pi are subtracted in
    float32, with an error that grows with ``x``.
    """
    turn = torch.tensor(6.2831855, dtype=torch.float32)
    return torch.sin(x - torch.floor(x / turn) * turn)


values(
    "sine with a range reduction in single precision",
    "the error of 2 pi counts as often as it is subtracted: wrong for angles of many turns",
    of(unary("sine", torch.sin, Float32[Tensor, "n c"]), filled(_large_angle)),
    of(unary("sine", torch.sin, Float32[Tensor, "n c"]), filled(lambda x: torch.sin(x))),
    same(row(1.0, 1e5), rtol=1e-3),
)
values(
    "gelu by the tanh formula",
    "the declaration says erf; the two differ by up to 5e-4",
    of(unary("gelu", F.gelu), filled(lambda x: F.gelu(x, approximate="tanh"))),
    of(unary("gelu", F.gelu), filled(lambda x: F.gelu(x))),
    same(row(2.0, -2.2)),
)
values(
    "copysign by comparison",
    "minus zero is not less than zero",
    of(binary("copysign", torch.copysign), filled(lambda x, y: torch.where(y < 0, -x.abs(), x.abs()))),
    of(binary("copysign", torch.copysign), filled(lambda x, y: torch.copysign(x, y))),
    same(lambda: (torch.tensor([[2.0]]), torch.tensor([[-0.0]]))),
)


def _flushing(x):
    """Return ``x`` times 2 to the power of 120. This kernel of ``amplified`` has a defect on purpose: denormal numbers
    of ``x`` count as zero.
    """
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, 0, x) * 2.0**120


amplified = unary("amplified", lambda x: x * 2.0**120, Float32[Tensor, "n c"])
values(
    "denormals flushed to zero",
    "built with fast math: what is below 1.2e-38 counts as zero",
    of(amplified, filled(_flushing)),
    of(amplified, filled(lambda x: x * 2.0**120)),
    same(row(1e-39, 1.0), rtol=1e-5),
)
values(
    "sign as x over |x|",
    "zero over zero",
    of(unary("sign", torch.sign), filled(lambda x: x / x.abs())),
    of(unary("sign", torch.sign), filled(lambda x: torch.sign(x))),
    same(row(-3.0, 0.0)),
)


def finite(ns):
    """Declare the op ``finite`` in the namespace ``ns`` and return it. Its reference returns a tensor of booleans that
    are true where ``x`` is neither NaN nor infinite.
    """

    @sl.op(f"{ns}::finite")
    def finite(x: M) -> Bool[Tensor, "n c"]:
        """Return whether each element of ``x`` is neither NaN nor infinite. Kernels of the op are compared with this
        reference.
        """
        return torch.isfinite(x)

    return finite


values(
    "finite is what is less than infinity",
    "minus infinity is",
    of(finite, filled(lambda x: x < INF)),
    of(finite, filled(lambda x: x.abs() < INF)),
    same(row(1.0, INF, -INF, NAN)),
)


def rounded(ns):
    """Declare the op ``rounded`` in the namespace ``ns`` and return it. Its reference returns ``x`` rounded, halves to
    even, and clamped to the interval from -127 to 127.
    """
    return unary("rounded", lambda x: x.round().clamp(-127, 127))(ns)


values(
    "rounding halves up",
    "the declaration rounds 0.5 and 2.5 to even",
    of(rounded, filled(lambda x: (x + 0.5).floor().clamp(-127, 127))),
    of(rounded, filled(lambda x: x.round().clamp(-127, 127))),
    same(row(0.5, 2.5, -1.5)),
)


def first_best(ns):
    """Declare the op ``first_best`` in the namespace ``ns`` and return it. Its reference returns the column of the
    maximum of each row of ``x``, which is the first one if several are equal.
    """

    @sl.op(f"{ns}::first_best", requires="c >= 1")
    def first_best(x: M) -> Int64[Tensor, "n"]:
        """Return the position of the maximum of each row, the first one of equal maxima. Kernels of the op are compared
        with this reference.
        """
        return x.max(1).indices  # of equal ones the first

    return first_best


def _last_best(x):
    """Return the column of the maximum of each row of ``x``. This kernel of ``first_best`` has a defect on purpose: of
    several equal maxima, the column of the last is returned instead of the first.
    """
    return x.shape[1] - 1 - x.flip(1).max(1).indices


values(
    "argmax that takes the last of equals",
    ">= where the declaration has >",
    of(first_best, filled(_last_best)),
    of(first_best, filled(lambda x: x.max(1).indices)),
    same(row(1.0, 3.0, 3.0, 2.0)),
)


def ranking(ns):
    """Declare the op ``ranking`` in the namespace ``ns`` and return it. Its reference returns the indices that sort the
    vector ``x`` in descending order. Equal elements keep their order.
    """

    @sl.op(f"{ns}::ranking")
    def ranking(x: V) -> Int64[Tensor, "n"]:
        """Return the positions of the elements of ``x`` in descending order, with equal elements in their order in
        ``x``. Kernels of the op are compared with this reference.
        """
        return torch.sort(x, stable=True, descending=True).indices

    return ranking


values(
    "ranking that is not stable",
    "descending order by turning the ascending one around: equal values come last one first",
    of(ranking, filled(lambda x: torch.sort(x, stable=True).indices.flip(0))),
    of(ranking, filled(lambda x: torch.sort(x, stable=True, descending=True).indices)),
    same(lambda: (torch.tensor([1.0, 2.0, 1.0, 2.0]),)),
)


def passed(ns):
    """Declare the op ``passed`` in the namespace ``ns`` and return it. Its reference returns, for each element of
    ``x``, the number of elements of ``edges`` that are smaller.
    """

    @sl.op(f"{ns}::passed")
    def passed(x: V, edges: Float[Tensor, "m"]) -> Int64[Tensor, "n"]:
        """Return for each element of ``x`` the number of ``edges`` below it. Kernels of the op are compared with this
        reference.
        """
        return (x[:, None] > edges).sum(1)

    return passed


values(
    "values on an edge counted as past it",
    "the other side of a binary search: it shows where a value equals an edge",
    of(passed, filled(lambda x, edges: (x[:, None] >= edges).sum(1))),
    of(passed, filled(lambda x, edges: (x[:, None] > edges).sum(1))),
    same(lambda: (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.5]))),
)
values(
    "mean over an empty mask",
    "a row without any valid entry is zero over zero",
    of(masked_mean, filled(lambda x, mask: torch.where(mask, x, 0).sum(1) / mask.sum(1))),
    of(masked_mean, filled(lambda x, mask: torch.where(mask, x, 0).sum(1) / mask.sum(1).clamp_min(1))),
    same(lambda: (torch.ones(2, 3), torch.tensor([[True, True, False], [False, False, False]]))),
)
values(
    "masked mean by multiplication",
    "what is masked out still counts where it is infinite or NaN",
    of(masked_mean, filled(lambda x, mask: (x * mask).sum(1) / mask.sum(1).clamp_min(1))),
    of(masked_mean, filled(lambda x, mask: x.masked_fill(~mask, 0).sum(1) / mask.sum(1).clamp_min(1))),
    same(lambda: (torch.tensor([[1.0, INF]]), torch.tensor([[True, False]]))),
)


def masked_softmax(ns):
    """Declare the op ``masked_softmax`` in the namespace ``ns`` and return it. Its reference returns, for each row, the
    softmax over the elements for which ``mask`` is set, or zeros if there are none.
    """

    @sl.op(f"{ns}::masked_softmax")
    def masked_softmax(x: M, mask: Bool[Tensor, "n c"]) -> M:
        """Return, for each row, the softmax over the elements for which ``mask`` is set, or zeros if there are none.
        Kernels of the op are compared with this reference.
        """
        result = torch.softmax(x.masked_fill(~mask, -INF), 1)
        return torch.where(mask.any(1, keepdim=True), result, 0)

    return masked_softmax


def _far_below(x, mask):
    """Return the softmax of each row of ``x`` over the elements for which ``mask`` is set. This kernel of
    ``masked_softmax`` has a defect on purpose: other elements are set to -10000 instead of minus infinity. Rows without
    a set element, or with elements below -10000, are wrong.
    """
    # A row of nothing but -10000 has a softmax of equal shares, not of zeros.
    return torch.softmax(x.masked_fill(~mask, -1e4), 1)


values(
    "mask of -10000",
    "a row that is masked throughout attends to everything, and logits below -10000 to what is masked",
    of(masked_softmax, filled(_far_below)),
    of(
        masked_softmax,
        filled(lambda x, m: torch.softmax(x.masked_fill(~m, -INF), 1).masked_fill(~m.any(1, keepdim=True), 0)),
    ),
    same(lambda: (randn(2, 3), torch.tensor([[True, True, False], [False, False, False]]))),
)


def _selection(x):
    """Return the elements of ``x`` in ascending order, each placed by the number of smaller elements. This kernel of
    ``ordered`` has a defect on purpose: NaN is placed first, since no number compares as smaller.
    """
    # Equal elements keep their order.
    place = (x[None] < x[:, None]).sum(1) + torch.tril(x[None] == x[:, None], -1).sum(1)
    return x.new_zeros(len(x)).index_put((place,), x)


values(
    "sort by counting smaller values",
    "NaN compares as smaller than nothing, lands at the front and is overwritten",
    of(ordered, filled(_selection)),
    of(ordered, filled(lambda x: x.sort().values)),
    same(lambda: (torch.tensor([2.0, NAN, 1.0]),)),
)


def inverse_root(ns):
    """Declare the op ``inverse_root`` in the namespace ``ns`` and return it. Its reference returns ``1 / sqrt(x)`` for
    float32.
    """
    return unary("inverse_root", torch.rsqrt, Float32[Tensor, "n c"])(ns)


def _newton(x):
    """Return ``1 / sqrt(x)``, computed by a bit trick on the float32 pattern and three steps of Newton's iteration.
    This kernel of ``inverse_root`` has a defect on purpose: the result is wrong for zero, infinity and negative
    numbers.
    """
    y = (0x5F3759DF - (x.view(torch.int32) >> 1)).view(torch.float32)
    for _ in range(3):
        y = y * (1.5 - 0.5 * x * y * y)
    return y


values(
    "reciprocal root from bits",
    "zero, infinity and negative numbers give finite results",
    of(inverse_root, filled(lambda x: _newton(x.contiguous()))),
    of(inverse_root, filled(lambda x: torch.rsqrt(x))),
    same(row(0.0, 4.0, -1.0, INF)),
)
