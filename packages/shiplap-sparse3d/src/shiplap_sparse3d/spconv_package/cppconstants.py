"""``spconv.cppconstants``: how spconv was built."""

from __future__ import annotations

__all__ = ["BUILD_CUMM_VERSION", "COMPILED_CUDA_ARCHS", "CPU_ONLY_BUILD", "HAS_BOOST"]

CPU_ONLY_BUILD = False
HAS_BOOST = True  # rotated boxes are there
BUILD_CUMM_VERSION = ""
COMPILED_CUDA_ARCHS: set[tuple[int, int]] = set()
