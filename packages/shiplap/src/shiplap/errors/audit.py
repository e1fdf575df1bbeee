"""Audits: SL5xx."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register

__all__ = ["AuditError"]


class AuditError(ShiplapError, ValueError):
    """An audit that cannot be run as asked (SL5xx)."""


register(
    AuditError,
    [
        (
            "SL501",
            "nothing to audit",
            "The target names no declared op.",
            "pass module:op, a file that declares ops, or namespace::name of a declared op",
        ),
        (
            "SL502",
            "no samples can be generated",
            "Sizes or values could not be derived from the declaration.",
            "declare a builder with @op.samples: fn(rng, sizes, dtype, device) -> all arguments",
        ),
        (
            "SL503",
            "no such check",
            "Checks are named by their file in shiplap/audit/checks.",
            "use names that shiplap.audit.CHECKS lists",
        ),
    ],
)
