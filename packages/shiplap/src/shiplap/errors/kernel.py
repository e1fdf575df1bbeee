"""Kernels, references and gradients: SL3xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register
from shiplap.errors.declaration import SAVED_AND_NEEDS


class KernelError(ShiplapError, RuntimeError):
    """A kernel, reference or backward that broke its side of the declaration (SL3xx)."""


register(
    KernelError,
    [
        (
            "SL301",
            "an output does not fit the declaration",
            (
                "Code that torch has compiled relies on the number, the types, the shapes, the dtypes and the "
                "devices of results that the declaration states."
            ),
            (
                "let the kernel or the reference return what 'expected' shows. If the result under 'got' is right, "
                "change the return annotation to it"
            ),
        ),
        (
            "SL302",
            "a data-dependent size exceeds its bound",
            "Compiled code allocates memory for the declared bound before the kernel runs.",
            (
                "if the size under 'got' is right, enlarge the expression in bounds=. If it is wrong, correct the "
                "size that the kernel returns"
            ),
        ),
        (
            "SL303",
            "a gradient does not fit its argument",
            "A gradient must have the shape of its argument.",
            "return a tensor of the shape under 'expected'. If the gradient is zero, return None",
        ),
        (
            "SL304",
            "the op has no backward",
            (
                "An input requires a gradient, and the op does not declare how to compute one. An op that writes to "
                "its arguments, and a call with out=, can have no gradient."
            ),
            (
                "declare a gradient: @op.backward on a function (grad, saved, needs) that returns a dict with the "
                f"gradient of each input by its name. {SAVED_AND_NEEDS}. If the op writes to its arguments, or is "
                "called with out=, use an op that returns new tensors. Only where no gradient is to flow through the "
                "op, call .detach() on its inputs"
            ),
        ),
        (
            "SL305",
            "the kernel refused its arguments",
            (
                "The kernel, or the vendor's library that it calls, returned an error status with the message under "
                "'got'."
            ),
            "pass arguments that the kernel supports, according to the message under 'got'",
        ),
        (
            "SL306",
            "no kernel of the op takes this call",
            (
                "No kernel is declared for the device, or each one declines the call for the reason under 'got'. "
                "With SHIPLAP_STRICT=1, Shiplap then raises an error instead of running the reference, which may be "
                "slow."
            ),
            'add a kernel that takes such calls, with @op.kernel("cuda") or another device, or unset SHIPLAP_STRICT',
        ),
        (
            "SL307",
            "the op cannot be packaged for this device",
            (
                "An AOTInductor package runs without Python. The code that this op would run on the device, a kernel "
                "or the reference, is a Python function."
            ),
            "bind one C kernel (sl.cabi) or a template, or pass the op's result to the program as an input",
        ),
        (
            "SL313",
            "the gradient of the op cannot be differentiated again",
            (
                "A second derivative differentiates the backward. Autograd does not record one operation of this "
                "backward, or takes a saved value for a constant. The second derivative would be wrong without any "
                "error."
            ),
            (
                "write the backward in operations that autograd records. If 'got' names a saved value, compute that "
                "value in the backward from saved arguments. If no second derivative is needed, write "
                "@op.backward(once_differentiable=True), which refuses it. If second derivatives are known to be "
                "right, write @op.backward(once_differentiable=False)"
            ),
        ),
        (
            "SL316",
            "the op changed an argument that it does not declare in mutates=",
            (
                "A compiled graph may move, repeat or remove a call, and share the memory of its arguments. It relies "
                "on mutates=, which must list every argument that the op writes to."
            ),
            "if callers expect the write, list the argument in mutates=. If not, write to a copy, such as x.clone()",
        ),
        (
            "SL317",
            "torch.vmap cannot map a call that writes to given outputs",
            (
                "torch.vmap runs the op once for each slice of a batch and stacks the tensors that the op returns. "
                "It cannot divide a given output among these runs."
            ),
            "call the op itself, which returns new tensors, in place of op.out",
        ),
        (
            "SL318",
            "a call whose result sizes depend on data cannot be captured in a CUDA graph",
            (
                "The host must read such a size before it can return the result. A CUDA graph records only work of "
                "the device, and its replay repeats the sizes of the capture."
            ),
            "call the op outside of the capture, and capture the parts before and after it",
        ),
        (
            "SL319",
            "the op calls itself without an end",
            "A kernel or the reference of the op calls the op, which runs the same function again.",
            (
                "compute the result in the kernel and in the reference by torch functions or by other ops, and do not "
                "call the op there"
            ),
        ),
    ],
)
