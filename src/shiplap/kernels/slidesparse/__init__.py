"""Linear layers with (2N-2):2N weights and 8-bit products. Formats, limits and how to use it: docs/slidesparse.md."""

from shiplap.kernels.slidesparse import cpu as _cpu  # noqa: F401  (attaches to the ops)
from shiplap.kernels.slidesparse import cuda as _cuda  # noqa: F401  (attaches to the ops)
from shiplap.kernels.slidesparse import lt as _lt  # noqa: F401  (attaches to the ops)
from shiplap.kernels.slidesparse import samples as _samples  # noqa: F401  (attaches to the ops)
from shiplap.kernels.slidesparse.choosing import prepare, tune
from shiplap.kernels.slidesparse.convert import Conversion, convert
from shiplap.kernels.slidesparse.formats import Pattern, prune
from shiplap.kernels.slidesparse.linear import Linear
from shiplap.kernels.slidesparse.packed import MODES, Packed, matmul, pack
from shiplap.kernels.slidesparse.parallel import shard

__all__ = [
    "MODES",
    "Conversion",
    "Linear",
    "Packed",
    "Pattern",
    "convert",
    "matmul",
    "pack",
    "prepare",
    "prune",
    "shard",
    "tune",
]
