"""Products on NVIDIA GPUs by cuBLASLt and cuSPARSELt. Importing this opens no library and asks no device."""

from shiplap_slidesparse.lt import kernels as _kernels  # noqa: F401  (attaches to the ops)
from shiplap_slidesparse.lt.libraries import available, takes
from shiplap_slidesparse.lt.prepare import prepare
from shiplap_slidesparse.lt.weights import compress, expand, product, scaled_product

__all__ = [
    "available",
    "compress",
    "expand",
    "prepare",
    "product",
    "scaled_product",
    "takes",
    "tune",
    "tune_layer",
    "versions",
]


def __getattr__(name: str):  # type: ignore[no-untyped-def]
    if name in ("tune", "tune_layer"):
        from shiplap_slidesparse.lt import tuning

        return getattr(tuning, name)
    if name == "versions":
        from shiplap_slidesparse.lt import native

        return native.versions
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
