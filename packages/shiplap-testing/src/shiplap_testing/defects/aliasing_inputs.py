"""Arguments that a kernel remembers by address or shape, or writes to."""

from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, add_to, doubled, update
from shiplap_testing.defects.defect import add, kernel, of
from shiplap_testing.defects.witness import close, ints, randn, same

aliasing = partial(add, "aliasing")


def _memo(key):
    """Return a function that registers a CPU kernel with the op ``doubled``. The kernel writes ``2 * x`` to ``out``. If
    ``key`` is None, there is no defect. If it is a function of a tensor, there is a defect on purpose: while ``key(x)``
    stays equal, the result of the earlier call is written again. The elements of ``x`` may have changed since.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``. It writes ``2 * x`` to ``out``. If ``key`` (argument of
        ``_memo``) is None, there is no defect. If it is a function, there is a defect on purpose: while ``key(x)``
        stays equal, the result of the earlier call is written again.
        """
        seen = {}

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write ``2 * x`` to ``out``.

            If ``key`` (argument of ``_memo``) is None, there is no defect. If it is a function, there is a defect on
            purpose: while ``key(x)`` stays equal, the result of the earlier call is written again. The elements of
            ``x`` may have changed since.
            """
            if key is None:
                torch.mul(x, 2, out=out)
                return
            if seen.get("key") != key(x):
                seen["key"], seen["value"] = key(x), x * 2
            out.copy_(seen["value"])

    return bind


def _after_a_change(op):
    """Change the argument of ``op`` (``doubled``) in place between two calls. Return whether the second result is that
    of the new numbers.
    """
    x = torch.ones(2, 3)
    op(x)
    x.fill_(5)
    return close(op(x), torch.full((2, 3), 10.0))


aliasing(
    "a result remembered by address",
    "the same address and shape a second time: the tensor was changed in between",
    # All that a kernel can see of a tensor without reading its elements.
    of(doubled, _memo(lambda x: (x.data_ptr(), x.shape, x.stride(), x.dtype))),
    of(doubled, _memo(None)),
    _after_a_change,
)


def taken(ns):
    """Declare the op ``taken`` in the namespace ``ns`` and return it. Its reference returns row ``index[i] % n`` of
    ``x`` as row ``i``, where ``n`` is the number of rows of ``x``.
    """

    @sl.op(f"{ns}::taken", requires="n >= 1")
    def taken(x: M, index: Int64[Tensor, "m"]) -> Float[Tensor, "m c"]:
        """Return the rows of ``x`` at ``index``, taken modulo the number of rows. Kernels of the op are compared with
        this reference.
        """
        return x[index % x.shape[0]]

    return taken


def _plan(by_shape):
    """Return a function that registers a CPU kernel with the op ``taken``. The kernel writes the rows of ``x`` at
    ``index`` to ``out``. If ``by_shape`` is false, there is no defect. If it is true, there is a defect on purpose:
    later calls with the same shapes use the index of the first call.
    """

    def bind(op):
        """Register the CPU kernel ``forward`` with ``op``.

        It writes the rows of ``x`` at ``index`` to ``out``. If ``by_shape`` (argument of ``_plan``) is false, there is
        no defect. If it is true, there is a defect on purpose: later calls with the same shapes use the index of the
        first call.
        """
        plans = {}

        @op.kernel("cpu")
        def forward(x, index, *, out):
            """Write the rows of ``x`` at ``index`` to ``out``. Indices are taken modulo the number of rows. If
            ``by_shape`` (argument of ``_plan``) is false, there is no defect. If it is true, there is a defect on
            purpose: the index of the first call with the same shapes is used.
            """
            plan = index % x.shape[0]
            if by_shape:
                plan = plans.setdefault((x.shape, index.shape), plan.clone())
            out.copy_(x[plan])

    return bind


def _another_index(op):
    """Call ``op`` (``taken``) twice with different indices of the same length. Return whether the second result has the
    rows at the second index.
    """
    x = randn(4, 2)
    op(x, torch.tensor([0, 1, 2]))
    return close(op(x, torch.tensor([3, 2, 1])), x[[3, 2, 1]])


aliasing(
    "an index plan remembered by shape",
    "the second index of the same length is not looked at",
    of(taken, _plan(True)),
    of(taken, _plan(False)),
    _another_index,
)


def _clearing(table, x):
    """Add ``x`` to ``table`` in place. This kernel of ``update`` has a defect on purpose: ``x`` is set to zero
    afterwards, although the declaration names only ``table`` as written to.
    """
    table.add_(x)
    x.zero_()


aliasing(
    "an argument that is cleared after use",
    "the op says that it writes to the table; it also zeroes what it added",
    of(update, kernel(_clearing)),
    of(update, kernel(add_to)),
    same(lambda: (randn(2, 3), randn(2, 3, seed=1))),
)


def total(ns):
    """Declare the op ``total`` in the namespace ``ns`` and return it. Its reference returns the sum of ``x`` and the
    tensors of the list ``more``.
    """

    @sl.op(f"{ns}::total")
    def total(x: M, more: list[M]) -> M:
        """Return the sum of ``x`` and the tensors of the list ``more``. Kernels of the op are compared with this
        reference.
        """
        return sum(more, x)

    return total


def _running(x, more, *, out):
    """Write the sum of ``x`` and the tensors of ``more`` to ``out``. This kernel of ``total`` has a defect on purpose:
    it overwrites its argument ``x`` with the sum.
    """
    for term in more:
        x += term
    out.copy_(x)


def _adding(x, more, *, out):
    """Write the sum of ``x`` and the tensors of ``more`` to ``out``, and leave ``x`` unchanged. This kernel of
    ``total`` is the sound counterpart of the defective ``_running``.
    """
    out.copy_(x)
    for term in more:
        out += term


aliasing(
    "a sum that runs in the first term",
    "x += term writes to the caller's tensor",
    of(total, kernel(_running)),
    of(total, kernel(_adding)),
    same(lambda: (randn(2, 3), [randn(2, 3, seed=1)])),
)


def ranks(ns):
    """Declare the op ``ranks`` in the namespace ``ns`` and return it. Its reference returns the elements of ``keys`` in
    ascending order.
    """

    @sl.op(f"{ns}::ranks")
    def ranks(keys: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        """Return the keys in ascending order. Kernels of the op are compared with this reference."""
        return keys.sort().values

    return ranks


aliasing(
    "keys sorted in place",
    "sorting needs no second buffer that way, and the caller's keys change",
    of(ranks, kernel(lambda keys, *, out: out.copy_(keys.copy_(keys.sort().values)))),
    of(ranks, kernel(lambda keys, *, out: out.copy_(keys.sort().values))),
    same(lambda: (ints(0, 9, 6),)),
)
