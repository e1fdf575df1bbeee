"""Audits: SL5xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register


class AuditError(ShiplapError, ValueError):
    """An audit that cannot be run as asked (SL5xx)."""


class VerdictError(ShiplapError, TypeError):
    """A result that is used in a way that hides its verdict (SL504)."""


register(
    AuditError,
    [
        (
            "SL501",
            "the target names no declared op",
            "An audit works on ops that are declared with sl.op or sl.adopt.",
            "pass module:op, a file that declares ops, or namespace::name of a declared op",
        ),
        (
            "SL502",
            "no samples can be generated",
            "Shiplap could not derive sizes or values for test inputs from the declaration.",
            "declare a builder with @op.samples: fn(rng, sizes, dtype, device) -> all arguments, "
            "where rng is a torch.Generator and sizes maps each dim and each scalar to the value asked for",
        ),
        (
            "SL503",
            "no check has this name",
            "The name of a check is the name of its file in shiplap/audit/checks.",
            "use names that shiplap.audit.CHECKS lists",
        ),
    ],
)

register(
    VerdictError,
    [
        (
            "SL504",
            "a result with a verdict was used as a condition",
            (
                "A verdict has three values, for an audit proven, failed and incomplete. Incomplete is no failure and "
                "no success, so that a result is neither true nor false."
            ),
            "use the property that you need, such as: assert sl.audit(op).proven",
        ),
    ],
)
