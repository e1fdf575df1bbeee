"""Gradients that depend on what was called in between: buffers, saved inputs and threads behind autograd's back."""

import threading
from functools import partial

import torch

from shiplap_testing.defects.declared import doubled, product, relu
from shiplap_testing.defects.defect import add, of
from shiplap_testing.defects.witness import close, in_thread, randn

gradient = partial(add, "gradient")


def _masking(remember):
    """Return a function that registers a CPU kernel and a gradient with the op ``relu``. ``remember()`` returns two
    functions, ``write`` and ``read``. The kernel passes the mask of positive elements to ``write(mask)``, and the
    gradient gets a mask from ``read(x)``.
    """

    def bind(op):
        """Register a CPU kernel and a gradient with ``op`` (``relu``). The kernel passes the mask of positive elements
        to ``write``, and the gradient gets a mask from ``read``. Both functions come from ``remember()`` (argument of
        ``_masking``).
        """
        write, read = remember()

        @op.kernel("cpu")
        def forward(x, *, out):
            """Write relu of ``x`` to ``out``, and pass the mask of the elements that are positive or NaN to ``write``.
            ``write`` is the first of the two functions that ``remember()`` (argument of ``_masking``) returns.
            """
            torch.clamp_min(x, 0, out=out)
            # In this form NaN counts as positive, as in the gradient of torch's relu.
            write(~(x <= 0))

        @op.backward
        def _(grad, saved, needs):
            """Return the gradient of relu for ``x``, as a dict by argument name. It is ``grad`` where the mask is set
            and zero elsewhere. The mask comes from ``read``, the second of the two functions that ``remember()``
            (argument of ``_masking``) returns.
            """
            return {"x": torch.where(read(saved.x), grad, 0)}

    return bind


def _saved():
    """Return a sound pair of functions, ``write(mask)`` and ``read(x)``, for the gradient of relu.

    ``write`` ignores the mask, and ``read`` computes the mask of positive or NaN elements from the saved ``x``.
    """
    return lambda mask: None, lambda x: ~(x <= 0)


def _last_mask():
    """Return a pair of functions, ``write(mask)`` and ``read(x)``, that keep one mask. The pair has a defect on
    purpose: ``read`` returns the mask of the last forward of relu, which may belong to another call.
    """
    state = {}
    return lambda mask: state.__setitem__("mask", mask), lambda x: state["mask"]


def _two_calls(op):
    """Call ``op`` (``relu``) on two tensors, then take both gradients together. Return whether they are right. If the
    backward raises ``RuntimeError``, the result is False.
    """
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
    """Return a pair of functions, ``write(mask)`` and ``read(x)``. The first pushes a mask on a stack, and the second
    pops the last mask. The pair has a defect on purpose: a gradient gets the mask of another call if forwards and
    backwards of relu do not come in pairs.
    """
    masks = []
    return masks.append, lambda x: masks.pop()


def _forward_without_backward(op):
    """Call ``op`` (``relu``) on two tensors. Return whether the gradient of the first call is right if that of the
    second call is never computed.
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
    """Return a pair of functions, ``write(mask)`` and ``read(x)``, that keep the last mask of each thread. The pair has
    a defect on purpose: the gradient gets the mask of a later call of relu in its thread, if that call had a tensor of
    this shape.
    """
    local = threading.local()

    def read(x):
        """Return the last mask that ``write`` stored in this thread. If there is none, or its shape differs from that
        of ``x``, return the mask of positive or NaN elements of ``x``.
        """
        mask = getattr(local, "mask", None)
        return ~(x <= 0) if mask is None or mask.shape != x.shape else mask

    def write(mask):
        """Store ``mask`` as the last mask of this thread."""
        local.mask = mask

    return write, read


def _backward_elsewhere(op):
    """Call ``op`` (``relu``) in this thread and on other numbers in a second thread. Return whether the gradient of the
    first call is right if the second thread computes it.
    """
    a, b = randn(3, 2).requires_grad_(), randn(3, 2, seed=1).requires_grad_()
    loss = op(a).sum()

    def elsewhere():
        """Call ``op`` on ``b``, then return the gradient of ``loss`` for ``a``. All four are variables of
        ``_backward_elsewhere``.
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

    If ``detached`` is false, autograd saves the inputs, and there is no defect. If it is true, there is a defect on
    purpose: the kernel stores the inputs under the address of the output, without autograd. Later changes of an input
    in place then give a wrong gradient.
    """

    def bind(op):
        """Register the kernel ``forward`` and the gradient ``_`` with ``op`` (``product``).

        If ``detached`` (argument of ``_stashed``) is false, autograd saves the inputs, and there is no defect. If it is
        true, there is a defect on purpose: the kernel stores the inputs under the address of the output, without
        autograd.
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
            """Return the gradients of ``x * y``, as a dict by argument name.

            If ``detached`` (argument of ``_stashed``) is false, there is no defect. If it is true, there is a defect on
            purpose: ``x`` and ``y`` are those that the kernel stored without autograd. Later changes of them in place
            thus go unnoticed.
            """
            x, y = stash[saved.out.data_ptr()] if detached else (saved.x, saved.y)
            return {"x": grad * y, "y": grad * x}

    return bind


def _changed_in_between(op):
    """Call ``op`` (``product``), change ``y`` in place and take the gradient for ``x``. Return whether this gradient is
    the ``y`` at the time of the call. Also return True if torch raises its error about a change in place.
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
    """Return a function that registers a gradient with the op ``doubled``. The gradient is ``2 * grad``. If ``keep`` is
    false, there is no defect. If it is true, there is a defect on purpose: the gradients of earlier backwards with the
    same shape and dtype are added.
    """

    def bind(op):
        """Register the gradient ``_`` with ``op`` (``doubled``). It is ``2 * grad``. If ``keep`` (argument of
        ``_accumulating``) is false, there is no defect. If it is true, there is a defect on purpose: the gradients of
        earlier backwards with the same shape and dtype are added.
        """
        buffers = {}

        @op.backward(saves=[])
        def _(grad, saved, needs):
            """Return the gradient ``2 * grad`` for ``x``, as a dict by argument name. If ``keep`` (argument of
            ``_accumulating``) is false, there is no defect. If it is true, there is a defect on purpose: the gradients
            of earlier backwards with the same shape and dtype are added.
            """
            if not keep:
                return {"x": 2 * grad}
            total = buffers.setdefault((grad.shape, grad.dtype), torch.zeros(grad.shape, dtype=grad.dtype))
            # The buffer itself is not handed out, so that only its content is wrong.
            return {"x": total.add_(2 * grad).clone()}

    return bind


def _called_twice(op):
    """Call ``op`` (``doubled``) once and compute its gradient twice. Return whether both gradients are equal."""
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
    """Return a function that registers a gradient with the op ``doubled``. The gradient is ``2 * grad``. If ``copy`` is
    true, there is no defect. If it is false, there is a defect on purpose: all gradients of one shape and dtype are
    returned in one buffer.
    """

    def bind(op):
        """Register the gradient ``_`` with ``op`` (``doubled``). It is ``2 * grad``. If ``copy`` (argument of
        ``_shared_gradient``) is true, there is no defect. If it is false, there is a defect on purpose: all gradients
        of one shape and dtype are returned in one buffer.
        """
        buffers = {}

        @op.backward(saves=[])
        def _(grad, saved, needs):
            """Return the gradient ``2 * grad`` for ``x``, as a dict by argument name. If ``copy`` (argument of
            ``_shared_gradient``) is true, there is no defect. If it is false, there is a defect on purpose: the result
            is a buffer that the next backward with this shape and dtype overwrites.
            """
            if copy:
                return {"x": grad * 2}
            buffer = buffers.setdefault((grad.shape, grad.dtype), torch.empty(grad.shape, dtype=grad.dtype))
            return {"x": torch.mul(grad, 2, out=buffer)}

    return bind


def _first_kept(op):
    """Return whether the gradient of a first call of ``op`` (``doubled``) is unchanged after the backward of a second
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
    """Return a function that registers a gradient with the op ``product``. The gradient for ``x`` multiplies the saved
    ``y`` by 1.5 and divides the result by 1.5. If ``in_place`` is false, there is no defect. If it is true, there is a
    defect on purpose: ``y`` is multiplied in place, which changes the caller's tensor.
    """

    def bind(op):
        """Register the gradient ``_`` with ``op`` (``product``). For ``x`` it multiplies the saved ``y`` by 1.5 and
        divides the result by 1.5. If ``in_place`` (argument of ``_rescaling``) is false, there is no defect. If it is
        true, there is a defect on purpose: ``y`` is multiplied in place, which changes the caller's tensor.
        """

        @op.backward
        def _(grad, saved, needs):
            """Return the gradients of ``x * y``, as a dict by argument name. If ``in_place`` (argument of
            ``_rescaling``) is false, there is no defect. If it is true, there is a defect on purpose: the saved ``y``,
            which is the caller's tensor, is multiplied by 1.5 in place.
            """
            y = saved.y.mul_(1.5) if in_place and needs.x else saved.y * 1.5 if needs.x else saved.y
            return {"x": grad * y / 1.5, "y": grad * saved.x}

    return bind


def _inputs_untouched(op):
    """Return whether a call of ``op`` (``product``) and its backward for ``x`` leave the second argument ``y``
    unchanged.
    """
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
