"""Gradients that depend on what was called in between: buffers, saved inputs and threads behind autograd's back."""

import threading
from functools import partial

import torch

from shiplap_testing.defects.declared import doubled, product, relu
from shiplap_testing.defects.defect import add, of
from shiplap_testing.defects.witness import close, in_thread, randn

gradient = partial(add, "gradient")


def _masking(remember):
    """Return a function that registers a CPU kernel and a gradient with the op ``relu``. The kernel passes the mask of
    positive elements to ``write``, and the gradient gets it from ``read``. Both functions come from ``remember()``.
    """

    def bind(op):
        """Register a kernel and a gradient with ``op`` (``relu``). The kernel passes a mask to ``write``, and the
        gradient gets it from ``read``. Both functions come from ``remember()`` (argument of ``_masking``).
        """
        write, read = remember()

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write relu of ``x`` to ``out``, and pass the mask of the elements that are positive or NaN to ``write``.
            That function is one of the two that ``remember()`` (argument of ``_masking``) returns.
            """
            torch.clamp_min(x, 0, out=out)
            # In this form NaN counts as positive, as in the gradient of torch's relu.
            write(~(x <= 0))

        @op.backward
        def _(grad, saved, needs):
            """Return the gradient of relu, which is ``grad`` where the mask is set and zero elsewhere. The mask comes
            from ``read``, one of the two functions that ``remember()`` (argument of ``_masking``) returns.
            """
            return {"x": torch.where(read(saved.x), grad, 0)}

    return bind


def _saved():
    """Return a sound pair of functions ``write`` and ``read``.

    ``write`` ignores the mask, and ``read`` computes it from the saved ``x``.
    """
    return lambda mask: None, lambda x: ~(x <= 0)


def _last_mask():
    """Return a pair of functions (write, read) that keep one mask. This function has a defect on purpose: ``read``
    returns the mask of the last forward, which may belong to another call.
    """
    state = {}
    return lambda mask: state.__setitem__("mask", mask), lambda x: state["mask"]


def _two_calls(op):
    """Return whether the gradients of two calls of ``op`` (``relu``), taken together after both calls, are right."""
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
    """Return a pair of functions (write, read) that push a mask on a stack and pop the last one. This function has a
    defect on purpose: a gradient gets the mask of another call if forwards and backwards do not come in pairs.
    """
    masks = []
    return masks.append, lambda x: masks.pop()


def _forward_without_backward(op):
    """Return whether the gradient of a call of ``op`` (``relu``) is right after another call, whose gradient is never
    taken.
    """
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
    """Return a pair of functions (write, read) that keep the last mask of each thread. This function has a defect on
    purpose: a backward gets a wrong mask in a thread that has called the op since with the same shape.
    """
    local = threading.local()

    def read(x):
        """Return the last mask of this thread, or the mask computed from ``x`` if this thread has none of its shape."""
        mask = getattr(local, "mask", None)
        return ~(x <= 0) if mask is None or mask.shape != x.shape else mask

    def write(mask):
        """Store ``mask`` as the last one of this thread."""
        local.mask = mask

    return write, read


def _backward_elsewhere(op):
    """Return whether the gradient of a call of ``op`` (``relu``) is right if another thread computes it.

    The other thread has called the op itself before.
    """
    a, b = randn(3, 2).requires_grad_(), randn(3, 2, seed=1).requires_grad_()
    loss = op(a).sum()

    def elsewhere():
        """Call ``op`` (argument of ``_backward_elsewhere``) on other numbers, then return the gradient of the call of
        the first thread.
        """
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
    """Return a function that registers a CPU kernel and a gradient with the op ``product``.

    If ``detached`` is false, there is no defect. If it is true, there is one on purpose: autograd does not save the
    inputs. The kernel stores them under the address of the output instead.
    """

    def bind(op):
        """Register the kernel ``forward`` and the gradient ``_`` with ``op`` (``product``).

        If ``detached`` (argument of ``_stashed``) is false, there is no defect. If it is true, there is one on purpose:
        autograd does not save the inputs. The kernel stores them under the address of the output instead.
        """
        stash = {}

        @op.kernel("cpu")
        def forward(x, y, *, out):
            """Write ``x * y`` to ``out``. If ``detached`` (argument of ``_stashed``) is true, also store ``x`` and
            ``y`` under the address of ``out``.
            """
            torch.mul(x, y, out=out)
            if detached:
                stash[out.data_ptr()] = x, y

        @op.backward(saves=["out"] if detached else ["x", "y"])
        def _(grad, saved, needs):
            """Return the gradients of ``x * y``.

            If ``detached`` (argument of ``_stashed``) is false, there is no defect. If it is true, there is one on
            purpose: autograd does not save ``x`` and ``y``. Later changes in place thus go unnoticed.
            """
            x, y = stash[saved.out.data_ptr()] if detached else (saved.x, saved.y)
            return {"x": grad * y, "y": grad * x}

    return bind


def _changed_in_between(op):
    """Return whether the gradient of ``op`` (``product``), taken after ``y`` was changed in place, is that of the
    values at the time of the call. Torch's error about the change also counts as right.
    """
    x, y = randn(3, 2).requires_grad_(), torch.ones(3, 2)
    out = op(x, y)
    y.mul_(5)
    try:
        return close(torch.autograd.grad(out.sum(), x)[0], torch.ones(3, 2))
    except RuntimeError as e:
        # torch's own refusal is as good as the right gradient.
        return "modified by an inplace operation" in str(e)


gradient(
    "inputs kept behind autograd's back",
    "one that is changed between forward and backward gives a wrong gradient instead of torch's error",
    of(product, _stashed(True)),
    of(product, _stashed(False)),
    _changed_in_between,
)


def _accumulating(keep):
    """Return a function that registers a gradient with the op ``doubled``. The gradient returns ``2 * grad``. If
    ``keep`` is false, there is no defect. If it is true, there is one on purpose: earlier gradients of the same shape
    and dtype are added.
    """

    def bind(op):
        """Register the gradient ``_`` with ``op``. It returns ``2 * grad``. If ``keep`` (argument of ``_accumulating``)
        is false, there is no defect. If it is true, there is one on purpose: earlier gradients of the same shape and
        dtype are added.
        """
        buffers = {}

        @op.backward(saves=[])
        def _(grad, saved, needs):
            """Return the gradient ``2 * grad``. If ``keep`` (argument of ``_accumulating``) is false, there is no
            defect. If it is true, there is one on purpose: earlier gradients of the same shape and dtype are added.
            """
            if not keep:
                return {"x": 2 * grad}
            total = buffers.setdefault((grad.shape, grad.dtype), torch.zeros(grad.shape, dtype=grad.dtype))
            # The buffer itself is not handed out, so that only its content is wrong.
            return {"x": total.add_(2 * grad).clone()}

    return bind


def _called_twice(op):
    """Return whether two backwards of one call of ``op`` (``doubled``) return the same gradient."""
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


def _shared_gradient(copy):
    """Return a function that registers a gradient with the op ``doubled``. The gradient returns ``2 * grad``. If
    ``copy`` is true, there is no defect. If it is false, there is one on purpose: all gradients of one shape and dtype
    are returned in the same buffer.
    """

    def bind(op):
        """Register the gradient ``_`` with ``op``. It returns ``2 * grad``. If ``copy`` (argument of
        ``_shared_gradient``) is true, there is no defect. If it is false, there is one on purpose: all gradients of one
        shape and dtype are returned in the same buffer.
        """
        buffers = {}

        @op.backward(saves=[])
        def _(grad, saved, needs):
            """Return the gradient ``2 * grad``. If ``copy`` (argument of ``_shared_gradient``) is true, there is no
            defect. If it is false, there is one on purpose: the result is a buffer that the next backward overwrites.
            """
            if copy:
                return {"x": grad * 2}
            buffer = buffers.setdefault((grad.shape, grad.dtype), torch.empty(grad.shape, dtype=grad.dtype))
            return {"x": torch.mul(grad, 2, out=buffer)}

    return bind


def _first_kept(op):
    """Return whether the gradient of a first call of ``op`` (``doubled``) still holds 2 after the backward of a second
    call.
    """
    x = randn(3, 2).requires_grad_()
    with torch.no_grad():
        # The incoming gradients differ, so that a buffer that both calls share is noticed.
        grads = torch.ones(3, 2), torch.full((3, 2), 7.0)
    first = torch.autograd.grad(op(x), x, grads[0])[0]
    torch.autograd.grad(op(x), x, grads[1])
    return close(first, torch.full((3, 2), 2.0))


gradient(
    "gradients that share one buffer",
    "the gradient of one call is overwritten by the next",
    of(doubled, _shared_gradient(False)),
    of(doubled, _shared_gradient(True)),
    _first_kept,
)


def _rescaling(in_place):
    """Return a function that registers a gradient with the op ``product``. The gradient uses the saved ``y`` times 1.5.
    If ``in_place`` is false, there is no defect. If it is true, there is one on purpose: it multiplies ``y`` in place,
    and thereby changes the caller's tensor.
    """

    def bind(op):
        """Register the gradient ``_`` with ``op``. It uses the saved ``y`` times 1.5. If ``in_place`` (argument of
        ``_rescaling``) is false, there is no defect. If it is true, there is one on purpose: it multiplies ``y`` in
        place, and thereby changes the caller's tensor.
        """

        @op.backward
        def _(grad, saved, needs):
            """Return the gradients of ``x * y``. If ``in_place`` (argument of ``_rescaling``) is false, there is no
            defect. If it is true, there is one on purpose: the saved ``y``, which is the caller's tensor, is multiplied
            by 1.5.
            """
            y = saved.y.mul_(1.5) if in_place and needs.x else saved.y * 1.5 if needs.x else saved.y
            return {"x": grad * y / 1.5, "y": grad * saved.x}

    return bind


def _inputs_untouched(op):
    """Return whether the backward of ``op`` (``product``) leaves its second argument unchanged."""
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
