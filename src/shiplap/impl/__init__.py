"""Bind: kernels that are not Python functions, C ABI libraries first."""

from shiplap.impl.cabi import CAbi, cabi
from shiplap.impl.header import header
from shiplap.impl.triton import Launcher, triton_launcher

__all__ = ["CAbi", "Launcher", "cabi", "header", "triton_launcher"]
