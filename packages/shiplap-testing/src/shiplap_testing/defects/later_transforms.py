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
    """Return a function that registers the operator ``times`` in a given namespace, and returns the op that
    ``sl.adopt`` makes of it. The operator returns ``x * y`` and has a forward-mode derivative written by hand. If
    ``right`` is true, there is no defect. If it is false, there is a defect on purpose: the tangent of the result is
    zero if only ``y`` has a tangent.
    """

    def fn(x, y):
        """Return ``x * y``, with a forward-mode tangent if ``x`` or ``y`` has one. If ``right`` (argument of
        ``_with_rule``) is true, there is no defect. If it is false, there is a defect on purpose: the tangent is zero
        if only ``y`` has one.
        """
        (a, da), (b, db) = forward_ad.unpack_dual(x), forward_ad.unpack_dual(y)
        out = a * b
        if da is None and db is None:
            return out
        if da is None:
            return forward_ad.make_dual(out, a * db if right else torch.zeros_like(out))
        return forward_ad.make_dual(out, da * b if db is None else da * b + a * db)

    def make(ns):
        """Register the operator ``times``, which computes ``x * y``, in the namespace ``ns``. Return the op that
        ``sl.adopt`` makes of it.
        """
        foreign(ns, "times(Tensor x, Tensor y) -> Tensor", fn)

        @sl.adopt(f"{ns}::times")
        def times(x: M, y: M) -> M:
            """Return ``x * y``. Results of the adopted operator are compared with this reference."""
            return x * y

        return times

    return make


def _second_tangent(op):
    """Return whether the forward-mode derivative of ``op`` (``times``) in the direction of a tangent of ``y`` is ``x``
    times the tangent.
    """
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
    """Return a function that registers the operator ``rotated`` with a vmap rule in a given namespace, and returns the
    op that ``sl.adopt`` makes of it. If ``right`` is true, there is no defect. If it is false, there is a defect on
    purpose: the rule takes the first dim of ``y`` for its batch dim.
    """

    def rule(info, dims, x, y, overload):
        """Call ``overload`` for each element of the batch, and return the stacked results and 0, which is their batch
        dim. ``dims`` has the batch dims of ``x`` and ``y``, or None for an argument without one. If ``right`` (argument
        of ``_batching``) is true, there is no defect. If it is false, there is a defect on purpose: the batch dim of
        ``y`` is taken to be 0.
        """
        x = x if dims[0] is None else x.movedim(dims[0], 0)
        y = y if dims[1] is None else y.movedim(dims[1] if right else 0, 0)
        # One call for each entry: slow, but right for any op.
        size = info.batch_size
        rows = [overload(x if dims[0] is None else x[i], y if dims[1] is None else y[i]) for i in range(size)]
        return torch.stack(rows), 0

    def make(ns):
        """Register the operator ``rotated`` in the namespace ``ns``, with an implementation for fake tensors and the
        vmap rule ``rule`` (function of ``_batching``). Return the op that ``sl.adopt`` makes of it.
        """
        real = _rotated
        library = foreign(ns, "rotated(Tensor x, Tensor y) -> Tensor", real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{ns}::rotated", lambda x, y: torch.empty_like(x), lib=library)

        @sl.adopt(f"{ns}::rotated")
        def rotated(x: Int64[Tensor, "n"], y: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
            """Return the sum of ``3 * x`` and the vector ``y`` with its elements reversed. Results of the adopted
            operator are compared with this reference.
            """
            return _rotated(x, y)

        torch.library.register_vmap(
            f"{ns}::rotated", lambda info, dims, x, y: rule(info, dims, x, y, rotated.overload), lib=library
        )
        return rotated

    return make


def _rotated(x, y):
    """Return the sum of ``3 * x`` and the vector ``y`` with its elements reversed."""
    return x * 3 + y.flip(0)


def _last_dim_batched(op):
    """Return whether ``op`` (``rotated``) is right under vmap if the batch dim of ``y`` is its second. If the op raises
    an exception, the result is False.
    """
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
