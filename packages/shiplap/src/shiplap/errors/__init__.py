"""The error catalogue: every failure has a stable id, and states the failure, got, expected, where, and one fix.

A file here holds the errors of one kind: the exception class and its entries, as data. Packages built on shiplap add
entries of their own with :func:`register`; an id is never given twice.
"""

from shiplap.errors.argument import ArgumentError
from shiplap.errors.audit import AuditError, VerdictError
from shiplap.errors.base import (
    CATALOGUE,
    Entry,
    ShiplapError,
    ShiplapNotice,
    error,
    error_line,
    first_line,
    notice,
    register,
    short_error_line,
)
from shiplap.errors.command import CommandError, writing
from shiplap.errors.declaration import DeclarationError
from shiplap.errors.doctor import DoctorError
from shiplap.errors.judge import JudgeError
from shiplap.errors.kernel import KernelError
from shiplap.errors.launch import LaunchError
from shiplap.errors.library import LibraryError
from shiplap.errors.rewrite import RewriteError
from shiplap.errors.shipping import ShippingError

__all__ = [
    "CATALOGUE",
    "ArgumentError",
    "AuditError",
    "CommandError",
    "DeclarationError",
    "DoctorError",
    "Entry",
    "JudgeError",
    "KernelError",
    "LaunchError",
    "LibraryError",
    "RewriteError",
    "ShiplapError",
    "ShiplapNotice",
    "ShippingError",
    "VerdictError",
    "error",
    "error_line",
    "first_line",
    "notice",
    "register",
    "short_error_line",
    "writing",
]
