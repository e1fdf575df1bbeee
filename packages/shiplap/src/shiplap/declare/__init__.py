"""Declare: an annotated function becomes a frozen ``OpSpec``; kernels, templates and gradients attach to it as data."""

from shiplap.declare.kernel import Implementation, Kernel
from shiplap.declare.spec import Arg, Dim, OpSpec, Output, TensorType

__all__ = ["Arg", "Dim", "Implementation", "Kernel", "OpSpec", "Output", "TensorType"]
