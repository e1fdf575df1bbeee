"""Right in a first gradient of distinct numbers: kinks, narrow dtypes, partly needed gradients, second derivatives."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, V, doubled, product, relu, row_max
from shiplap_testing.defects.defect import add, backward, of
from shiplap_testing.defects.values_float import unary
from shiplap_testing.defects.witness import close, randn, same_grad, uniform, wide

gradient = partial(add, "gradient")


def _second(make):
    """Return a function that takes an op and returns whether the second derivative of the op at the tensor ``make()``
    is that of its reference.
    """

    def second(fn, x):
        """Return the gradient at ``x`` of the sum of squares of the gradient of ``fn(x).sum()``. Return zeros if the
        gradient of ``fn(x).sum()`` cannot be differentiated.
        """
        x.requires_grad_()
        (first,) = torch.autograd.grad(fn(x).sum(), x, create_graph=True)
        # A detached gradient cannot be differentiated again: its derivative counts as zero, which is wrong.
        if not first.requires_grad:
            return torch.zeros_like(x)
        return torch.autograd.grad(first.square().sum(), x)[0]

    return lambda op: close(second(op, make()), second(op.reference, make()))


cube = unary("cube", lambda x: x * x * x)
gradient(
    "second derivative lost by detach",
    "the saved input is detached before it is used",
    of(
        cube,
        backward(lambda grad, saved, needs: {"x": grad * 3 * saved.x.detach().square()}, once_differentiable=False),
    ),
    of(cube, backward(lambda grad, saved, needs: {"x": grad * 3 * saved.x.square()}, once_differentiable=False)),
    _second(lambda: uniform(3, 2).double() + 1),
)


def _with_helper(factor):
    """Return a function that declares the op ``cube`` in a given namespace, whose gradient is computed by a second op,
    ``slope``. If ``factor`` is 6, there is no defect. Otherwise there is a defect on purpose: the gradient of ``slope``
    for ``x`` has the factor ``factor`` in place of 6.
    """

    def make(ns):
        """Declare the op ``slope`` and the op ``cube``, whose gradient calls ``slope``, in the namespace ``ns``. The
        gradient of ``slope`` depends on ``factor`` (argument of ``_with_helper``). Return ``cube``.
        """

        @sl.op(f"{ns}::slope")
        def slope(x: M, grad: M) -> M:
            """Return ``3 * x * x * grad``, the gradient of ``cube``. This is the reference of the op ``slope``."""
            return 3 * x * grad * x  # in this order 16 bits overflow only where the result does

        @slope.backward
        def _(grad, saved, needs):
            """Return the gradients of ``slope`` for ``x`` and ``grad``, as a dict by argument name. If ``factor``
            (argument of ``_with_helper``) is 6, there is no defect. Otherwise there is a defect on purpose: the
            gradient for ``x`` has the factor ``factor`` in place of 6.
            """
            return {"x": factor * saved.x * saved.grad * grad, "grad": 3 * saved.x * grad * saved.x}

        op = cube(ns)
        op.backward(lambda grad, saved, needs: {"x": slope(saved.x, grad)})
        return op

    return make


gradient(
    "gradient kernel with a wrong gradient",
    "the op in the backward lacks a factor of two in its own",
    _with_helper(3),
    _with_helper(6),
    _second(lambda: uniform(3, 2).double() + 1),
)


def length(ns):
    """Declare the op ``length`` in the namespace ``ns`` and return it. Its reference returns the Euclidean length of
    each row of ``x``.
    """

    @sl.op(f"{ns}::length")
    def length(x: M) -> V:
        """Return the Euclidean length of each row of ``x``. Kernels of the op are compared with this reference."""
        return torch.linalg.vector_norm(x, dim=1)

    return length


def _safe_length(grad, saved, needs):
    """Return the gradient of the Euclidean length of each row for ``x``, as a dict by argument name. It is zero for a
    row of zeros, for which the defective gradient of the op ``length`` is NaN.
    """
    return {"x": (grad / saved.out.masked_fill(saved.out == 0, 1))[:, None] * saved.x}


gradient(
    "gradient of the length of a zero row",
    "x / |x| is NaN at zero, where torch's gradient is zero",
    of(length, backward(lambda grad, saved, needs: {"x": (grad / saved.out)[:, None] * saved.x}, ["x", "out"])),
    of(length, backward(_safe_length, ["x", "out"])),
    same_grad(lambda: (torch.tensor([[3.0, 4.0], [0.0, 0.0]]),)),
)


def _ties(even):
    """Return a function that registers a gradient of the op ``row_max``. If ``even`` is true, equal maxima of a row
    share its gradient, and there is no defect. If it is false, there is a defect on purpose: each of several equal
    maxima gets the whole gradient.
    """

    def ties(grad, saved, needs):
        """Return the gradient of the maximum of each row for ``x``, as a dict by argument name. If ``even`` (argument
        of ``_ties``) is true, equal maxima share the gradient of their row, and there is no defect. If it is false,
        there is a defect on purpose: each of them gets the whole gradient.
        """
        hit = (saved.x == saved.out[:, None]).to(grad.dtype)
        return {"x": hit * (grad / hit.sum(1) if even else grad)[:, None]}

    return backward(ties, ["x", "out"])


gradient(
    "gradient of a maximum with ties",
    "each of the equal values gets all of the gradient, not its share",
    of(row_max, _ties(False)),
    of(row_max, _ties(True)),
    same_grad(lambda: (torch.tensor([[1.0, 3.0, 3.0]]),)),
)
gradient(
    "gradient of relu at zero",
    "it passes at zero, where torch stops it",
    of(relu, backward(lambda grad, saved, needs: {"x": torch.where(saved.x < 0, 0, grad)})),
    of(relu, backward(lambda grad, saved, needs: {"x": torch.where(saved.x <= 0, 0, grad)})),
    same_grad(lambda: (torch.tensor([[1.0, 0.0, -1.0]]),)),
)


def biased(ns):
    """Declare the op ``biased`` in the namespace ``ns`` and return it. Its reference returns ``x + bias``, with
    ``bias`` added to each row.
    """

    @sl.op(f"{ns}::biased")
    def biased(x: M, bias: Float[Tensor, "c"]) -> M:
        """Return ``x + bias``, with ``bias`` added to each row. Kernels of the op are compared with this reference."""
        return x + bias

    return biased


def _loop_sum(grad, saved, needs):
    """Return the gradients of ``x + bias``, as a dict by argument name. This gradient of ``biased`` has a defect on
    purpose: in narrow dtypes, the sum over rows for ``bias`` is rounded after every four rows.
    """
    # A sum over no rows has the shape and dtype of the bias, also for an empty batch.
    total = torch.zeros_like(grad[:1].sum(0))
    for part in grad.split(4):
        total = total + part.sum(0)
    return {"x": grad, "bias": total}


gradient(
    "gradient of a bias summed in 16 bits",
    "partial sums are rounded to the dtype of the gradient after each four rows",
    of(biased, backward(_loop_sum, [])),
    of(biased, backward(lambda grad, saved, needs: {"x": grad, "bias": grad.sum(0)}, [])),
    same_grad(lambda: (randn(2000, 2).bfloat16(), randn(2).bfloat16())),
)


def wells(ns):
    """Declare the op ``wells`` in the namespace ``ns`` and return it. Its reference returns the natural logarithm of
    ``1 + x * x``, computed in float32, or in float64 for float64.
    """

    @sl.op(f"{ns}::wells")
    def wells(x: M) -> M:
        """Return the logarithm of ``1 + x * x``, computed in a wide dtype. Kernels of the op are compared with this
        reference.
        """
        return torch.log1p(wide(x).square()).to(x.dtype)

    return wells


gradient(
    "gradient that overflows in half precision",
    "the square of 300 is infinite in half: 2x / (1 + x^2) becomes zero",
    of(wells, backward(lambda grad, saved, needs: {"x": grad * 2 * saved.x / (1 + saved.x.square())})),
    of(
        wells,
        backward(
            lambda grad, saved, needs: {
                "x": (grad * 2 * wide(saved.x) / (1 + wide(saved.x).square())).to(saved.x.dtype)
            }
        ),
    ),
    same_grad(lambda: (torch.tensor([[300.0, 2.0]]).half(),), rtol=1e-2),
)


def triple(ns):
    """Declare the op ``triple`` in the namespace ``ns`` and return it. Its reference returns ``a * b * c``."""

    @sl.op(f"{ns}::triple")
    def triple(a: M, b: M, c: M) -> M:
        """Return ``a * b * c``. Kernels of the op are compared with this reference."""
        return a * b * c

    return triple


def _shared(grad, saved, needs):
    """Return the gradients of ``a * b * c`` for those arguments that ``needs`` marks as true, as a dict by argument
    name. This gradient of ``triple`` has a defect on purpose: the gradient for ``b`` lacks the factor ``c`` if ``a``
    needs no gradient.
    """
    gradients = {}
    if needs.a:
        shared = grad * saved.c
        gradients["a"] = shared * saved.b
    if needs.b:
        gradients["b"] = (shared if needs.a else grad) * saved.a
    if needs.c:
        gradients["c"] = grad * saved.a * saved.b
    return gradients


def _each(grad, saved, needs):
    """Return the gradients of ``a * b * c`` as a dict by argument name, each computed on its own. Those for ``a`` and
    ``c`` are None if they are not needed. This is the sound counterpart of the defective ``_shared``.
    """
    a, b, c = saved.a, saved.b, saved.c
    return {"a": grad * b * c if needs.a else None, "b": grad * a * c, "c": grad * a * b if needs.c else None}


def _only(*wanted):
    """Return a function that takes an op and returns whether its gradients are those of its reference. The arguments
    are random matrices, and only those at the positions ``wanted`` require gradients.
    """

    def some(fn, count):
        """Return the gradients of the sum of squares of all results of ``fn`` on ``count`` random matrices. They are a
        tuple with an element for each argument whose position is in ``wanted`` (argument of ``_only``).
        """
        # Only the wanted arguments require gradients, so that ``needs`` is false for the others.
        args = [randn(3, 2, seed=i).requires_grad_(i in wanted) for i in range(count)]
        outs = fn(*args)
        # Ops with one output return a tensor, not a tuple.
        outs = outs if isinstance(outs, tuple) else (outs,)
        return torch.autograd.grad([o.square().sum() for o in outs], [args[i] for i in wanted], allow_unused=True)

    return lambda op: close(some(op, len(op.spec.args)), some(op.reference, len(op.spec.args)))


gradient(
    "factor that only another gradient computes",
    "where the first argument needs no gradient, that of the second lacks the third",
    of(triple, backward(_shared)),
    of(triple, backward(_each)),
    _only(1),
)


def weighted(ns):
    """Declare the op ``weighted`` in the namespace ``ns`` and return it. Its reference returns ``2 * a + 3 * b + 5 *
    c``.
    """

    @sl.op(f"{ns}::weighted")
    def weighted(a: M, b: M, c: M) -> M:
        """Return ``2 * a + 3 * b + 5 * c``. Kernels of the op are compared with this reference."""
        return 2 * a + 3 * b + 5 * c

    return weighted


def _by_position(grad, saved, needs):
    """Return the gradients of ``2 * a + 3 * b + 5 * c``, as a dict by argument name. This gradient of ``weighted`` has
    a defect on purpose: the factors 2, 3 and 5 go in turn to the arguments that need gradients. If ``a`` needs none,
    ``b`` gets the factor of ``a``.
    """
    names = [name for name in ("a", "b", "c") if getattr(needs, name)]
    return dict(zip(names, (2 * grad, 3 * grad, 5 * grad), strict=False))


gradient(
    "gradients handed out by position",
    "what is needed is counted, so the second argument gets the gradient of the first",
    of(weighted, backward(_by_position, [])),
    of(weighted, backward(lambda grad, saved, needs: {"a": 2 * grad, "b": 3 * grad, "c": 5 * grad}, [])),
    _only(1, 2),
)


def _square(grad, saved, needs):
    """Return the gradients of ``x * y``, as a dict by argument name. This gradient of ``product`` has a defect on
    purpose: if ``x`` and ``y`` share their memory, the gradient for each is that of ``x * x``. The sum of both is then
    twice the right one.
    """
    if saved.x.data_ptr() == saved.y.data_ptr():
        return {"x": 2 * grad * saved.x, "y": 2 * grad * saved.x}
    return {"x": grad * saved.y, "y": grad * saved.x}


def _twice(op):
    """Return whether the gradient of ``op(x, x)`` is ``2 * x``. ``op`` is ``product``, which returns ``x * y``."""
    x = randn(3, 2).requires_grad_()
    return close(torch.autograd.grad(op(x, x).sum(), x)[0], 2 * x.detach())


gradient(
    "gradient of f(x, x) counted twice",
    "the short cut for a square gives each of the two the sum of both",
    of(product, backward(_square)),
    of(product, backward(lambda grad, saved, needs: {"x": grad * saved.y, "y": grad * saved.x})),
    _twice,
)


def _overwriting(grad, saved, needs):
    """Return the gradient ``2 * grad`` for ``x``, as a dict by argument name. This gradient of ``doubled`` has a defect
    on purpose: it overwrites the incoming ``grad``.
    """
    return {"x": grad.mul_(2)}


def _grad_untouched(op):
    """Return whether the gradient of ``op`` (``doubled``) is right and its computation leaves the incoming gradient
    unchanged.
    """
    x, grad = randn(3, 2).requires_grad_(), torch.ones(3, 2)
    return close(torch.autograd.grad(op(x), x, grad)[0], torch.full((3, 2), 2.0)) and close(grad, torch.ones(3, 2))


gradient(
    "gradient computed in place",
    "the incoming gradient is overwritten, which others may hold",
    of(doubled, backward(_overwriting, [])),
    of(doubled, backward(lambda grad, saved, needs: {"x": grad.mul(2)}, [])),
    _grad_untouched,
)


def _packed(grad, saved, needs):
    """Return the gradient ``2 * grad`` for ``x``, as a dict by argument name. This gradient of ``doubled`` has a defect
    on purpose: a ``grad`` that is not contiguous is read as if it were, without regard to its strides.
    """
    read = grad.as_strided(grad.shape, (grad.shape[1], 1), grad.storage_offset())
    return {"x": 2 * read}


def _turned_grad(op):
    """Return whether the gradient of ``op`` (``doubled``) is right for an incoming gradient that is a transposed
    matrix.
    """
    x, grad = randn(3, 2).requires_grad_(), randn(2, 3, seed=1).T
    return close(torch.autograd.grad(op(x), x, grad)[0], 2 * grad)


gradient(
    "gradient read as if it were contiguous",
    "its pointer is taken without its strides",
    of(doubled, backward(_packed, [])),
    of(doubled, backward(lambda grad, saved, needs: {"x": 2 * grad.contiguous()}, [])),
    _turned_grad,
)


def _one_row(grad, saved, needs):
    """Return the gradient ``2 * grad`` for ``x``, as a dict by argument name. This gradient of ``doubled`` has a defect
    on purpose: if ``grad`` has a stride of zero, its first element is taken for all elements.
    """
    if grad.dim() and 0 in grad.stride() and grad.numel():
        return {"x": (2 * grad[0, 0]).expand(grad.shape)}
    return {"x": 2 * grad}


def _expanded_grad(op):
    """Return whether the gradient of ``op`` (``doubled``) is right for an incoming gradient that is one row expanded to
    several.
    """
    x, grad = randn(3, 2).requires_grad_(), randn(2, seed=1).expand(3, 2)
    return close(torch.autograd.grad(op(x), x, grad)[0], 2 * grad)


gradient(
    "expanded gradient taken for a constant",
    "one stride of zero means sum().backward(), thinks the short cut",
    of(doubled, backward(_one_row, [])),
    of(doubled, backward(lambda grad, saved, needs: {"x": 2 * grad}, [])),
    _expanded_grad,
)
gradient(
    "gradient of a row instead of the sum",
    "the argument is broadcast over rows, and the gradient of the first row is returned",
    of(biased, backward(lambda grad, saved, needs: {"x": grad, "bias": grad[:1].sum(0)}, [])),
    of(biased, backward(lambda grad, saved, needs: {"x": grad, "bias": grad.sum(0)}, [])),
    same_grad(lambda: (randn(3, 2), randn(2))),
)


def centred(ns):
    """Declare the op ``centred`` in the namespace ``ns`` and return it. Its reference subtracts the mean of each column
    of ``x`` from that column and returns the result.
    """

    @sl.op(f"{ns}::centred", requires="c >= 1")
    def centred(x: M) -> M:
        """Return ``x`` less the mean of each column. Kernels of the op are compared with this reference."""
        return x - x.mean(0)

    return centred


gradient(
    "gradient of no rows",
    "1 / n in Python, for n = 0",
    of(centred, backward(lambda grad, saved, needs: {"x": grad - grad.sum(0) * (1 / saved.x.shape[0])})),
    of(centred, backward(lambda grad, saved, needs: {"x": grad - grad.mean(0)})),
    same_grad(lambda: (torch.empty(0, 3),)),
)
gradient(
    "argument without a gradient",
    "there is no entry for y, so that it is never trained",
    of(product, backward(lambda grad, saved, needs: {"x": grad * saved.y})),
    of(product, backward(lambda grad, saved, needs: {"x": grad * saved.y, "y": grad * saved.x})),
    same_grad(lambda: (randn(3, 2), randn(3, 2, seed=1))),
)
