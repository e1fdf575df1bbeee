"""FlexGEMM's functions on shiplap: with ``import shiplap_sparse3d.flexgemm as flex_gemm`` its callers run here.

Shapes are ``(batches, channels, W, H, D)`` and weights ``[Co, Kw, Kh, Kd, Ci]``, as there; docs/flexgemm.md lists what
differs. There are no process globals: the algorithm is an argument.
"""

from shiplap_sparse3d.flexgemm import ops

__all__ = ["ops"]
