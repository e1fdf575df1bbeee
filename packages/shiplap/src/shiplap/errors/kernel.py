"""Kernels, references and gradients: SL3xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register

__all__ = ["KernelError"]


class KernelError(ShiplapError, RuntimeError):
    """A kernel, reference or backward that broke its side of the declaration (SL3xx)."""


register(
    KernelError,
    [
        (
            "SL301",
            "output does not fit the declaration",
            "The fake promised another tensor.",
            "correct the kernel, or the declaration if the kernel is right",
        ),
        (
            "SL302",
            "data-dependent size exceeds its bound",
            "Compiled code and capacity forms rely on the bound.",
            "correct bounds= in the declaration, or the kernel",
        ),
        (
            "SL303",
            "gradient does not fit its argument",
            "A gradient has the shape of its argument.",
            "return a tensor of the argument's shape, or None",
        ),
        (
            "SL304",
            "no backward",
            "The op declares no gradient, and one was asked for.",
            "declare one with @op.backward, or call .detach() on the inputs",
        ),
        (
            "SL305",
            "kernel refused its arguments",
            "The kernel returned a status other than SL_OK with this message.",
            "see the message",
        ),
        (
            "SL306",
            "no kernel for this device",
            "SHIPLAP_STRICT=1 forbids running the reference instead.",
            'add a kernel with @op.kernel("<device>"), or unset SHIPLAP_STRICT',
        ),
        (
            "SL307",
            "op cannot be packaged for this device",
            "An AOTInductor package runs without Python.",
            "compute what the op returns outside and pass it to the program, or package it for the CPU",
        ),
    ],
)
