"""Bind: kernels that are not Python functions, C ABI libraries first."""

from shiplap.impl.cabi import CAbi, cabi
from shiplap.impl.header import header

__all__ = ["CAbi", "cabi", "header"]
