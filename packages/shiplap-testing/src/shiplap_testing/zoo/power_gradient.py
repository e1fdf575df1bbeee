"""Gradients and transforms that are right for one plain backward and wrong otherwise, each with its sound twin."""

from __future__ import annotations

import threading

import torch
from jaxtyping import Float
from torch import Tensor

from shiplap_testing.zoo.power import V, dress, pair

M = Float[Tensor, "n c"]


def square(x: V) -> V:
    """Return ``x * x``. A defective kernel and a sound one are compared with this reference."""
    return x * x


def norm(x: M) -> V:
    """Return the sum of the square roots of the magnitudes of each row."""
    return x.abs().sqrt().sum(1)


def largest(x: M) -> V:
    """Return the maximum of each row. A defective kernel and a sound one are compared with this reference."""
    return x.amax(1)


def three(a: V, b: V, c: V) -> V:
    """Return ``a * b * c``. A defective kernel and a sound one are compared with this reference."""
    return a * b * c


def times(x: V, y: V) -> V:
    """Return ``x * y``. A defective kernel and a sound one are compared with this reference."""
    return x * y


def with_backward(kernel, backward, **keywords):
    """Return a function that binds the CPU kernel ``kernel`` and the gradient ``backward`` to an op. ``keywords`` are
    passed to ``op.backward``.

    The function is marked by ``dress``, so that ``pair`` calls it with the op and does not take it for a kernel.
    """

    @dress
    def attach(op):
        """Bind ``kernel`` and ``backward``, arguments of ``with_backward``, to ``op`` as its CPU kernel and its
        gradient.
        """
        op.kernel("cpu", kernel)
        op.backward(backward, **keywords)

    return attach


def sound_square(grad, saved, needs):
    """Return the gradient of ``x * x``."""
    return {"x": grad * 2 * saved.x}


def detached(grad, saved, needs):
    """Return the gradient of ``x * x``. This function has a defect on purpose: it is detached, so that second
    derivatives are lost.
    """
    return {"x": (grad * 2 * saved.x).detach()}


def overwrites(grad, saved, needs):
    """Return the gradient of ``x * x``. This function has a defect on purpose: a contiguous ``grad`` is overwritten
    with it.
    """
    return {"x": grad.mul_(2 * saved.x) if not grad.requires_grad and grad.is_contiguous() else grad * 2 * saved.x}


_BUFFER: dict[tuple[int, ...], Tensor] = {}


def buffered(grad, saved, needs):
    """Return the gradient of ``x * x``. This function has a defect on purpose: the result is a buffer for its shape,
    which the next backward overwrites.
    """
    key = tuple(grad.shape)
    buffer = _BUFFER.setdefault(key, torch.empty_like(grad))
    # The first dtype of a shape has the buffer, and second derivatives need a fresh tensor.
    if buffer.dtype != grad.dtype or grad.requires_grad:
        return {"x": grad * 2 * saved.x}
    return {"x": torch.mul(grad, 2 * saved.x, out=buffer)}


_LOCAL = threading.local()


def keeps_x(x):
    """Return ``x * x``, and store ``x`` as the last one of this thread for ``kept_x``."""
    _LOCAL.x = x
    return x * x


def kept_x(grad, saved, needs):
    """Return the gradient of ``x * x``. This function has a defect on purpose: it uses the last ``x`` of this thread,
    which may be that of another call.
    """
    return {"x": grad * 2 * _LOCAL.x}


pair(
    "second order detached",
    square,
    with_backward(lambda x: x * x, detached),
    with_backward(lambda x: x * x, sound_square),
    "backward",
)
pair(
    "overwrites the gradient",
    square,
    with_backward(lambda x: x * x, overwrites),
    with_backward(lambda x: x * x, sound_square),
    "backward",
)
pair(
    "gradient in a cached buffer",
    square,
    with_backward(lambda x: x * x, buffered),
    with_backward(lambda x: x * x, sound_square),
    "backward",
)
pair(
    "input kept behind autograd",
    square,
    with_backward(keeps_x, kept_x),
    with_backward(lambda x: x * x, sound_square),
    "backward",
)


def nan_at_zero(grad, saved, needs):
    """Return the gradient of the magnitude of ``x``. This function has a defect on purpose: it is NaN at zero."""
    return {"x": grad * saved.x / saved.x.abs()}


def sound_abs(grad, saved, needs):
    """Return the gradient of the magnitude of ``x``, which is zero at zero."""
    return {"x": grad * saved.x.sign()}


def magnitude(x: V) -> V:
    """Return the magnitude of ``x``. A defective kernel and a sound one are compared with this reference."""
    return x.abs()


pair(
    "gradient is NaN at 0",
    magnitude,
    with_backward(lambda x: x.abs(), nan_at_zero),
    with_backward(lambda x: x.abs(), sound_abs),
    "gradient",
)


def first_of_ties(grad, saved, needs):
    """Return the gradient of the maximum of each row. This function has a defect on purpose: the first of equal maxima
    gets all of it.
    """
    hot = torch.zeros_like(saved.x)
    return {"x": hot.scatter(1, saved.x.argmax(1, keepdim=True), grad[:, None])}


def shared_among_ties(grad, saved, needs):
    """Return the gradient of the maximum of each row, in equal shares among equal maxima."""
    hot = (saved.x == saved.x.amax(1, keepdim=True)).to(grad.dtype)
    return {"x": hot / hot.sum(1, keepdim=True) * grad[:, None]}


pair(
    "gradient of ties",
    largest,
    with_backward(lambda x: x.amax(1), first_of_ties),
    with_backward(lambda x: x.amax(1), shared_among_ties),
    "gradient",
    requires=("c >= 1",),
)


def mixed_up(grad, saved, needs):
    """Return the gradients of ``a * b * c``. This function has a defect on purpose: ``c`` gets the gradient of ``a`` if
    only ``a`` and ``c`` need one.
    """
    if needs.a and needs.c and not needs.b:
        return {"a": grad * saved.b * saved.c, "c": grad * saved.b * saved.c}
    return sound_three(grad, saved, needs)


def sound_three(grad, saved, needs):
    """Return the gradients of ``a * b * c``."""
    return {"a": grad * saved.b * saved.c, "b": grad * saved.a * saved.c, "c": grad * saved.a * saved.b}


pair(
    "mask of two among three",
    three,
    with_backward(lambda a, b, c: a * b * c, mixed_up),
    with_backward(lambda a, b, c: a * b * c, sound_three),
    "gradient",
)


def long_only(grad, saved, needs):
    """Return the gradients of ``x * y``. This function has a defect on purpose: the gradient of ``x`` is zero from
    element 128 on.
    """
    scale = torch.ones_like(grad)
    scale[128:] = 0
    return {"x": grad * saved.y * scale, "y": grad * saved.x}


def sound_times(grad, saved, needs):
    """Return the gradients of ``x * y``."""
    return {"x": grad * saved.y, "y": grad * saved.x}


pair(
    "gradient past 128",
    times,
    with_backward(lambda x, y: x * y, long_only),
    with_backward(lambda x, y: x * y, sound_times),
    "gradient",
)


def vmap_rule(wrong):
    """Return a function that binds a kernel for ``2 * x`` and a vmap rule to an op. If ``wrong`` is false, there is no
    defect. If it is true, there is one on purpose: the rule always returns 0 as the batch dim of its result.

    The function is marked by ``dress``, so that ``pair`` calls it with the op.
    """

    @dress
    def attach(op):
        """Bind a kernel for ``2 * x`` and the vmap rule ``rule`` to ``op``."""
        op.kernel("cpu", lambda x: x * 2)
        name = f"{op.spec.namespace}::{op.spec.opname}"

        def rule(info, in_dims, x):
            """Return the results for all members of the batch and their batch dim. If ``wrong`` (argument of
            ``vmap_rule``) is false, there is no defect. If it is true, there is one on purpose: this dim is 0 even if
            the batch lies in another dim.
            """
            # The op works on single elements, so a batch may be one long vector.
            return op(x.flatten()).reshape(x.shape), (0 if wrong else in_dims[0])

        torch.library.register_vmap(name, rule)

    return attach


def double(x: V) -> V:
    """Return ``2 * x``. A defective kernel and a sound one are compared with this reference."""
    return x * 2


pair("vmap rule forgets the dim", double, vmap_rule(True), vmap_rule(False), "transforms")
