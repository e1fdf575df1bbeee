"""Later ones: rules for vmap and for forward mode."""

from functools import partial

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.autograd import forward_ad

import shiplap as sl
from shiplap_testing.defects.declared import M
from shiplap_testing.defects.defect import add, foreign
from shiplap_testing.defects.witness import close, randn

transforms = partial(add, "transforms", later=True)


def _with_rule(right):
    """x * y, with a forward-mode derivative that is written by hand."""

    def fn(x, y):
        (a, da), (b, db) = forward_ad.unpack_dual(x), forward_ad.unpack_dual(y)
        out = a * b
        if da is None and db is None:
            return out
        if da is None:
            return forward_ad.make_dual(out, a * db if right else torch.zeros_like(out))
        return forward_ad.make_dual(out, da * b if db is None else da * b + a * db)

    def make(ns):
        foreign(ns, "times(Tensor x, Tensor y) -> Tensor", fn)

        @sl.adopt(f"{ns}::times")
        def times(x: M, y: M) -> M:
            return x * y

        return times

    return make


def _second_tangent(op):
    x, y, t = randn(2, 3).double(), randn(2, 3, seed=1).double(), randn(2, 3, seed=2).double()
    return close(torch.func.jvp(lambda y: op.overload(x, y), (y,), (t,))[1], x * t)


transforms(
    "tangent of the second argument alone",
    "where the first argument has no tangent, the result has none",
    _with_rule(False),
    _with_rule(True),
    _second_tangent,
)


def _batching(right):
    def rule(info, dims, x, y, overload):
        x = x if dims[0] is None else x.movedim(dims[0], 0)
        y = y if dims[1] is None else y.movedim(dims[1] if right else 0, 0)
        size = info.batch_size
        rows = [overload(x if dims[0] is None else x[i], y if dims[1] is None else y[i]) for i in range(size)]
        return torch.stack(rows), 0

    def make(ns):
        real = _rotated
        library = foreign(ns, "rotated(Tensor x, Tensor y) -> Tensor", real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{ns}::rotated", lambda x, y: torch.empty_like(x), lib=library)

        @sl.adopt(f"{ns}::rotated")
        def rotated(x: Int64[Tensor, "n"], y: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
            return _rotated(x, y)

        torch.library.register_vmap(
            f"{ns}::rotated", lambda info, dims, x, y: rule(info, dims, x, y, rotated.overload), lib=library
        )
        return rotated

    return make


def _rotated(x, y):
    return x * 3 + y.flip(0)


def _last_dim_batched(op):
    x, y = torch.arange(12).view(3, 4), torch.arange(12).view(4, 3) + 5
    try:
        return close(torch.vmap(op.overload, in_dims=(0, 1))(x, y), x * 3 + y.T.flip(1))
    except Exception:
        return False


transforms(
    "vmap rule that moves the batch of the first argument only",
    "the batch of the second argument is taken to be its first dim",
    _batching(False),
    _batching(True),
    _last_dim_batched,
)
