"""Bind: kernels that are not Python functions, C ABI libraries first."""

from shiplap.bind import direct  # Triton templates as kernels of their own
from shiplap.bind.cabi import CAbi, cabi
from shiplap.bind.header import header
from shiplap.bind.late import LateErrors
from shiplap.bind.launched import compile_ahead
from shiplap.bind.launches import TritonLaunches, late_launches, launch_program
from shiplap.bind.triton import Launcher, triton_launcher

__all__ = [
    "CAbi",
    "LateErrors",
    "Launcher",
    "TritonLaunches",
    "cabi",
    "compile_ahead",
    "direct",
    "header",
    "late_launches",
    "launch_program",
    "triton_launcher",
]
