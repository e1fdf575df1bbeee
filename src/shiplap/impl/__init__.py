"""Bind: kernels that are not Python functions, C ABI libraries first."""

from shiplap.impl import direct  # Triton templates as kernels of their own
from shiplap.impl.cabi import CAbi, cabi
from shiplap.impl.header import header
from shiplap.impl.triton import Launcher, triton_launcher

__all__ = ["CAbi", "Launcher", "cabi", "direct", "header", "triton_launcher"]
