"""Rewrites: SL8xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register


class RewriteError(ShiplapError, ValueError):
    """The error for a rewrite that is invalid, cannot be proven, or cannot be applied to a model (SL8xx)."""


register(
    RewriteError,
    [
        (
            "SL801",
            "the rewrite failed its proof",
            (
                "The replacement must compute what the pattern computes, with equal values, dtypes, shapes, strides "
                "and gradients."
            ),
            "change the replacement until rewrite.findings, which lists the differences, shows none",
        ),
        (
            "SL802",
            "the pattern and the replacement of a rewrite do not fit each other",
            (
                "Shiplap calls the replacement with the arguments that the pattern matched, so both need the same "
                "parameters. The annotations of the pattern say which of them are tensors and which are numbers."
            ),
            "give both functions the same parameters, and annotate each parameter of the pattern",
        ),
        (
            "SL803",
            "the guard is not valid",
            (
                "A guard is a condition under which a rewrite applies, written as a Python expression in where=. It "
                "may use only comparisons, and, or, not, arithmetic on sizes, and attributes such as x.dtype, x.ndim "
                "and x.shape[-1]."
            ),
            'write the guard as a text of these parts, such as where="x.dtype == float16 and x.shape[-1] % 16 == 0"',
        ),
        (
            "SL804",
            "a function of the rewrite cannot be traced into one graph",
            (
                "Shiplap compares the pattern with the graph of a model, node by node. So torch must be able to "
                "trace the pattern and the replacement into one graph each, which uses every argument."
            ),
            (
                "write each of them as a function of tensors that uses every argument. It must not branch on values, "
                "write to arguments or draw random numbers"
            ),
        ),
        (
            "SL805",
            "the rewrite cannot be proven",
            (
                "Shiplap applies a rewrite only after it has compared the replacement with the pattern on samples. "
                "It has no samples, or none that the guards in where= admit."
            ),
            (
                'annotate each parameter of the pattern, such as x: Float[Tensor, "n c"]. If the guards exclude all '
                "samples that Shiplap makes from the annotations, give samples= a function that returns argument "
                "tuples which the guards admit"
            ),
        ),
        (
            "SL806",
            "no graph was compiled",
            "Rewrites are applied while torch.compile compiles a function, and torch.compile compiled none.",
            (
                "pass a file with a function or model of tensors, and define example_inputs() in it, which returns "
                "the arguments of the call as a tuple"
            ),
        ),
    ],
)
