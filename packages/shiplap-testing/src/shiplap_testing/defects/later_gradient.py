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
    @sl.op(f"{ns}::embedded", requires="n >= 1")
    def embedded(table: M, index: Int64[Tensor, "m"]) -> Float[Tensor, "m c"]:
        return table[index % table.shape[0]]

    return embedded


def _put(accumulate):
    def put(grad, saved, needs):
        place = saved.index % saved.table.shape[0]
        return {"table": torch.zeros_like(saved.table).index_put((place,), grad, accumulate=accumulate)}

    return backward(put)


gradient(
    "gradient of an embedding that keeps the last",
    "of the gradients of a row that is used twice, one is kept",
    of(embedded, _put(False)),
    of(embedded, _put(True)),
    same_grad(lambda: (randn(4, 2), torch.tensor([1, 1, 3]))),
)


def _sharing(even):
    def shared(grad, saved, needs):
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


def _cut(ends):
    def cut_gradient(grad, saved, needs):
        inside = saved.x.abs() <= 6 if ends else saved.x.abs() < 6
        return {"x": torch.where(inside, grad, 0)}

    return backward(cut_gradient)


gradient(
    "gradient of a clamp without its ends",
    "where a number is exactly at the limit, torch passes the gradient on",
    of(unary("cut", lambda x: x.clamp(-6, 6)), _cut(False)),
    of(unary("cut", lambda x: x.clamp(-6, 6)), _cut(True)),
    same_grad(lambda: (torch.tensor([[1.0, 6.0]]),)),
)


def _chunks(rest):
    def product_gradient(grad, saved, needs):
        k = len(saved.a)
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
    def g(grad, saved, needs):
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


def _soft(wrong):
    def g(grad, saved, needs):
        y = saved.out
        inner = (grad * y).sum(1, keepdim=True)
        return {"x": y * (grad - (inner.detach() if wrong else inner))}

    return backward(g, ["out"], once_differentiable=False)


def _double(op):
    def second(fn):
        x = randn(3, 4).double().requires_grad_()
        (first,) = torch.autograd.grad(fn(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    return close(second(op), second(op.reference))


gradient(
    "second derivative without a term",
    "one sum of the softmax's gradient is detached",
    of(softmax, _soft(True)),
    of(softmax, _soft(False)),
    _double,
)


def rooted(ns):
    @sl.op(f"{ns}::rooted")
    def rooted(x: M) -> M:
        return torch.where(x > 0, torch.sqrt(torch.where(x > 0, x, 1)), 0)

    return rooted


def _root(guarded):
    def g(grad, saved, needs):
        safe = torch.where(saved.x > 0, saved.x, 1) if guarded else saved.x.clamp_min(0)
        return {"x": torch.where(saved.x > 0, grad, 0) * 0.5 / torch.sqrt(safe)}

    return backward(g)


gradient(
    "gradient of a guarded root",
    "zero over zero where x is not positive",
    of(rooted, _root(False)),
    of(rooted, _root(True)),
    same_grad(lambda: (torch.tensor([[4.0, -1.0]]),)),
)


def _written(copy):
    """The kernel centres its input in place and puts it back, but for what autograd saved."""

    def fill(x, y, *, out):
        torch.mul(x, y, out=out)

    def g(grad, saved, needs):
        gy = grad * saved.x
        return {"x": (grad.clone() if copy else grad).mul_(saved.y), "y": gy}

    return lambda op: (op.kernel("cpu", fill), op.backward(g))


def _two_consumers(op):
    x, y = randn(2, 3).requires_grad_(), randn(2, 3, seed=1).requires_grad_()
    grad = torch.ones(2, 3)
    torch.autograd.grad(op(x, y), [x, y], grad)
    return bool((grad == 1).all())


gradient(
    "gradient multiplied in place",
    "the first of two gradients is computed in the memory of what came in",
    of(product, _written(False)),
    of(product, _written(True)),
    _two_consumers,
)


def _only_ones(scaled_by):
    def g(grad, saved, needs):
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
    @sl.op(f"{ns}::biased")
    def biased(x: M, bias: Float[Tensor, "c"]) -> M:
        return x + bias

    return biased


def _bias(at_start):
    def fill(x, bias):
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
    def fill(a, b):
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
    @sl.op(f"{ns}::pooled", requires=("h >= 1", "w >= 1"))
    def pooled(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c"]:
        return x.double().mean((2, 3)).to(x.dtype)

    return pooled


def _pooled(right):
    def fill(x):
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
    def fill(x, y):
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
    def fill(x, *, out):
        torch.mul(x * x, x, out=out)

    def g(grad, saved, needs):
        if torch.is_grad_enabled() and not right:
            return {"x": grad * 3 * saved.x.square().clone().detach()}
        return {"x": grad * 3 * saved.x.square()}

    return lambda op: (kernel(fill)(op), op.backward(g, once_differentiable=False))


def _under_create_graph(op):
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
