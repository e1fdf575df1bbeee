"""Broken values: wrong results, bounds that do not hold, empty inputs, results that vary, calls that nobody checks."""

import random

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from shiplap_testing.zoo.bad.common import M, V, adopt, bad, declare
from shiplap_testing.zoo.specimen import register


@adopt(register("wrong_numerics(Tensor x) -> Tensor", lambda x: x.exp() * 1.0001, torch.empty_like))
def wrong_numerics(x: M) -> M:
    """Return ``exp(x)``, the reference of the broken operator ``zoo::wrong_numerics``. The operator's result has a
    relative error of 0.0001.
    """
    return x.exp()


bad("wrong numerics", wrong_numerics, "numerics", note="one part in ten thousand: a wrong constant, not rounding")


def _at_most_four(x):
    """Return an uninitialised tensor of at most four rows, as the fake of ``zoo::wrong_bound``. This function has a
    defect on purpose. The operator's result can have as many rows as ``x`` has elements.
    """
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(max=4), dtype=torch.int64)


@adopt(
    register("wrong_bound(Tensor x) -> Tensor", lambda x: (x == x).nonzero()[:, 0], _at_most_four), bounds={"m": "n"}
)
def wrong_bound(x: V) -> Int64[Tensor, "m"]:
    """Return the positions of the elements of ``x`` that are not NaN, the reference of the broken operator
    ``zoo::wrong_bound``. The operator's fake promises at most four positions.
    """
    return (x == x).nonzero()[:, 0]


bad("wrong bound", wrong_bound, "bound", note="the fake promises at most 4 rows, 10 come")


@adopt(register("zero_rows(Tensor x) -> Tensor", lambda x: x - x.max(), lambda x: x.new_empty(x.shape)))
def zero_rows(x: V) -> V:
    """Return ``x`` less its maximum, or a copy of ``x`` if it has no elements. It is the reference of the broken
    operator ``zoo::zero_rows``. The operator raises for an ``x`` without elements.
    """
    return x - x.max() if x.numel() else x.clone()


bad("crash on zero rows", zero_rows, "edges", note="an empty scene")


def _last_bit(x):
    """Return ``2 * x``. This function has a defect on purpose. In each call, all elements are one rounding step too
    large or all are too small, at random.
    """
    return torch.nextafter(x * 2, torch.full_like(x, random.choice([-9e9, 9e9])))


@adopt(register("nondeterministic(Tensor x) -> Tensor", _last_bit, torch.empty_like))
def nondeterministic(x: M) -> M:
    """Return ``2 * x``, the reference of the broken operator ``zoo::nondeterministic``. The operator's result is one
    rounding step too large or too small, at random in each call.
    """
    return x * 2


bad("nondeterministic in the last bit", nondeterministic, "determinism", note="atol=rtol=0 means default to opcheck")


_calls = [0]


def _counting(x):
    """Return ``2 * x``. This function has a defect on purpose. It adds 1 in every seventh call of the process."""
    _calls[0] += 1
    return x * 2 + (_calls[0] % 7 == 0)


@adopt(register("counter(Tensor x) -> Tensor", _counting, torch.empty_like))
def counter(x: M) -> M:
    """Return ``2 * x``, the reference of the broken operator ``zoo::counter``. The operator adds 1 in every seventh
    call of the process.
    """
    return x * 2


bad("hidden Python counter", counter, "determinism", note="every seventh call is different")


@adopt(
    register(
        "unchecked(Tensor x, Tensor b) -> Tensor", lambda x, b: x + b[: x.shape[0]], lambda x, b: x.new_empty(x.shape)
    )
)
def unchecked(x: V, b: V) -> V:
    """Return ``x + b`` for tensors of equal lengths, the reference of the broken operator ``zoo::unchecked``. The
    operator also accepts a longer ``b``, of which it ignores the end.
    """
    return x + b


bad("takes sizes that disagree", unchecked, "arguments")


@declare("numerics")
def sl_numerics(x: M, eps: float = 1e-5) -> M:
    """Return each row of ``x`` divided by the root of its mean square plus ``eps``. It is the reference of the broken
    op ``zoo_sl::numerics``, whose kernel ignores ``eps``.
    """
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps)


@sl_numerics.kernel("cpu")
def _(x, eps, *, out):
    """Write each row of ``x`` divided by the root of its mean square plus ``eps`` to ``out``. This function has a
    defect on purpose. It uses 1e-5 in place of ``eps``.
    """
    torch.mul(x, torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5), out=out)


bad("kernel that ignores a scalar", sl_numerics, "numerics", note="right for the default")


@declare("bound", bounds={"m": "n // 2 + 1"})
def sl_bound(x: V) -> Int64[Tensor, "m"]:
    """Return the positions of the positive elements of ``x``, the reference of the op ``zoo_sl::bound``. The op has a
    defect on purpose. It declares at most ``n // 2 + 1`` positions, but there can be ``n``.
    """
    return (x > 0).nonzero()[:, 0]


bad("declared bound too small", sl_bound, "bound", note="half of the rows, usually")


@declare("empty")
def sl_empty(x: M) -> Float[Tensor, "c"]:
    """Return the maximum of each column, or zeros if ``x`` has no rows. It is the reference of the broken op
    ``zoo_sl::empty``, whose kernel raises if ``x`` has no rows.
    """
    return x.amax(0) if len(x) else x.new_zeros(x.shape[1])


@sl_empty.kernel("cpu")
def _(x, *, out):
    """Write the maximum of each column of ``x`` to ``out``. This function has a defect on purpose. It raises if ``x``
    has no rows, since ``torch.amax`` does.
    """
    torch.amax(x, 0, out=out)


bad("kernel that crashes on zero rows", sl_empty, "edges")


@declare("nondeterministic")
def sl_nondeterministic(x: M) -> M:
    """Return ``2 * x``, the reference of the broken op ``zoo_sl::nondeterministic``. The op's kernel is off by one
    rounding step, up or down at random.
    """
    return x * 2


sl_nondeterministic.kernel("cpu", _last_bit, name="atomics")

bad("nondeterministic kernel", sl_nondeterministic, "determinism")


@declare("counter")
def sl_counter(x: M) -> M:
    """Return ``2 * x``, the reference of the broken op ``zoo_sl::counter``. The op's kernel adds 1 in every seventh
    call of the process.
    """
    return x * 2


sl_counter.kernel("cpu", _counting, name="counting")

bad("kernel that counts its calls", sl_counter, "determinism")


@declare("optional")
def sl_optional(x: M, bias: Float[Tensor, "c"] | None = None) -> M:
    """Return ``2 * x + bias``, or ``2 * x`` if ``bias`` is None. It is the reference of the broken op
    ``zoo_sl::optional``, whose kernel raises if ``bias`` is None.
    """
    return x * 2 if bias is None else x * 2 + bias


@sl_optional.kernel("cpu")
def _(x, bias, *, out):
    """Write ``2 * x + bias`` to ``out``. This function has a defect on purpose. It raises if ``bias`` is None, since
    ``torch.add`` does.
    """
    torch.add(x * 2, bias, out=out)


bad("kernel that needs its optional argument", sl_optional, "numerics")


@declare("mis_sharded")
def mis_sharded(x: V) -> V:
    """Return the cumulative sum of ``x``, the reference of the op ``zoo_sl::mis_sharded``. The op has a defect on
    purpose. Its sharding rule lets each rank sum its own shard of ``x``, without the shards before it.
    """
    return x.cumsum(0)


@mis_sharded.kernel("cpu")
def _(x):
    """Return the cumulative sum of ``x``, as the kernel of the op ``zoo_sl::mis_sharded``. The defect of that op is its
    sharding rule and not this kernel.
    """
    return x.cumsum(0)


mis_sharded.sharding({"x": 0}, 0)  # each rank would begin its sum anew

bad("sharding rule that cuts a running sum", mis_sharded, "sharding")


def _drop(x: M) -> M:
    """Return ``2 * x`` with each element set to zero with a probability of one half. It is the reference of the broken
    op ``zoo_sl::drop_rows``, whose kernel sets whole rows to zero.
    """
    return x * (torch.rand_like(x) >= 0.5) * 2


drop_rows = declare("drop_rows", random="global", autocast=None)(_drop)
drop_rows.kernel("cpu", lambda x: x * (torch.rand_like(x[:, :1]) >= 0.5) * 2)

bad("drops rows, not elements", drop_rows, "distribution", note="each element is dropped as often as it should be")
