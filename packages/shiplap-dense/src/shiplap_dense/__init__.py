"""Dense products and convolutions as templates, into which the surrounding operations are fused.

``matmul`` (2-D and batched, bias), ``matmul_int8`` (weights of 8 bits), ``grouped_matmul`` (mixture of experts) and
``conv2d`` (channels last). ``linear_cross_entropy`` is the loss of a linear layer without its logits.
"""

from shiplap_dense import cpu, cuda  # templates attach to the ops
from shiplap_dense.functional import conv2d, grouped_matmul, linear_cross_entropy, matmul, matmul_int8

__all__ = ["conv2d", "cpu", "cuda", "grouped_matmul", "linear_cross_entropy", "matmul", "matmul_int8"]
