"""Gradients and transforms that are right for one plain backward and wrong otherwise, each with its sound twin."""

from __future__ import annotations

import threading

import torch
from jaxtyping import Float
from torch import Tensor

from shiplap_testing.zoo.power import V, dress, pair

M = Float[Tensor, "n c"]


def square(x: V) -> V:
    """Return ``x * x``, as the reference of ops in ``PAIRS``. Their defective and sound gradients are compared with its
    own.
    """
    return x * x


def norm(x: M) -> V:
    """Return the sum of the square roots of the magnitudes of each row of ``x``."""
    return x.abs().sqrt().sum(1)


def largest(x: M) -> V:
    """Return the maximum of each row of ``x``, as the reference of ops in ``PAIRS``. Their defective and sound
    gradients are compared with its own.
    """
    return x.amax(1)


def three(a: V, b: V, c: V) -> V:
    """Return ``a * b * c``, the reference of the ops in ``PAIRS``. The gradients of those ops, defective or sound, are
    compared with the gradient of this function.
    """
    return a * b * c


def times(x: V, y: V) -> V:
    """Return ``x * y``, as the reference of ops in ``PAIRS``. Their defective and sound gradients are compared with its
    own.
    """
    return x * y


def with_backward(kernel, backward, **keywords):
    """Return a function that takes an op and binds the CPU kernel ``kernel`` and the gradient ``backward`` to it.
    ``keywords`` are passed to ``op.backward``.

    The function is marked by ``dress``, so that ``pair`` calls it with the op and does not take it for a kernel.
    """

    @dress
    def attach(op):
        """Bind ``kernel`` and ``backward``, arguments of the enclosing function, to ``op`` as its CPU kernel and its
        gradient.
        """
        op.kernel("cpu", kernel)
        op.backward(backward, **keywords)

    return attach


def sound_square(grad, saved, needs):
    """Return the gradient of ``x * x``, as a dict with the key ``x``."""
    return {"x": grad * 2 * saved.x}


def detached(grad, saved, needs):
    """Return the gradient of ``x * x``, as a dict with the key ``x``. This function has a defect on purpose. It
    detaches the gradient, so that second derivatives are lost, and the declaration says that they are right.
    """
    return {"x": (grad * 2 * saved.x).detach()}


def overwrites(grad, saved, needs):
    """Return the gradient of ``x * x``, as a dict with the key ``x``. This function has a defect on purpose. It
    overwrites a contiguous ``grad`` with the result.
    """
    return {"x": grad.mul_(2 * saved.x) if not grad.requires_grad and grad.is_contiguous() else grad * 2 * saved.x}


_BUFFER: dict[tuple[int, ...], Tensor] = {}


def buffered(grad, saved, needs):
    """Return the gradient of ``x * x``, as a dict with the key ``x``. This function has a defect on purpose. The
    gradient is a buffer that is kept for each shape, and the next backward overwrites it.
    """
    key = tuple(grad.shape)
    buffer = _BUFFER.setdefault(key, torch.empty_like(grad))
    # The first dtype of a shape has the buffer, and second derivatives need a fresh tensor.
    if buffer.dtype != grad.dtype or grad.requires_grad:
        return {"x": grad * 2 * saved.x}
    return {"x": torch.mul(grad, 2 * saved.x, out=buffer)}


_LOCAL = threading.local()


def keeps_x(x):
    """Return ``x * x``, and store ``x`` for :func:`kept_x` as the last one of this thread."""
    _LOCAL.x = x
    return x * x


def kept_x(grad, saved, needs):
    """Return the gradient of ``x * x``, as a dict with the key ``x``. This function has a defect on purpose. It uses
    the last ``x`` that :func:`keeps_x` got in this thread, which can be that of another call.
    """
    return {"x": grad * 2 * _LOCAL.x}


pair(
    "second order detached",
    square,
    with_backward(lambda x: x * x, detached, once_differentiable=False),
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
    """Return the gradient of the magnitude of ``x``, as a dict with the key ``x``. This function has a defect on
    purpose. The gradient is NaN at zero.
    """
    return {"x": grad * saved.x / saved.x.abs()}


def sound_abs(grad, saved, needs):
    """Return the gradient of the magnitude of ``x``, as a dict with the key ``x``. It is zero at zero."""
    return {"x": grad * saved.x.sign()}


def magnitude(x: V) -> V:
    """Return the magnitude of ``x``, as the reference of ops in ``PAIRS``. Their defective and sound gradients are
    compared with its own.
    """
    return x.abs()


pair(
    "gradient is NaN at 0",
    magnitude,
    with_backward(lambda x: x.abs(), nan_at_zero),
    with_backward(lambda x: x.abs(), sound_abs),
    "gradient",
)


def first_of_ties(grad, saved, needs):
    """Return the gradient of the maximum of each row of ``x``, as a dict with the key ``x``. This function has a defect
    on purpose. The first of several equal maxima gets the whole gradient.
    """
    hot = torch.zeros_like(saved.x)
    return {"x": hot.scatter(1, saved.x.argmax(1, keepdim=True), grad[:, None])}


def shared_among_ties(grad, saved, needs):
    """Return the gradient of the maximum of each row of ``x``, as a dict with the key ``x``. Equal maxima get equal
    shares.
    """
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
    """Return the gradients of ``a * b * c``, as a dict by argument name. This function has a defect on purpose. ``c``
    gets the gradient of ``a`` if only ``a`` and ``c`` need one.
    """
    if needs.a and needs.c and not needs.b:
        return {"a": grad * saved.b * saved.c, "c": grad * saved.b * saved.c}
    return sound_three(grad, saved, needs)


def sound_three(grad, saved, needs):
    """Return the gradients of ``a * b * c``, as a dict by argument name."""
    return {"a": grad * saved.b * saved.c, "b": grad * saved.a * saved.c, "c": grad * saved.a * saved.b}


pair(
    "mask of two among three",
    three,
    with_backward(lambda a, b, c: a * b * c, mixed_up),
    with_backward(lambda a, b, c: a * b * c, sound_three),
    "gradient",
)


def long_only(grad, saved, needs):
    """Return the gradients of ``x * y``, as a dict by argument name. This function has a defect on purpose. The
    gradient of ``x`` is zero from index 128 on.
    """
    scale = torch.ones_like(grad)
    scale[128:] = 0
    return {"x": grad * saved.y * scale, "y": grad * saved.x}


def sound_times(grad, saved, needs):
    """Return the gradients of ``x * y``, as a dict by argument name."""
    return {"x": grad * saved.y, "y": grad * saved.x}


pair(
    "gradient past 128",
    times,
    with_backward(lambda x, y: x * y, long_only),
    with_backward(lambda x, y: x * y, sound_times),
    "gradient",
)


def vmap_rule(wrong):
    """Return a function that takes an op and binds a kernel for ``2 * x`` and a vmap rule to it. If ``wrong`` is true,
    the rule has a defect on purpose. It always returns 0 as the batch dim of its result.

    The function is marked by ``dress``, so that ``pair`` calls it with the op.
    """

    @dress
    def attach(op):
        """Bind a CPU kernel for ``2 * x`` and the vmap rule ``rule`` to ``op``."""
        op.kernel("cpu", lambda x: x * 2)
        name = f"{op.spec.namespace}::{op.spec.opname}"

        def rule(info, in_dims, x):
            """Return the results for all members of the batch, and their batch dim. If ``wrong``, an argument of the
            enclosing function, is true, there is a defect on purpose. The batch dim is then always 0, although the
            batch lies in the dim ``in_dims[0]``.
            """
            # The op works on single elements, so a batch may be one long vector.
            return op(x.flatten()).reshape(x.shape), (0 if wrong else in_dims[0])

        torch.library.register_vmap(name, rule)

    return attach


def double(x: V) -> V:
    """Return ``2 * x``, as the reference of ops in ``PAIRS``. Their defective and sound vmap rules are compared with
    it.
    """
    return x * 2


pair("vmap rule forgets the dim", double, vmap_rule(True), vmap_rule(False), "transforms")
