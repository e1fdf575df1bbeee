"""FlexGEMM's functions on shiplap: with ``import shiplap_sparse3d.flexgemm as flex_gemm`` its callers run here.

Both forms of FlexGEMM are here. Functions of 2.0 stand at the top, in ``ops`` and in ``nn``: shapes are ``(batches,
W, H, D, channels)``. Those of 1.x stand in ``ops.spconv``, ``ops.grid_sample`` and ``ops.serialize``: shapes are
``(batches, channels, W, H, D)``. Weights are ``[Co, Kw, Kh, Kd, Ci]`` in both. docs/flexgemm.md lists what differs.
"""

from shiplap_sparse3d.flexgemm import config, kernels, nn, ops
from shiplap_sparse3d.flexgemm.ops import *
from shiplap_sparse3d.flexgemm.ops.grid_sample import grid_sample_3d
from shiplap_sparse3d.flexgemm.ops.spconv import sparse_submanifold_conv3d

__all__ = ["config", "grid_sample_3d", "kernels", "nn", "ops", "sparse_submanifold_conv3d"]
__all__ += ops.__all__
