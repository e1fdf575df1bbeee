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
    def bind(op):
        seen = {}

        @op.kernel("cpu")
        def forward(x, *, out):
            if key is None:
                torch.mul(x, 2, out=out)
                return
            if seen.get("key") != key(x):
                seen["key"], seen["value"] = key(x), x * 2
            out.copy_(seen["value"])

    return bind


def _after_a_change(op):
    x = torch.ones(2, 3)
    op(x)
    x.fill_(5)
    return close(op(x), torch.full((2, 3), 10.0))


aliasing(
    "a result remembered by address",
    "the same address and shape a second time: the tensor was changed in between",
    of(doubled, _memo(lambda x: (x.data_ptr(), x.shape, x.stride(), x.dtype))),
    of(doubled, _memo(None)),
    _after_a_change,
)


def taken(ns):
    @sl.op(f"{ns}::taken", requires="n >= 1")
    def taken(x: M, index: Int64[Tensor, "m"]) -> Float[Tensor, "m c"]:
        return x[index % x.shape[0]]

    return taken


def _plan(by_shape):
    def bind(op):
        plans = {}

        @op.kernel("cpu")
        def forward(x, index, *, out):
            plan = index % x.shape[0]
            if by_shape:
                plan = plans.setdefault((x.shape, index.shape), plan.clone())
            out.copy_(x[plan])

    return bind


def _another_index(op):
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
    @sl.op(f"{ns}::total")
    def total(x: M, more: list[M]) -> M:
        return sum(more, x)

    return total


def _running(x, more, *, out):
    for term in more:
        x += term
    out.copy_(x)


def _adding(x, more, *, out):
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
    @sl.op(f"{ns}::ranks")
    def ranks(keys: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        return keys.sort().values

    return ranks


aliasing(
    "keys sorted in place",
    "sorting needs no second buffer that way, and the caller's keys change",
    of(ranks, kernel(lambda keys, *, out: out.copy_(keys.copy_(keys.sort().values)))),
    of(ranks, kernel(lambda keys, *, out: out.copy_(keys.sort().values))),
    same(lambda: (ints(0, 9, 6),)),
)
