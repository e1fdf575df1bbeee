"""Gradients that depend on what was called in between: buffers, saved inputs and threads behind autograd's back."""

import threading
from functools import partial

import torch

from shiplap_testing.defects.declared import doubled, product, relu
from shiplap_testing.defects.defect import add, of
from shiplap_testing.defects.witness import close, in_thread, randn

gradient = partial(add, "gradient")


def _masking(remember):
    """relu, whose kernel writes down where it was positive; ``remember`` says where."""

    def bind(op):
        write, read = remember()

        @op.kernel("cpu")
        def forward(x, *, out):
            torch.clamp_min(x, 0, out=out)
            write(~(x <= 0))

        @op.backward
        def _(grad, saved, needs):
            return {"x": torch.where(read(saved.x), grad, 0)}

    return bind


def _saved():
    return lambda mask: None, lambda x: ~(x <= 0)


def _last_mask():
    state = {}
    return lambda mask: state.__setitem__("mask", mask), lambda x: state["mask"]


def _two_calls(op):
    a, b = randn(3, 2).requires_grad_(), randn(3, 2, seed=1).requires_grad_()
    try:
        gradients = torch.autograd.grad(op(a).sum() + op(b).sum(), (a, b))
    except RuntimeError:
        return False
    return close(gradients, ((a > 0).float(), (b > 0).float()))


gradient(
    "mask kept in a buffer until the backward",
    "the next forward overwrites it before the backward has read it",
    of(relu, _masking(_last_mask)),
    of(relu, _masking(_saved)),
    _two_calls,
)


def _stack():
    masks = []
    return masks.append, lambda x: masks.pop()


def _forward_without_backward(op):
    a, b = randn(3, 2).requires_grad_(), randn(3, 2, seed=1).requires_grad_()
    first = op(a)
    op(b)  # validation, say: nobody asks for its gradient
    return close(torch.autograd.grad(first.sum(), a)[0], (a > 0).float())


gradient(
    "masks on a stack",
    "each backward pops one: right until a forward has no backward, or a graph has two",
    of(relu, _masking(_stack)),
    of(relu, _masking(_saved)),
    _forward_without_backward,
)


def _thread_local():
    local = threading.local()

    def read(x):
        mask = getattr(local, "mask", None)
        return ~(x <= 0) if mask is None or mask.shape != x.shape else mask

    def write(mask):
        local.mask = mask

    return write, read


def _backward_elsewhere(op):
    """Another thread has called the op before; it runs the backward of this one's call."""
    a, b = randn(3, 2).requires_grad_(), randn(3, 2, seed=1).requires_grad_()
    loss = op(a).sum()

    def elsewhere():
        op(b)
        return torch.autograd.grad(loss, a)[0]

    return close(in_thread(elsewhere), (a > 0).float())


gradient(
    "mask kept in thread-local memory",
    "a backward in another thread reads what that thread wrote last",
    of(relu, _masking(_thread_local)),
    of(relu, _masking(_saved)),
    _backward_elsewhere,
)


def _stashed(detached):
    """The product, whose kernel keeps its inputs by their addresses instead of having autograd save them."""

    def bind(op):
        stash = {}

        @op.kernel("cpu")
        def forward(x, y, *, out):
            torch.mul(x, y, out=out)
            if detached:
                stash[out.data_ptr()] = x, y

        @op.backward(saves=["out"] if detached else ["x", "y"])
        def _(grad, saved, needs):
            x, y = stash[saved.out.data_ptr()] if detached else (saved.x, saved.y)
            return {"x": grad * y, "y": grad * x}

    return bind


def _changed_in_between(op):
    """Either an error, or the gradient at the time of the call: torch sees to that for what it saves."""
    x, y = randn(3, 2).requires_grad_(), torch.ones(3, 2)
    out = op(x, y)
    y.mul_(5)
    try:
        return close(torch.autograd.grad(out.sum(), x)[0], torch.ones(3, 2))
    except RuntimeError as e:
        return "modified by an inplace operation" in str(e)


gradient(
    "inputs kept behind autograd's back",
    "one that is changed between forward and backward gives a wrong gradient instead of torch's error",
    of(product, _stashed(True)),
    of(product, _stashed(False)),
    _changed_in_between,
)


def _accumulating(keep):
    def bind(op):
        buffers = {}

        @op.backward(saves=[])
        def _(grad, saved, needs):
            if not keep:
                return {"x": 2 * grad}
            total = buffers.setdefault((grad.shape, grad.dtype), torch.zeros(grad.shape, dtype=grad.dtype))
            return {"x": total.add_(2 * grad).clone()}

    return bind


def _called_twice(op):
    x = randn(3, 2).requires_grad_()
    out = op(x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    return close(torch.autograd.grad(out, x)[0], first)


gradient(
    "gradient buffer that is not cleared",
    "a second backward of the same shape adds to the first",
    of(doubled, _accumulating(True)),
    of(doubled, _accumulating(False)),
    _called_twice,
)


def _shared_answer(copy):
    def bind(op):
        buffers = {}

        @op.backward(saves=[])
        def _(grad, saved, needs):
            if copy:
                return {"x": grad * 2}
            buffer = buffers.setdefault((grad.shape, grad.dtype), torch.empty(grad.shape, dtype=grad.dtype))
            return {"x": torch.mul(grad, 2, out=buffer)}

    return bind


def _first_kept(op):
    x = randn(3, 2).requires_grad_()
    with torch.no_grad():
        grads = torch.ones(3, 2), torch.full((3, 2), 7.0)
    first = torch.autograd.grad(op(x), x, grads[0])[0]
    torch.autograd.grad(op(x), x, grads[1])
    return close(first, torch.full((3, 2), 2.0))


gradient(
    "gradients that share one buffer",
    "the gradient of one call is overwritten by the next",
    of(doubled, _shared_answer(False)),
    of(doubled, _shared_answer(True)),
    _first_kept,
)


def _rescaling(in_place):
    def bind(op):
        @op.backward
        def _(grad, saved, needs):
            y = saved.y.mul_(1.5) if in_place and needs.x else saved.y * 1.5 if needs.x else saved.y
            return {"x": grad * y / 1.5, "y": grad * saved.x}

    return bind


def _inputs_untouched(op):
    x, y = randn(3, 2).requires_grad_(), torch.ones(3, 2)
    torch.autograd.grad(op(x, y).sum(), x)
    return close(y, torch.ones(3, 2))


gradient(
    "backward that scales a saved input in place",
    "what is saved is the caller's tensor",
    of(product, _rescaling(True)),
    of(product, _rescaling(False)),
    _inputs_untouched,
)
