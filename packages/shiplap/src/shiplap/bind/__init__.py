"""Bind: kernels that are not Python functions, C ABI libraries first."""

from shiplap.bind import direct  # Triton templates as kernels of their own
from shiplap.bind.cabi import CAbi, cabi
from shiplap.bind.header import header
from shiplap.bind.triton import Launcher, triton_launcher

__all__ = ["CAbi", "Launcher", "cabi", "direct", "header", "triton_launcher"]
