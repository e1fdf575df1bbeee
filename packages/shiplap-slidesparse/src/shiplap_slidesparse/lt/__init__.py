"""Products on NVIDIA GPUs by cuBLASLt and cuSPARSELt. Importing this opens no library and asks no device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shiplap_slidesparse.lt import kernels
from shiplap_slidesparse.lt.libraries import available, takes
from shiplap_slidesparse.lt.prepare import prepare
from shiplap_slidesparse.lt.weights import compress, expand, product, scaled_product

if TYPE_CHECKING:
    from shiplap_slidesparse.lt.native import versions
    from shiplap_slidesparse.lt.tuning import tune, tune_layer

__all__ = [
    "available",
    "compress",
    "expand",
    "kernels",  # importing it attaches them to the ops
    "prepare",
    "product",
    "scaled_product",
    "takes",
    "tune",
    "tune_layer",
    "versions",
]


def __getattr__(name: str) -> Any:
    if name in ("tune", "tune_layer"):
        from shiplap_slidesparse.lt import tuning

        return getattr(tuning, name)
    if name == "versions":
        from shiplap_slidesparse.lt import native

        return native.versions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
