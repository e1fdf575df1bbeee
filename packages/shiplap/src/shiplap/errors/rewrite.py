"""Rewrites: SL8xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register

__all__ = ["RewriteError"]


class RewriteError(ShiplapError, ValueError):
    """A rewrite that cannot be put into force (SL8xx)."""


register(
    RewriteError,
    [
        (
            "SL801",
            "rewrite refused by its proof",
            "What a pattern is replaced by computes the same, in every respect.",
            "correct the replacement; rewrite.findings shows each difference",
        ),
        (
            "SL802",
            "declaration of a rewrite",
            "Pattern and replacement are two functions of the same arguments.",
            "give both functions the same parameters, annotated in the pattern",
        ),
        (
            "SL803",
            "guard",
            "A guard is evaluated on what a match is bound to, and shown when it does not hold.",
            "compare x.dtype, x.shape[-1], x.ndim, x.device.type, dims, numbers, strings; and, or, not are allowed",
        ),
        (
            "SL804",
            "pattern that is no graph",
            "A pattern is compared with graphs, node by node.",
            "write it as one function of tensors, without branches on values, writes or randomness",
        ),
        (
            "SL805",
            "rewrite without a proof",
            "Nothing is put into models that was not compared with what it replaces.",
            "annotate the pattern's arguments, or give samples=",
        ),
        (
            "SL806",
            "nothing to rewrite",
            "Rewrites act while a function is compiled.",
            "pass a file or module with a function and its example_inputs()",
        ),
    ],
)
