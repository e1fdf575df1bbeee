"""Rewrites: SL8xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register


class RewriteError(ShiplapError, ValueError):
    """A rewrite that cannot be put into force (SL8xx)."""


register(
    RewriteError,
    [
        (
            "SL801",
            "the rewrite failed its proof",
            "The replacement must compute what the pattern computes: values, dtypes, shapes, strides and gradients.",
            "correct the replacement; print rewrite.findings to see each difference",
        ),
        (
            "SL802",
            "the pattern and the replacement of a rewrite do not fit each other",
            (
                "The replacement is called with the arguments that the pattern matched, so both need the same "
                "parameters. The annotations of the pattern say which tensors and numbers they are."
            ),
            "give both functions the same parameters, and annotate each parameter of the pattern",
        ),
        (
            "SL803",
            "the guard is not valid",
            (
                "A guard is a Python expression on the tensors and numbers of a match. It may use only comparisons, "
                "and, or, not, arithmetic on sizes, and attributes such as x.dtype, x.ndim and x.shape[-1]."
            ),
            (
                "use only comparisons of x.dtype, x.shape[-1], x.ndim, x.device.type, dims, numbers and strings, "
                "joined by and, or, not"
            ),
        ),
        (
            "SL804",
            "the function cannot be traced into one graph",
            "A pattern is compared with the graph of a model, node by node.",
            "write it as one function of tensors, without branches on values, writes or randomness",
        ),
        (
            "SL805",
            "the rewrite cannot be proven",
            "A rewrite is applied only after its replacement has been compared with its pattern on samples.",
            "annotate the pattern's arguments, or give samples=",
        ),
        (
            "SL806",
            "no graph was compiled",
            "Rewrites are applied while torch.compile compiles a function.",
            "pass a file with a function or a model, and with example_inputs() that returns its arguments as a tuple",
        ),
    ],
)
