"""The module ``spconv.tools``."""

from __future__ import annotations

from contextlib import nullcontext

from shiplap_sparse3d.spconv.timer import CUDAKernelTimer
from shiplap_sparse3d.spconv_package.cppconstants import CPU_ONLY_BUILD

__all__ = ["CPU_ONLY_BUILD", "CUDAKernelTimer", "nullcontext"]
