"""Triton kernels and templates, specialised, launched and replayed without Triton's own launcher.

Names are loaded when they are first used, so that a program loads only the kinds of kernels that it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shiplap.lazy_imports import names

if TYPE_CHECKING:
    from shiplap.kernels.triton.async_errors import LateErrors
    from shiplap.kernels.triton.declaration import TritonLaunches, late_launches, launch_program
    from shiplap.kernels.triton.kernel import compile_ahead
    from shiplap.kernels.triton.launcher import Launcher, triton_launcher

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
    "LateErrors": "shiplap.kernels.triton.async_errors",
    "Launcher": "shiplap.kernels.triton.launcher",
    "TritonLaunches": "shiplap.kernels.triton.declaration",
    "compile_ahead": "shiplap.kernels.triton.kernel",
    "late_launches": "shiplap.kernels.triton.declaration",
    "launch_program": "shiplap.kernels.triton.declaration",
    "triton_launcher": "shiplap.kernels.triton.launcher",
}

__getattr__ = names(__name__, _LATE)
