"""FlexGEMM's functions on shiplap: with ``import shiplap_sparse3d.flexgemm as flex_gemm`` its callers run here.

Shapes are ``(batches, channels, W, H, D)`` and weights ``[Co, Kw, Kh, Kd, Ci]``, as there; docs/flexgemm.md lists what
differs. Settings of the process are accepted and change nothing: the algorithm is an argument.
"""

from shiplap_sparse3d.flexgemm import ops
from shiplap_sparse3d.flexgemm.ops.grid_sample import grid_sample_3d
from shiplap_sparse3d.flexgemm.ops.spconv import sparse_conv3d, sparse_submanifold_conv3d

__all__ = ["grid_sample_3d", "ops", "sparse_conv3d", "sparse_submanifold_conv3d"]
