"""Linear layers with (2N-2):2N weights and 8-bit products. Formats, limits and usage: docs/slidesparse.md."""

from shiplap_slidesparse import cpu, cuda, lt, samples
from shiplap_slidesparse.convert import Conversion, convert
from shiplap_slidesparse.formats import Pattern, prune
from shiplap_slidesparse.linear import Linear
from shiplap_slidesparse.lt import kernels
from shiplap_slidesparse.packed import MODES, Packed, matmul, pack
from shiplap_slidesparse.parallel import shard
from shiplap_slidesparse.tuning import prepare, tune

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

_ATTACHED = (cpu, cuda, kernels, lt, samples)
"""Importing these gives the ops their kernels, and says how arguments are drawn for them."""
