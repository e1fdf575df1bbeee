"""Products on NVIDIA GPUs with cuBLASLt and cuSPARSELt. The import opens no library and uses no device."""

from shiplap_slidesparse.lt.libraries import available, supports_product
from shiplap_slidesparse.lt.native import library_versions
from shiplap_slidesparse.lt.prepare import prepare_captures
from shiplap_slidesparse.lt.weights import compress_weight, expand_weight, multiply_weight, scaled_product

__all__ = [
    "available",
    "compress_weight",
    "expand_weight",
    "library_versions",
    "multiply_weight",
    "prepare_captures",
    "scaled_product",
    "supports_product",
]
