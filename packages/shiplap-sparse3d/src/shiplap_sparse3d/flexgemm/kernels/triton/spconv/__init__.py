"""``flex_gemm.kernels.triton.spconv``: the settings of the convolutions of FlexGEMM 1.x."""

from shiplap_sparse3d.flexgemm.kernels.triton.spconv import config

__all__ = ["config"]
