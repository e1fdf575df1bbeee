"""Audits: SL5xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register


class AuditError(ShiplapError, ValueError):
    """An audit that cannot be run as asked (SL5xx)."""


class VerdictError(ShiplapError, TypeError):
    """The error for converting a result with a three-valued verdict, such as that of an audit, to bool (SL504)."""


register(
    AuditError,
    [
        (
            "SL501",
            "the target names no declared op",
            "An audit works on ops that are declared with sl.op or sl.adopt.",
            (
                "pass a file that declares ops, module:op such as mylib.ops:scale, or the name of a declared op such "
                "as mylib::scale"
            ),
        ),
        (
            "SL502",
            "no samples can be generated",
            "Shiplap could not derive sizes or values for test inputs from the declaration.",
            (
                "write a function build(rng, sizes, dtype, device) that returns all arguments, and decorate it with "
                "@op.samples. rng is a torch.Generator, and sizes maps each dim and each scalar to the value that it "
                "must have"
            ),
        ),
        (
            "SL503",
            "no check has this name",
            "checks= and --check take the names of the checks of an audit.",
            "use a name that 'expected' lists",
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
                "A verdict has three values, for an audit proven, failed and incomplete. Incomplete means neither "
                "success nor failure, so a result cannot be converted to bool."
            ),
            "test the verdict that you need, such as: assert sl.audit(op).proven",
        ),
    ],
)
