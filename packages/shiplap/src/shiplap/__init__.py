"""Shiplap: declare a kernel once, and it is a native, proven part of ``torch.compile``."""

from shiplap.audit import Finding, audit
from shiplap.bind import cabi
from shiplap.doctor import Diagnosis, doctor
from shiplap.errors import ShiplapError, ShiplapNotice
from shiplap.fuse import Explanation, explain  # also: the first trace of an op with templates registers their lowering
from shiplap.op import Op, OpSpec, adopt, op
from shiplap.rewrite import rewrite, rewrites
from shiplap.selection import freeze, tune

__version__ = "0.1.0"
__all__ = [
    "Diagnosis",
    "Explanation",
    "Finding",
    "Op",
    "OpSpec",
    "ShiplapError",
    "ShiplapNotice",
    "adopt",
    "audit",
    "cabi",
    "doctor",
    "explain",
    "freeze",
    "op",
    "rewrite",
    "rewrites",
    "tune",
]
