"""Right when called plainly: rules for vmap, forward-mode derivatives and autocast."""

from functools import partial

import torch
import torch.autograd.forward_ad as forward_ad
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, V
from shiplap_testing.defects.defect import add, foreign
from shiplap_testing.defects.witness import close, ints, randn, uniform

transforms = partial(add, "transforms")


def _whole(schema, real, declare, rule):
    """Return a function that registers an operator of integers in a given namespace, and returns the op that
    ``declare(ns, name)`` makes of it.

    The operator has the torch schema ``schema``, the implementation ``real`` and a vmap rule. The rule returns
    ``rule(call, dims, *args)``. ``call`` calls the operator, and ``dims`` has the batch dim of each argument. The
    operator has no gradients, so that only the rule is judged.
    """

    def make(ns):
        """Register the operator that ``schema``, ``real`` and ``rule`` (arguments of ``_whole``) describe in the
        namespace ``ns``, with an implementation for fake tensors. Return the op that ``declare`` (argument of
        ``_whole``) makes of it.
        """
        name = schema.partition("(")[0]
        library = foreign(ns, schema, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{ns}::{name}", lambda *args: torch.empty_like(real(*args)), lib=library)
        op = declare(ns, name)
        torch.library.register_vmap(
            f"{ns}::{name}", lambda info, dims, *args: rule(op.overload, dims, *args), lib=library
        )
        return op

    return make


def _cumulated(ns, name):
    """Declare the op that ``sl.adopt`` makes of the operator ``name`` of the namespace ``ns``, and return it.

    Its reference returns the cumulative sum of ``x``. The operator stands for one of another library.
    """

    @sl.adopt(f"{ns}::{name}")
    def cumulated(x: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        """Return the cumulative sum of ``x``. Results of the adopted operator are compared with this reference."""
        return x.cumsum(0)

    return cumulated


CUMULATED = "cumulated(Tensor x) -> Tensor"


def _each(call, dims, *args):
    """Return the result of ``call`` for each element of the batch, stacked along dim 0, and the batch dim 0. ``dims``
    has the batch dim of each argument, or None for an argument without one. This is a vmap rule without a defect.
    """
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    picked = [[a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True)] for i in range(size)]
    return torch.stack([call(*p) for p in picked]), 0


def _first_dim(call, dims, x):
    """Return the stacked results of ``call`` and their batch dim 0. This vmap rule of ``cumulated`` has a defect on
    purpose: the first dim of ``x`` is taken for the batch dim, even if ``dims`` names another one.
    """
    return torch.stack([call(row) for row in x]), 0


transforms(
    "vmap rule that ignores where the batch is",
    "it maps over the first dim, also where in_dims says the second",
    _whole(CUMULATED, lambda x: x.cumsum(0), _cumulated, _first_dim),
    _whole(CUMULATED, lambda x: x.cumsum(0), _cumulated, _each),
    lambda op: close(torch.vmap(op.overload, in_dims=1)(x := ints(0, 9, 4, 4)), x.T.cumsum(1)),
)


def _one_long_row(call, dims, x):
    """Return the results of ``call`` and their batch dim 0. This vmap rule of ``cumulated`` has a defect on purpose: it
    calls ``call`` once, with the whole batch as one vector. The cumulative sum then runs on from one element of the
    batch to the next.
    """
    x = x.movedim(dims[0], 0)
    return call(x.reshape(-1)).view(x.shape), 0


transforms(
    "vmap rule that makes one row of the batch",
    "the running sum goes on from one entry of the batch to the next",
    _whole(CUMULATED, lambda x: x.cumsum(0), _cumulated, _one_long_row),
    _whole(CUMULATED, lambda x: x.cumsum(0), _cumulated, _each),
    lambda op: close(torch.vmap(op.overload)(x := ints(1, 9, 3, 4)), x.cumsum(1)),
)


def _shifted(ns, name):
    """Declare the op that ``sl.adopt`` makes of the operator ``name`` of the namespace ``ns``, and return it. Its
    reference returns the product of ``x`` and the vector ``y`` with its elements reversed. The operator stands for one
    of another library.
    """

    @sl.adopt(f"{ns}::{name}")
    def shifted(x: Int64[Tensor, "n"], y: Int64[Tensor, "n"]) -> Int64[Tensor, "n"]:
        """Return the product of ``x`` and the vector ``y`` with its elements reversed. Results of the adopted operator
        are compared with this reference.
        """
        return x * y.flip(0)

    return shifted


SHIFTED = "shifted(Tensor x, Tensor y) -> Tensor"


def _first_batched(call, dims, x, y):
    """Return the stacked results of ``call`` and their batch dim 0. This vmap rule of ``shifted`` has a defect on
    purpose: if ``x`` has no batch dim, its only dim is taken for one.
    """
    return torch.stack([call(a, y if dims[1] is None else b) for a, b in zip(x, y, strict=False)]), 0


def _only_second(op):
    """Return whether ``op`` (``shifted``) is right under vmap if only ``y`` has a batch dim. If the op raises an
    exception, the result is False.
    """
    x, y = ints(1, 9, 4), ints(1, 9, 4, 4, seed=1)
    try:
        return close(torch.vmap(op.overload, in_dims=(None, 0))(x, y), x * y.flip(1))
    except Exception:
        return False


transforms(
    "vmap rule that takes the first argument to be batched",
    "where the second one is alone, the rows of the first are taken for the batch",
    _whole(SHIFTED, lambda x, y: x * y.flip(0), _shifted, _first_batched),
    _whole(SHIFTED, lambda x, y: x * y.flip(0), _shifted, _each),
    _only_second,
)


def _summed(ns, name):
    """Declare the op that ``sl.adopt`` makes of the operator ``name`` of the namespace ``ns``, and return it.

    Its reference returns the sum of each column of ``x``. The operator stands for one of another library.
    """

    @sl.adopt(f"{ns}::{name}")
    def summed(x: Int64[Tensor, "n c"]) -> Int64[Tensor, "c"]:
        """Return the sum of each column of ``x``. Results of the adopted operator are compared with this reference."""
        return x.sum(0)

    return summed


SUMMED = "summed(Tensor x) -> Tensor"


def _out_dim(call, dims, x):
    """Return the stacked results of ``call`` and a number as their batch dim. This vmap rule of ``summed`` has a defect
    on purpose: the number is 1, but the batch dim is 0.
    """
    # The batch is the first dim of the result.
    result, _ = _each(call, dims, x)
    return result, 1


transforms(
    "vmap rule that says the wrong output dim",
    "the batch is the first dim of the result, and the rule says the second",
    _whole(SUMMED, lambda x: x.sum(0), _summed, _out_dim),
    _whole(SUMMED, lambda x: x.sum(0), _summed, _each),
    lambda op: close(torch.vmap(op.overload)(x := ints(0, 9, 3, 2, 3, seed=2)), x.sum(1)),
)


def _differentiated(tangent):
    """Return a function that registers the operator ``cube`` in a given namespace, and returns the op that ``sl.adopt``
    makes of it. The operator returns ``x * x * x``. Its forward-mode derivative is ``tangent(primal, given)``, where
    ``primal`` is ``x`` without its tangent ``given``. If this is ``3 * primal * primal * given``, there is no defect.
    """

    def fn(x):
        """Return ``x * x * x``. If ``x`` has a forward-mode tangent, the result has one, too, which ``tangent``
        (argument of ``_differentiated``) computes.
        """
        primal, given = forward_ad.unpack_dual(x)
        out = primal * primal * primal
        return out if given is None else forward_ad.make_dual(out, tangent(primal, given))

    def make(ns):
        """Register the operator ``cube``, which returns ``x * x * x``, in the namespace ``ns``. Return the op that
        ``sl.adopt`` makes of it.
        """
        foreign(ns, "cube(Tensor x) -> Tensor", fn)

        @sl.adopt(f"{ns}::cube")
        def cube(x: M) -> M:
            """Return ``x * x * x``. Results of the adopted operator are compared with this reference."""
            return x * x * x

        return cube

    return make


def _tangent(op):
    """Return whether the forward-mode derivative of ``op`` (``cube``) is ``3 * x * x`` times the tangent."""
    x, t = uniform(2, 3).double() + 1, uniform(2, 3, seed=1).double()
    return close(torch.func.jvp(op.overload, (x,), (t,))[1], 3 * x.square() * t)


transforms(
    "tangent without its factor",
    "the gradient is right; the forward-mode derivative lacks the 3",
    _differentiated(lambda x, t: x.square() * t),
    _differentiated(lambda x, t: 3 * x.square() * t),
    _tangent,
)
transforms(
    "tangent that is silently zero",
    "forward mode finds a rule, which says that nothing depends on anything",
    _differentiated(lambda x, t: torch.zeros_like(t)),
    _differentiated(lambda x, t: 3 * x.square() * t),
    _tangent,
)


def _cast(dtype):
    """Return a function that registers the operator ``squares`` in a given namespace, and returns the op that
    ``sl.adopt`` makes of it. The operator returns ``x * x``, and under autocast computes in ``dtype``. If ``dtype`` is
    float32, there is no defect. Otherwise there is a defect on purpose: the op is declared to compute in float32 under
    autocast.
    """

    def make(ns):
        """Register the operator ``squares``, which returns ``x * x``, in the namespace ``ns``. Under autocast it
        computes in ``dtype`` (argument of ``_cast``). Return the op that ``sl.adopt`` makes of it.
        """
        library = foreign(ns, "squares(Tensor x) -> Tensor", lambda x: x * x)
        torch.library.register_autocast(f"{ns}::squares", "cpu", dtype, lib=library)

        @sl.adopt(f"{ns}::squares", autocast="float32")
        def squares(x: M) -> M:
            """Return ``x * x``. Results of the adopted operator are compared with this reference."""
            return x * x

        return squares

    return make


def _stays_float(op):
    """Return whether ``op`` (``squares``) is right in float32 under autocast to bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return close(op.overload(x := randn(2, 3)), x * x)


transforms(
    "autocast to bfloat16 of what needs float32",
    "squares lose their digits in autocast, contrary to the declaration",
    _cast(torch.bfloat16),
    _cast(torch.float32),
    _stays_float,
)


def _normed(protected):
    """Return a function that registers the operator ``mixed`` in a given namespace, and returns the op that
    ``sl.adopt`` makes of it. The operator returns ``x @ w``, and the op is declared to be left alone by autocast. If
    ``protected`` is true, there is no defect. If it is false, there is a defect on purpose: under autocast the product
    is computed in bfloat16.
    """

    def fn(x, w):
        """Return ``x @ w``. If ``protected`` (argument of ``_normed``) is true, there is no defect. If it is false,
        there is a defect on purpose: under autocast the product is computed in a narrower dtype.
        """
        if not protected:
            return x @ w
        # The op is declared to be left alone by autocast.
        with torch.autocast("cpu", enabled=False):
            return x @ w

    def make(ns):
        """Register the operator ``mixed``, which returns ``x @ w``, in the namespace ``ns``. Return the op that
        ``sl.adopt`` makes of it.
        """
        foreign(ns, "mixed(Tensor x, Tensor w) -> Tensor", fn)

        @sl.adopt(f"{ns}::mixed", autocast=None)
        def mixed(x: Float[Tensor, "n k"], w: Float[Tensor, "k m"]) -> Float[Tensor, "n m"]:
            """Return ``x @ w``. Results of the adopted operator are compared with this reference."""
            return x @ w

        return mixed

    return make


def _product_stays_float(op):
    """Return whether ``op`` (``mixed``) returns the float32 product under autocast to bfloat16."""
    x, w = randn(2, 3), randn(3, 4, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = op.overload(x, w)
    return close(result, x @ w)


transforms(
    "product inside that autocast narrows",
    "declared to be left alone by autocast, and returns bfloat16 for float32",
    _normed(False),
    _normed(True),
    _product_stays_float,
)


def _picked(functional):
    """Return a function that declares the op ``picked`` with a gradient in a given namespace. The op returns elements
    of ``x`` at an index. If ``functional`` is true, there is no defect. If it is false, there is a defect on purpose:
    the gradient is added in place to a new tensor of zeros, which fails under vmap.
    """

    def make(ns):
        """Declare the op ``picked`` in the namespace ``ns`` with the gradient that ``functional`` (argument of
        ``_picked``) selects. Return the op.
        """

        @sl.op(f"{ns}::picked", requires="n >= 1")
        def picked(x: V, index: Int64[Tensor, "m"]) -> Float[Tensor, "m"]:
            """Return the elements of ``x`` at ``index``, taken modulo the length of ``x``. Kernels of the op are
            compared with this reference.
            """
            return x[index % x.shape[0]]

        @picked.backward
        def _(grad, saved, needs):
            """Return the gradient for ``x``, as a dict by argument name. It is zero, with ``grad`` added at the
            elements that ``index`` selects. If ``functional`` (argument of ``_picked``) is true, there is no defect. If
            it is false, there is a defect on purpose: ``grad`` is added in place to a tensor without a batch dim, which
            fails under vmap.
            """
            place = saved.index % saved.x.shape[0]
            if functional:
                return {"x": grad.new_zeros(saved.x.shape[0]).index_add(0, place, grad)}
            return {"x": torch.zeros(saved.x.shape[0], dtype=saved.x.dtype).index_add_(0, place, grad)}

        return picked

    return make


def _per_sample(op):
    """Return whether the gradients of ``op`` (``picked``) for each sample of a batch, computed by vmap of
    ``torch.func.grad``, are right. If it raises ``RuntimeError``, the result is False.
    """
    xs, index = randn(3, 4), torch.tensor([0, 2, 2])
    weights = randn(3, 3, seed=1)

    def one(x, w):
        """Return the sum of the elements of ``op(x, index) * w`` for one sample ``x``. ``op`` and ``index`` are
        variables of ``_per_sample``.
        """
        return (op(x, index) * w).sum()

    try:
        gradients = torch.vmap(torch.func.grad(one))(xs, weights)
    except RuntimeError:
        return False
    return close(gradients, torch.zeros(3, 4).index_add(1, index, weights))


transforms(
    "gradient that writes into a plain tensor",
    "per-sample gradients fail: under vmap a tensor made from sizes has no batch to write to",
    _picked(False),
    _picked(True),
    _per_sample,
)


def _skipping(check):
    """Return a function that declares the op ``cubed`` with a gradient in a given namespace. If ``check`` is false,
    there is no defect. If it is true, there is a defect on purpose: the gradient tests whether the incoming gradient is
    zero, which fails under vmap.
    """

    def make(ns):
        """Declare the op ``cubed`` in the namespace ``ns`` with the gradient that ``check`` (argument of ``_skipping``)
        selects. Return the op.
        """

        @sl.op(f"{ns}::cubed")
        def cubed(x: M) -> M:
            """Return ``x * x * x``. Kernels of the op are compared with this reference."""
            return x * x * x

        @cubed.backward
        def _(grad, saved, needs):
            """Return the gradient ``3 * x * x * grad`` for ``x``, as a dict by argument name. If ``check`` (argument of
            ``_skipping``) is false, there is no defect. If it is true, there is a defect on purpose: the truth value of
            a tensor is taken, which fails under vmap. The dict is empty if ``grad`` is zero.
            """
            # Under vmap this asks a batched tensor for one truth value, which torch refuses.
            if check and not grad.any():
                return {}
            return {"x": 3 * grad * saved.x.square()}

        return cubed

    return make


def _rows_of_gradients(op):
    """Return whether the gradients of ``op`` (``cubed``) for each element of a batch, computed by vmap of
    ``torch.func.grad``, are right. If it raises ``RuntimeError``, the result is False.
    """
    x = randn(2, 3, 2)
    try:
        return close(torch.vmap(torch.func.grad(lambda x: op(x).sum()))(x), 3 * x.square())
    except RuntimeError:
        return False


transforms(
    "gradient that looks at its values",
    "a short cut for zero gradients asks a batched tensor for one truth value",
    _skipping(True),
    _skipping(False),
    _rows_of_gradients,
)
