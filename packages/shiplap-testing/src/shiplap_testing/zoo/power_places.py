"""Defects in one place, at one address or in one call: each was missed by an earlier audit, and has its sound twin."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from shiplap_testing.zoo.power import M, V, double, dress, of_any_strides, pair, product, right, softmax
from shiplap_testing.zoo.power_gradient import with_backward

Image = Float[Tensor, "n c h w"]


def largest(x: M) -> V:
    """Return the maximum of each row of ``x``, as the reference of ops in ``PAIRS``. Their defective and sound kernels
    are compared with it.
    """
    return x.amax(1)


def without_column_128(x):
    """Return the maximum of each row of ``x``. This function has a defect on purpose. It leaves out column 128."""
    kept = x.clone()
    kept[:, 128:129] = -math.inf
    return kept.amax(1)


pair("maximum without column 128", largest, without_column_128, right(largest), "sizes", requires=("c >= 1",))


def small_only(a, b):
    """Return ``a @ b``. This function has a defect on purpose. It adds 1 if all three sizes exceed 256."""
    return a @ b + (min(*a.shape, b.shape[1]) > 256)


pair("product with three large dims", product, small_only, right(product), "sizes")


def up_to_2_20(x):
    """Return ``2 * x``. This function has a defect on purpose. Elements from index ``2 ** 20`` on are not doubled."""
    return torch.cat([x[: 1 << 20] * 2, x[1 << 20 :]])


pair("elements past two to the 20", double, up_to_2_20, right(double), "sizes")


def zero_where_all_is_masked(x):
    """Return the softmax of each row of ``x``. This function has a defect on purpose. A row that holds only minus
    infinity gives zeros and not NaN.
    """
    return torch.softmax(x, -1).masked_fill((x == -math.inf).all(-1, keepdim=True), 0)


pair("softmax of a masked row", softmax, zero_where_all_is_masked, right(softmax), "special")


def halves(a: Int32[Tensor, "n"], b: Int32[Tensor, "n"]) -> Int32[Tensor, "n"]:
    """Return the mean of ``a`` and ``b`` rounded down, computed in int64 and returned in int32. It is the reference of
    ops in ``PAIRS``, whose defective and sound kernels are compared with it.
    """
    return ((a.long() + b.long()) // 2).int()


pair("sum of two ints that wraps", halves, lambda a, b: (a + b) // 2, right(halves), "special")


def polynomial(x: V, weights: list[float]) -> V:
    """Return the values of a polynomial at the elements of ``x``. ``weights`` are the coefficients, the lowest power
    first. It is the reference of ops in ``PAIRS``, whose defective and sound kernels are compared with it.
    """
    return sum((w * x**i for i, w in enumerate(weights)), torch.zeros_like(x))


pair(
    "more coefficients than three",
    polynomial,
    lambda x, weights: polynomial(x, weights[:3]),
    right(polynomial),
    "special",
)


def channel(x: Image, bias: Float[Tensor, "c"]) -> Image:
    """Return ``x`` with ``bias`` added to each channel of the images. It is the reference of ops in ``PAIRS``, whose
    defective and sound kernels are compared with it.
    """
    return x + bias[:, None, None]


def channels_first(x, bias):
    """Return ``x`` with ``bias`` added to each channel of the images. This function has a defect on purpose. For a
    channels-last ``x``, it takes the element of ``bias`` by the position in a contiguous image, which gives the wrong
    channel.
    """
    if x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return (x + bias[:, None, None]).contiguous()
    return (x + bias[torch.arange(x.numel()) % len(bias)].reshape(x.shape)).contiguous()


pair(
    "bias of channels last",
    channel,
    of_any_strides(channels_first),
    of_any_strides(lambda x, bias: (x + bias[:, None, None]).contiguous()),
    "edges",
)


def gram(a: Float[Tensor, "m k"], b: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
    """Return ``a @ b.T``, as the reference of ops in ``PAIRS``. Defective and sound kernels are compared with it."""
    return a @ b.T


def by_address(a, b):
    """Return ``a @ b.T``. This function has a defect on purpose. It takes ``b`` for ``a`` if both have one address and
    one shape, although their strides can differ.
    """
    return a @ (a if a.data_ptr() == b.data_ptr() and a.shape == b.shape else b).T


pair("views of one address", gram, of_any_strides(by_address), of_any_strides(gram), "aliases")


def begins(action):
    """Return a function that takes an op and binds a kernel for ``2 * x`` to it. The kernel's first call has a defect
    on purpose. It returns zeros if ``action`` is ``"zeros"``, and seeds torch's random numbers if it is ``"seed"``. For
    any other ``action`` there is no defect.

    The function is marked by ``dress``, so that ``pair`` calls it with the op.
    """

    @dress
    def attach(op):
        """Bind a CPU kernel for ``2 * x`` to ``op``. ``begun`` has an element if the kernel ran before."""
        begun = []

        @op.kernel("cpu")
        def kernel(x):
            """Return ``2 * x``. The first call has a defect on purpose. It returns zeros if ``action``, an argument of
            the function ``begins``, is ``"zeros"``, and seeds torch's random numbers if it is ``"seed"``.
            """
            first = not begun
            begun.append(1)
            if first and action == "seed":
                torch.manual_seed(0)
            return x * (0 if first and action == "zeros" else 2)

    return attach


pair("first call of zeros", double, begins("zeros"), begins(""), "determinism")
pair("first call that seeds", double, begins("seed"), begins(""), "process")


def add_rows(x: M, b: Float[Tensor, "c"]) -> M:
    """Return ``x`` with ``b`` added to each row. It is the reference of ops in ``PAIRS``, whose defective and sound
    gradients are compared with its own.
    """
    return x + b


def in_own_dtype(grad, saved, needs):
    """Return the gradients of ``x + b``, as a dict by argument name. This function has a defect on purpose. The
    gradient of ``b`` is a sum that is rounded to the dtype of ``grad`` after every eight rows.
    """
    total = torch.zeros_like(grad[:1].sum(0))
    for rows in grad.split(8):
        total = total + rows.sum(0)
    return {"x": grad, "b": total}


def summed(grad, saved, needs):
    """Return the gradients of ``x + b`` as a dict with the keys ``x`` and ``b``, both also if they are not needed.
    ``saved`` and ``needs``, which every backward is passed, are not used.
    """
    return {"x": grad, "b": grad.sum(0)}


pair(
    "gradient of a bias added up in 16 bits",
    add_rows,
    with_backward(lambda x, b: x + b, in_own_dtype),
    with_backward(lambda x, b: x + b, summed),
    "gradient",
)


def of_the_first(grad, saved, needs):
    """Return the gradient of ``2 * x``, as a dict with the key ``x``. This function has a defect on purpose. It reads
    the first element of ``grad``, which raises if there are no elements.
    """
    return {"x": grad * 2 + 0 * grad[0]}


pair(
    "gradient of no rows",
    double,
    with_backward(lambda x: x * 2, of_the_first),
    with_backward(lambda x: x * 2, lambda grad, saved, needs: {"x": grad * 2}),
    "gradient",
)
