"""Products on NVIDIA GPUs with cuBLASLt and cuSPARSELt. The import opens no library and uses no device."""

from shiplap_slidesparse.lt.libraries import available, takes
from shiplap_slidesparse.lt.native import versions
from shiplap_slidesparse.lt.prepare import prepare
from shiplap_slidesparse.lt.weights import compress, expand, product, scaled_product

__all__ = ["available", "compress", "expand", "prepare", "product", "scaled_product", "takes", "versions"]
