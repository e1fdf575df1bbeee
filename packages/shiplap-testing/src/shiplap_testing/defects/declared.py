"""Declarations that several defects share: each declares its op in the namespace that it is given."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.witness import wide

V = Float[Tensor, "n"]
M = Float[Tensor, "n c"]


def matmul(ns: str) -> sl.Op:
    """Declare the op ``mm`` in the namespace ``ns`` and return it. Its reference returns the matrix product ``a @
    b``.
    """

    @sl.op(f"{ns}::mm")
    def mm(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
        """Return the matrix product ``a @ b``. Kernels of the op are compared with this reference."""
        return a @ b

    return mm


def softmax(ns: str) -> sl.Op:
    """Declare the op ``softmax`` in the namespace ``ns`` and return it. Its reference returns the softmax of each row
    of ``x``.
    """

    @sl.op(f"{ns}::softmax")
    def softmax(x: M) -> M:
        """Return the softmax of each row of ``x``. Kernels of the op are compared with this reference."""
        return torch.softmax(x, 1)

    return softmax


def scaled(ns: str) -> sl.Op:
    """Declare the op ``scaled`` in the namespace ``ns`` and return it. Its reference returns ``x * scale``."""

    @sl.op(f"{ns}::scaled")
    def scaled(x: M, scale: float = 2.0) -> M:
        """Return ``x * scale``. Kernels of the op are compared with this reference."""
        return x * scale

    return scaled


def added(ns: str) -> sl.Op:
    """Declare the op ``added`` in the namespace ``ns`` and return it. Its reference returns ``x + y``."""

    @sl.op(f"{ns}::added")
    def added(x: M, y: M) -> M:
        """Return ``x + y``. Kernels of the op are compared with this reference."""
        return x + y

    return added


def product(ns: str) -> sl.Op:
    """Declare the op ``product`` in the namespace ``ns`` and return it. Its reference returns ``x * y``."""

    @sl.op(f"{ns}::product")
    def product(x: M, y: M) -> M:
        """Return ``x * y``. Kernels of the op are compared with this reference."""
        return x * y

    return product


def doubled(ns: str) -> sl.Op:
    """Declare the op ``doubled`` in the namespace ``ns`` and return it. Its reference returns ``2 * x``."""

    @sl.op(f"{ns}::doubled")
    def doubled(x: M) -> M:
        """Return ``2 * x``. Kernels of the op are compared with this reference."""
        return x * 2

    return doubled


def relu(ns: str) -> sl.Op:
    """Declare the op ``relu`` in the namespace ``ns`` and return it. Its reference returns ``x`` with negative numbers
    replaced by zero.
    """

    @sl.op(f"{ns}::relu")
    def relu(x: M) -> M:
        """Return ``x`` with negative numbers replaced by zero. Kernels of the op are compared with this reference."""
        return torch.relu(x)

    return relu


def row_max(ns: str) -> sl.Op:
    """Declare the op ``row_max`` in the namespace ``ns`` and return it. Its reference returns the maximum of each row
    of ``x``.
    """

    @sl.op(f"{ns}::row_max", requires="c >= 1")
    def row_max(x: M) -> V:
        """Return the maximum of each row of ``x``. Kernels of the op are compared with this reference."""
        return x.amax(1)

    return row_max


def row_sum(ns: str) -> sl.Op:
    """Declare the op ``row_sum`` in the namespace ``ns`` and return it. Its reference returns the sum of each row of
    ``x``.
    """

    @sl.op(f"{ns}::row_sum")
    def row_sum(x: M) -> V:
        """Return the sum of each row of ``x``. Kernels of the op are compared with this reference."""
        return x.sum(1)

    return row_sum


def column_sum(ns):
    """Declare the op ``column_sum`` in the namespace ``ns`` and return it. Its reference returns the sum of each column
    of ``x``.
    """

    @sl.op(f"{ns}::column_sum")
    def column_sum(x: M) -> Float[Tensor, "c"]:
        """Return the sum of each column of ``x``. Kernels of the op are compared with this reference."""
        return x.sum(0)

    return column_sum


def rms_norm(ns: str) -> sl.Op:
    """Declare the op ``rms_norm`` in the namespace ``ns`` and return it. Its reference divides each row of ``x`` by the
    square root of the sum of its mean square and ``eps``. The result has the dtype of ``x``.
    """

    @sl.op(f"{ns}::rms_norm", requires="c >= 1")
    def rms_norm(x: M, eps: float = 1e-6) -> M:
        """Return each row of ``x`` divided by the root of its mean square plus ``eps``, in the dtype of ``x``. Kernels
        of the op are compared with this reference.
        """
        y = wide(x)
        return (y * torch.rsqrt(y.square().mean(1, keepdim=True) + eps)).to(x.dtype)

    return rms_norm


def ordered(ns: str) -> sl.Op:
    """Declare the op ``ordered`` in the namespace ``ns`` and return it. Its reference returns the elements of ``x`` in
    ascending order.
    """

    @sl.op(f"{ns}::ordered")
    def ordered(x: V) -> V:
        """Return the elements of ``x`` in ascending order. Kernels of the op are compared with this reference."""
        return x.sort().values

    return ordered


def attention(ns: str) -> sl.Op:
    """Declare the op ``attention`` in the namespace ``ns`` and return it.

    Its reference returns the attention of the queries ``q`` over the keys ``k`` and values ``v``. Scores are divided by
    the square root of the head dim.
    """

    @sl.op(f"{ns}::attention", requires=("n >= 1", "d >= 1"))
    def attention(q: Float[Tensor, "m d"], k: Float[Tensor, "n d"], v: Float[Tensor, "n e"]) -> Float[Tensor, "m e"]:
        """Return the attention of the queries ``q`` over the keys ``k`` and values ``v``, with scores scaled by the
        root of the head dim. Kernels of the op are compared with this reference.
        """
        return torch.softmax(q @ k.T * q.shape[1] ** -0.5, 1) @ v

    return attention


def gather(ns: str) -> sl.Op:
    """Declare the op ``gather`` in the namespace ``ns`` and return it. Its reference returns row ``index[i]`` of ``x``
    as row ``i``, and zeros if ``index[i]`` is -1.
    """

    @sl.op(f"{ns}::gather")
    def gather(x: M, index: Int64[Tensor, "m"]) -> Float[Tensor, "m c"]:
        """Return the rows of ``x`` at ``index``, with zeros where the index is -1. Kernels of the op are compared with
        this reference.
        """
        return torch.cat([x, x.new_zeros(1, x.shape[1])])[index]  # -1 is the last row, which is zero

    @gather.samples
    def _(rng, sizes, dtype, device):
        """Return sample arguments of ``gather``, a random matrix and a random index tensor. Indices go from -1, which
        stands for a row of zeros, to that of the last row.
        """
        x = torch.randn(sizes["n"], sizes["c"], generator=rng).to(device, dtype)
        return x, torch.randint(-1, sizes["n"], (sizes["m"],), generator=rng).to(device)

    return gather


def scatter(ns: str) -> sl.Op:
    """Declare the op ``scatter`` in the namespace ``ns`` and return it. Its reference returns a matrix of ``bins``
    rows, of which row ``i`` is the sum of the rows of ``x`` with ``index % bins == i``.
    """

    @sl.op(f"{ns}::scatter", requires="bins >= 1")
    def scatter(x: M, index: Int64[Tensor, "n"], bins: int = 5) -> Float[Tensor, "bins c"]:
        """Return a matrix of ``bins`` rows, of which row ``i`` is the sum of the rows of ``x`` with ``index % bins ==
        i``. Kernels of the op are compared with this reference.
        """
        return x.new_zeros(bins, x.shape[1]).index_add(0, index % bins, x)

    return scatter


def masked_mean(ns: str) -> sl.Op:
    """Declare the op ``masked_mean`` in the namespace ``ns`` and return it. Its reference returns, for each row of
    ``x``, the mean of the elements for which ``mask`` is set, or zero if there are none.
    """

    @sl.op(f"{ns}::masked_mean")
    def masked_mean(x: M, mask: Bool[Tensor, "n c"]) -> V:
        """Return, for each row of ``x``, the mean of the elements for which ``mask`` is set, or zero if there are none.
        Kernels of the op are compared with this reference.
        """
        return torch.where(mask, x, 0).sum(1) / mask.sum(1).clamp_min(1)

    return masked_mean


def update(ns: str) -> sl.Op:
    """Declare the op ``update`` in the namespace ``ns`` and return it. Its reference adds ``x`` to ``table`` in
    place.
    """

    @sl.op(f"{ns}::update", mutates=["table"])
    def update(table: M, x: M) -> None:
        """Add ``x`` to ``table`` in place and return None. Kernels of the op are compared with this reference."""
        table.add_(x)

    return update


def add_to(table, x):
    """Add ``x`` to ``table`` in place. This is a sound kernel of the op ``update``."""
    table.add_(x)


def distinct(ns: str) -> sl.Op:
    """Declare the op ``distinct`` in the namespace ``ns`` and return it. Its reference returns the distinct numbers of
    ``x`` in ascending order, at most as many as ``x`` has elements.
    """

    @sl.op(f"{ns}::distinct", bounds={"m": "n"})
    def distinct(x: Int64[Tensor, "n"]) -> Int64[Tensor, "m"]:
        """Return the distinct numbers of ``x`` in ascending order, at most as many as ``x`` has elements. Kernels of
        the op are compared with this reference.
        """
        return torch.unique(x)

    return distinct
