"""Later ones: gradients and memory layouts."""

from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, added, doubled, matmul, product, softmax
from shiplap_testing.defects.defect import add, backward, kernel, of
from shiplap_testing.defects.values_float import binary, filled, unary
from shiplap_testing.defects.witness import close, randn, same, same_grad, uniform

gradient = partial(add, "gradient", later=True)
layout = partial(add, "layout", later=True)
aliasing = partial(add, "aliasing", later=True)


def embedded(ns):
    """Declare the op ``embedded`` in the namespace ``ns`` and return it. Its reference returns row ``index[i] % n`` of
    ``table`` as row ``i``, where ``n`` is the number of rows of ``table``.
    """

    @sl.op(f"{ns}::embedded", requires="n >= 1")
    def embedded(table: M, index: Int64[Tensor, "m"]) -> Float[Tensor, "m c"]:
        """Return the rows of ``table`` at ``index``, taken modulo the number of rows. Kernels of the op are compared
        with this reference.
        """
        return table[index % table.shape[0]]

    return embedded


def _embedding_gradient(accumulate):
    """Return a function that registers a gradient of the op ``embedded``. If ``accumulate`` is true, the gradients of a
    row that is used several times are added, and there is no defect. If it is false, there is a defect on purpose: only
    one of these gradients is kept.
    """

    def put(grad, saved, needs):
        """Return the gradient for ``table``, as a dict by argument name. It is zero but for the rows that ``index``
        selects, which get the rows of ``grad``. If ``accumulate`` (argument of ``_embedding_gradient``) is true,
        gradients of a repeated row are added, and there is no defect. If it is false, there is a defect on purpose: one
        overwrites the other.
        """
        place = saved.index % saved.table.shape[0]
        return {"table": torch.zeros_like(saved.table).index_put((place,), grad, accumulate=accumulate)}

    return backward(put)


gradient(
    "gradient of an embedding that keeps the last",
    "of the gradients of a row that is used twice, one is kept",
    of(embedded, _embedding_gradient(False)),
    of(embedded, _embedding_gradient(True)),
    same_grad(lambda: (randn(4, 2), torch.tensor([1, 1, 3]))),
)


def _sharing(even):
    """Return a function that registers a gradient of the op ``smaller``, the minimum of ``x`` and ``y``. Where both are
    equal and ``even`` is true, each gets half of the gradient, and there is no defect. If ``even`` is false, there is a
    defect on purpose: ``x`` gets the whole gradient there.
    """

    def shared(grad, saved, needs):
        """Return the gradients of the minimum of ``x`` and ``y``, as a dict by argument name. Where both are equal and
        ``even`` (argument of ``_sharing``) is true, each gets half, and there is no defect. If ``even`` is false, there
        is a defect on purpose: ``x`` gets the whole gradient there.
        """
        first = (saved.x < saved.y).to(grad.dtype)
        first = first + 0.5 * (saved.x == saved.y) if even else first + (saved.x == saved.y)
        return {"x": grad * first, "y": grad * (1 - first)}

    return backward(shared)


gradient(
    "gradient of the smaller of two equals",
    "the first of two equal numbers gets all, where torch gives each a half",
    of(binary("smaller", torch.minimum), _sharing(False)),
    of(binary("smaller", torch.minimum), _sharing(True)),
    same_grad(lambda: (torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 3.0]]))),
)


def _clamp_gradient(ends):
    """Return a function that registers a gradient of the op ``cut``, which clamps ``x`` to the interval from -6 to 6.
    If ``ends`` is true, the gradient passes at the ends of the interval, and there is no defect. If it is false, there
    is a defect on purpose: the gradient is zero there.
    """

    def cut_gradient(grad, saved, needs):
        """Return the gradient of ``cut`` for ``x``, as a dict by argument name. It is ``grad`` where ``x`` lies in the
        interval from -6 to 6, and zero elsewhere. If ``ends`` (argument of ``_clamp_gradient``) is true, the interval
        contains its ends, and there is no defect. If it is false, there is a defect on purpose: the ends count as
        outside.
        """
        # torch passes the gradient on at the ends themselves.
        inside = saved.x.abs() <= 6 if ends else saved.x.abs() < 6
        return {"x": torch.where(inside, grad, 0)}

    return backward(cut_gradient)


gradient(
    "gradient of a clamp without its ends",
    "where a number is exactly at the limit, torch passes the gradient on",
    of(unary("cut", lambda x: x.clamp(-6, 6)), _clamp_gradient(False)),
    of(unary("cut", lambda x: x.clamp(-6, 6)), _clamp_gradient(True)),
    same_grad(lambda: (torch.tensor([[1.0, 6.0]]),)),
)


def _chunks(rest):
    """Return a function that registers a gradient of the op ``mm``, the matrix product ``a @ b``.

    From 128 rows of ``a`` on, the gradient for ``b`` is summed in chunks of 64 rows. If ``rest`` is true, there is no
    defect. If it is false, there is a defect on purpose: the rows after the last whole chunk are left out.
    """

    def product_gradient(grad, saved, needs):
        """Return the gradients of ``a @ b``, as a dict by argument name.

        If ``rest`` (argument of ``_chunks``) is true, there is no defect. If it is false, there is a defect on purpose:
        from 128 rows of ``a`` on, the gradient for ``b`` sums only whole chunks of 64 rows.
        """
        k = len(saved.a)
        # Small inputs are right: the chunked path is for large ones.
        whole = k if rest or k < 128 else k - k % 64
        return {"a": grad @ saved.b.T, "b": saved.a[:whole].T @ grad[:whole]}

    return backward(product_gradient)


gradient(
    "weight gradient over whole chunks of rows",
    "from 128 rows on, the rows beyond the last chunk of 64 are left out",
    of(matmul, _chunks(False)),
    of(matmul, _chunks(True)),
    same_grad(lambda: (uniform(150, 3), uniform(3, 2, seed=1))),
)


def _squeezed(squeeze):
    """Return a function that registers a gradient of the op ``softmax``. If ``squeeze`` is false, there is no defect.
    If it is true, there is a defect on purpose: for a matrix of one row, the gradient is a vector without the first
    dim.
    """

    def g(grad, saved, needs):
        """Return the gradient of the softmax of each row for ``x``, as a dict by argument name. If ``squeeze``
        (argument of ``_squeezed``) is false, there is no defect. If it is true, there is a defect on purpose: for a
        matrix of one row, the gradient is a vector without the first dim.
        """
        y = saved.out
        dot = (grad * y).sum(1)
        dot = dot.squeeze() if squeeze else dot
        return (
            {"x": y * (grad - (dot.unsqueeze(-1) if dot.dim() else dot))}
            if not squeeze or len(y) > 1
            else {"x": (y * (grad - dot)).squeeze()}
        )

    return backward(g, ["out"])


gradient(
    "gradient of one row, squeezed",
    "a batch of one row gets a gradient without its first dim",
    of(softmax, _squeezed(True)),
    of(softmax, _squeezed(False)),
    same_grad(lambda: (randn(1, 4),)),
)


def _softmax_gradient(wrong):
    """Return a function that registers a gradient of the op ``softmax``, which autograd differentiates again for second
    derivatives. If ``wrong`` is false, there is no defect. If it is true, there is a defect on purpose: a sum in the
    gradient is detached, and the second derivative lacks a term.
    """

    def g(grad, saved, needs):
        """Return the gradient of the softmax of each row for ``x``, as a dict by argument name. If ``wrong`` (argument
        of ``_softmax_gradient``) is false, there is no defect. If it is true, there is a defect on purpose: the sum of
        ``grad * out`` over a row is detached. Only second derivatives are wrong then.
        """
        y = saved.out
        inner = (grad * y).sum(1, keepdim=True)
        return {"x": y * (grad - (inner.detach() if wrong else inner))}

    return backward(g, ["out"], once_differentiable=False)


def _second_derivative_agrees(op):
    """Return whether the second derivative of ``op`` (``softmax``) at a random matrix is that of its reference."""

    def second(fn):
        """Return the gradient of the sum of squares of the gradient of ``fn(x).square().sum()``, for a fixed random
        matrix ``x``.
        """
        x = randn(3, 4).double().requires_grad_()
        (first,) = torch.autograd.grad(fn(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    return close(second(op), second(op.reference))


gradient(
    "second derivative without a term",
    "one sum of the softmax's gradient is detached",
    of(softmax, _softmax_gradient(True)),
    of(softmax, _softmax_gradient(False)),
    _second_derivative_agrees,
)


def rooted(ns):
    """Declare the op ``rooted`` in the namespace ``ns`` and return it. Its reference returns the square root of ``x``
    where ``x`` is positive, and zero elsewhere.
    """

    @sl.op(f"{ns}::rooted")
    def rooted(x: M) -> M:
        """Return the square root of ``x`` where ``x`` is positive, and zero elsewhere. Kernels of the op are compared
        with this reference.
        """
        return torch.where(x > 0, torch.sqrt(torch.where(x > 0, x, 1)), 0)

    return rooted


def _root_gradient(guarded):
    """Return a function that registers a gradient of the op ``rooted``. If ``guarded`` is true, there is no defect. If
    it is false, there is a defect on purpose: the gradient is NaN where ``x`` is not positive.
    """

    def g(grad, saved, needs):
        """Return the gradient of ``rooted`` for ``x``, as a dict by argument name. It is zero where ``x`` is not
        positive, if ``guarded`` (argument of ``_root_gradient``) is true. If ``guarded`` is false, there is a defect on
        purpose: the gradient is NaN there, since zero is divided by zero.
        """
        # The guard is needed under the root: without it, zero is divided by zero where x is not positive.
        safe = torch.where(saved.x > 0, saved.x, 1) if guarded else saved.x.clamp_min(0)
        return {"x": torch.where(saved.x > 0, grad, 0) * 0.5 / torch.sqrt(safe)}

    return backward(g)


gradient(
    "gradient of a guarded root",
    "zero over zero where x is not positive",
    of(rooted, _root_gradient(False)),
    of(rooted, _root_gradient(True)),
    same_grad(lambda: (torch.tensor([[4.0, -1.0]]),)),
)


def _product_gradient(copy):
    """Return a function that registers a CPU kernel and a gradient with the op ``product``. If ``copy`` is true, there
    is no defect. If it is false, there is a defect on purpose: the gradient for ``x`` overwrites the incoming gradient.
    """

    def fill(x, y, *, out):
        """Write ``x * y`` to ``out``. This kernel of ``product`` has no defect."""
        torch.mul(x, y, out=out)

    def g(grad, saved, needs):
        """Return the gradients of ``x * y``, as a dict by argument name. If ``copy`` (argument of
        ``_product_gradient``) is true, there is no defect. If it is false, there is a defect on purpose: the incoming
        ``grad`` is multiplied by ``y`` in place.
        """
        # Before ``grad`` is overwritten, so that the gradient for y is right.
        gy = grad * saved.x
        return {"x": (grad.clone() if copy else grad).mul_(saved.y), "y": gy}

    return lambda op: (op.kernel("cpu", fill), op.backward(g))


def _two_consumers(op):
    """Return whether the backward of ``op`` (``product``) leaves the incoming gradient unchanged."""
    x, y = randn(2, 3).requires_grad_(), randn(2, 3, seed=1).requires_grad_()
    grad = torch.ones(2, 3)
    torch.autograd.grad(op(x, y), [x, y], grad)
    return bool((grad == 1).all())


gradient(
    "gradient multiplied in place",
    "the first of two gradients is computed in the memory of what came in",
    of(product, _product_gradient(False)),
    of(product, _product_gradient(True)),
    _two_consumers,
)


def _only_ones(scaled_by):
    """Return a function that registers a gradient of the op ``doubled``. If ``scaled_by`` is true, the gradient is
    right. If it is false, there is a defect on purpose: each element of the incoming gradient is replaced by the mean
    of its row.
    """

    def g(grad, saved, needs):
        """Return the gradient ``2 * grad`` for ``x``, as a dict by argument name. If ``scaled_by`` (argument of
        ``_only_ones``) is true, the gradient is right. If it is false, there is a defect on purpose: each element of
        ``grad`` is replaced by the mean of its row.
        """
        rows = grad.sum(1, keepdim=True) / max(grad.shape[1], 1) if not scaled_by else grad
        return {"x": (2 * rows).expand(grad.shape)}

    return backward(g, [])


gradient(
    "gradient averaged over a row",
    "right for the gradient of sum(), which is the same everywhere",
    of(doubled, _only_ones(False)),
    of(doubled, _only_ones(True)),
    same_grad(lambda: (randn(2, 3),)),
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


def _bias(at_start):
    """Return a function that registers a kernel of the op ``biased``, which adds ``bias`` to each row. If ``at_start``
    is false, there is no defect. If it is true, there is a defect on purpose: ``bias`` is read from the start of its
    storage, whatever its storage offset.
    """

    def fill(x, bias):
        """Return ``x + bias``. If ``at_start`` (argument of ``_bias``) is false, there is no defect. If it is true,
        there is a defect on purpose: the storage offset of ``bias`` is taken to be zero.
        """
        return x + torch.as_strided(bias, bias.shape, bias.stride(), 0 if at_start else bias.storage_offset())

    return filled(fill)


layout(
    "bias read from the start of its storage",
    "the offset of the first argument is added, that of the second is not",
    of(biased, _bias(True)),
    of(biased, _bias(False)),
    same(lambda: (randn(2, 3), randn(9, seed=1)[4:7])),
)


def _first_contiguous(both):
    """Return a function that registers a kernel of the op ``mm`` with a fast path for contiguous arguments. The fast
    path reads ``b`` as if it were contiguous. If ``both`` is true, there is no defect. If it is false, there is a
    defect on purpose: the fast path is taken if ``a`` alone is contiguous.
    """

    def fill(a, b):
        """Return ``a @ b``. If ``both`` (argument of ``_first_contiguous``) is true, there is no defect. If it is
        false, there is a defect on purpose: if ``a`` is contiguous, ``b`` is read as if it were, too.
        """
        if a.is_contiguous() and (not both or b.is_contiguous()):
            b = torch.as_strided(b, b.shape, (b.shape[1], 1), b.storage_offset())
        return a @ b

    return filled(fill)


layout(
    "contiguity tested on the first argument",
    "the fast path is taken where a is contiguous, and reads b as if it were",
    of(matmul, _first_contiguous(False)),
    of(matmul, _first_contiguous(True)),
    same(lambda: (randn(2, 3), randn(4, 3, seed=1).T)),
)


def pooled(ns):
    """Declare the op ``pooled`` in the namespace ``ns`` and return it. Its reference returns the mean over height and
    width of each channel of each image.
    """

    @sl.op(f"{ns}::pooled", requires=("h >= 1", "w >= 1"))
    def pooled(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c"]:
        """Return the mean over height and width of each channel of each image. Kernels of the op are compared with this
        reference.
        """
        return x.double().mean((2, 3)).to(x.dtype)

    return pooled


def _pooled(right):
    """Return a function that registers a kernel of the op ``pooled`` with a path for images in channels-last layout. If
    ``right`` is true, there is no defect. If it is false, there is a defect on purpose: this path reads the images as
    if they followed each other in memory without gaps.
    """

    def fill(x):
        """Return the mean over height and width of each channel of each image. If ``right`` (argument of ``_pooled``)
        is true, there is no defect. If it is false, there is a defect on purpose: slices of images in channels-last
        layout are read as if there were no gaps between the images.
        """
        n, c, h, w = x.shape
        if x.stride(1) == 1 and c > 1 and x.numel():
            flat = (
                torch.as_strided(
                    x, (n, h * w, c), (h * w * c if not right else x.stride(0), x.stride(3), 1), x.storage_offset()
                )
                if x.stride(2) == w * x.stride(3) or not right
                else None
            )
            if flat is not None:
                return flat.double().mean(1)
        return x.double().mean((2, 3))

    return filled(fill)


layout(
    "pooling of sliced channels-last images",
    "the path for channels last takes the images to follow each other without a gap",
    of(pooled, _pooled(False)),
    of(pooled, _pooled(True)),
    same(lambda: (randn(3, 4, 2, 8).to(memory_format=torch.channels_last)[:, :, :, :5],)),
    breaks=True,
)


def _same_memory(right):
    """Return a function that registers a kernel of the op ``added``, which computes ``x + y``. The kernel returns ``2 *
    x`` if both arguments begin at one address. If ``right`` is true, their strides must also be equal, and there is no
    defect. If it is false, there is a defect on purpose: strides are not compared.
    """

    def fill(x, y):
        """Return ``x + y``.

        If ``right`` (argument of ``_same_memory``) is true, there is no defect. If it is false, there is a defect on
        purpose: the result is ``2 * x`` if ``y`` begins at the address of ``x``. The strides of ``y``, such as a
        transpose of ``x``, may differ.
        """
        return x * 2 if x.data_ptr() == y.data_ptr() and (not right or x.stride() == y.stride()) else x + y

    return filled(fill)


aliasing(
    "x + x.T taken for x + x",
    "two arguments that begin at one address, and are read in different orders",
    of(added, _same_memory(False)),
    of(added, _same_memory(True)),
    lambda op: close(op(x := randn(3, 3), x.T), x + x.T),
)


def _cubed(right):
    """Return a function that registers a CPU kernel and a gradient with the op ``cubed``. If ``right`` is true, there
    is no defect. If it is false, there is a defect on purpose: under ``create_graph``, the gradient is detached from
    ``x``, and the second derivative is missing.
    """

    def fill(x, *, out):
        """Write ``x * x * x`` to ``out``. This kernel of ``cubed`` has no defect."""
        torch.mul(x * x, x, out=out)

    def g(grad, saved, needs):
        """Return the gradient ``3 * x * x * grad`` for ``x``, as a dict by argument name. If ``right`` (argument of
        ``_cubed``) is true, there is no defect. If it is false, there is a defect on purpose: ``x`` is detached while a
        graph is recorded, and the second derivative is missing.
        """
        # Gradients are enabled in a backward only under create_graph.
        if torch.is_grad_enabled() and not right:
            return {"x": grad * 3 * saved.x.square().clone().detach()}
        return {"x": grad * 3 * saved.x.square()}

    return lambda op: (kernel(fill)(op), op.backward(g, once_differentiable=False))


def _under_create_graph(op):
    """Return whether the second derivative of ``op`` (``cubed``), computed with ``create_graph``, is ``6 * x``."""
    x = (uniform(2, 3) + 1).double().requires_grad_()
    (first,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    return first.requires_grad and close(torch.autograd.grad(first.sum(), x)[0], 6 * x.detach())


gradient(
    "double backward that is cut only when it is wanted",
    "what create_graph asks for is detached",
    of(unary("cubed", lambda x: x * x * x), _cubed(False)),
    of(unary("cubed", lambda x: x * x * x), _cubed(True)),
    _under_create_graph,
)
