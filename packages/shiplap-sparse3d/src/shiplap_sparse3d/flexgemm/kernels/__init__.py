"""``flex_gemm.kernels``: the functions under the operators, on any device."""

from shiplap_sparse3d.flexgemm.kernels import cuda, triton

__all__ = ["cuda", "triton"]
