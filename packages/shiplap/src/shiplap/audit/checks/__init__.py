"""The checks, one file each. ``CHECKS`` is the order in which an audit runs them: what others build on first.

An error that the call itself raises is reported by the first check that meets it, so plain calls come first.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from shiplap.errors import error

if TYPE_CHECKING:
    from shiplap.audit.check import Check

__all__ = ["CHECKS", "ON_REQUEST", "load"]

CHECKS = (
    "bound",
    "numerics",
    "edges",
    "special",
    "sizes",
    "kernels",
    "determinism",
    "schema",
    "arguments",
    "fake",
    "fresh",
    "addresses",
    "aliases",
    "workspace",
    "process",
    "threads",
    "autocast",
    "requires_grad",
    "gradient",
    "backward",
    "transforms",
    "large",
    "opcheck",
    "compile",
    "stateless",
    "c_abi",
    "cuda_graph",
    "cudagraph_trees",
)
# Not part of an audit unless asked for: each runs the samples again in a process of its own, a minute per tool.
ON_REQUEST = ("sanitizer", "sanitizer:memcheck", "sanitizer:racecheck", "sanitizer:initcheck", "sanitizer:synccheck")


@cache
def load(name: str) -> Check:
    """The check of this name; SL503 if there is none."""
    if name not in (*CHECKS, *ON_REQUEST):
        raise error("SL503", where="audit(checks=...)", got=name, expected=", ".join((*CHECKS, *ON_REQUEST)))
    module, _, variant = name.partition(":")
    check: Check = getattr(import_module(f"shiplap.audit.checks.{module}"), variant.upper() or "CHECK")
    return check
