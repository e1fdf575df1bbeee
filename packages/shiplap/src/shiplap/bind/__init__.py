"""Bind: kernels that are not Python functions, C ABI libraries first.

Names are loaded when they are first used: a program loads what the kinds of kernels need that it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shiplap.deferred import names

if TYPE_CHECKING:
    from shiplap.bind.late import LateErrors
    from shiplap.bind.launched import compile_ahead
    from shiplap.bind.launches import TritonLaunches, late_launches, launch_program
    from shiplap.bind.triton import Launcher, triton_launcher

__all__ = [
    "LateErrors",
    "Launcher",
    "TritonLaunches",
    "compile_ahead",
    "late_launches",
    "launch_program",
    "triton_launcher",
]

_LATE = {
    "LateErrors": "shiplap.bind.late",
    "Launcher": "shiplap.bind.triton",
    "TritonLaunches": "shiplap.bind.launches",
    "compile_ahead": "shiplap.bind.launched",
    "late_launches": "shiplap.bind.launches",
    "launch_program": "shiplap.bind.launches",
    "triton_launcher": "shiplap.bind.triton",
}

__getattr__ = names(__name__, _LATE)
