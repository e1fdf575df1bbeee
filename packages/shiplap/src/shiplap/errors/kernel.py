"""Kernels, references and gradients: SL3xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register


class KernelError(ShiplapError, RuntimeError):
    """A kernel, reference or backward that broke its side of the declaration (SL3xx)."""


register(
    KernelError,
    [
        (
            "SL301",
            "an output does not fit the declaration",
            "Code that torch has compiled relies on the shapes and dtypes of the declaration.",
            "correct the kernel, or the declaration if the kernel is right",
        ),
        (
            "SL302",
            "a data-dependent size exceeds its bound",
            "Compiled code allocates memory for the declared bound before the kernel runs.",
            "correct bounds= in the declaration, or the kernel",
        ),
        (
            "SL303",
            "a gradient does not fit its argument",
            "A gradient must have the shape of its argument.",
            "return a tensor of the argument's shape, or None",
        ),
        (
            "SL304",
            "the op has no backward",
            "An input requires a gradient, and the op does not declare how to compute one.",
            "declare a gradient with @op.backward; where none shall flow through the op, call .detach() on its inputs",
        ),
        (
            "SL305",
            "the kernel refused its arguments",
            "The kernel returned an error status together with the message under 'got'.",
            "correct the argument that the kernel's message names",
        ),
        (
            "SL306",
            "the op has no kernel for this device",
            "SHIPLAP_STRICT=1 forbids running the reference where no kernel is declared.",
            'add a kernel with @op.kernel("<device>"), or unset SHIPLAP_STRICT',
        ),
        (
            "SL307",
            "the op cannot be packaged for this device",
            "An AOTInductor package runs without Python, but the kernel that this op would use is a Python function.",
            "declare one C ABI kernel or a template for the device, or pass the op's result to the program as an input",
        ),
        (
            "SL313",
            "the gradient of the op cannot be differentiated again",
            (
                "A second derivative differentiates the backward. Autograd does not record one of its operations, or "
                "takes a saved value for a constant. The second derivative would be wrong, with no error."
            ),
            (
                "write the backward in operations that autograd records; or declare once_differentiable=True to refuse "
                "second derivatives; or once_differentiable=False if they are known to be right"
            ),
        ),
        (
            "SL316",
            "an argument was changed that the op does not declare to change",
            (
                "A compiled graph may move, repeat or remove a call, and share the memory of its arguments. It relies "
                "on mutates=, which lists every argument that the op writes to. Such an argument keeps its memory."
            ),
            "write to a copy, or list the argument in mutates=",
        ),
        (
            "SL317",
            "torch.vmap cannot map a call that writes to given outputs",
            (
                "A mapped call runs the op once for each slice of a batch. Torch stacks new tensors that the calls "
                "return, and takes no given output apart."
            ),
            "call the op itself, which returns new tensors, instead of op.out",
        ),
        (
            "SL318",
            "a call whose result sizes depend on data cannot be captured",
            (
                "The host reads such a size before it can return the result. A CUDA graph records work for the device "
                "alone, and its replay repeats the sizes of the capture."
            ),
            "call the op outside of the capture, and capture the parts before and after it",
        ),
    ],
)
