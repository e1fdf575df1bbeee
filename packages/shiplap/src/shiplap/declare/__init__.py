"""An annotated function becomes a frozen ``OpSpec``. Kernels, templates and gradients are attached to it as data."""

from shiplap.declare.kernel import Implementation, Kernel
from shiplap.declare.spec import Arg, Dim, OpSpec, Output, TensorType

__all__ = ["Arg", "Dim", "Implementation", "Kernel", "OpSpec", "Output", "TensorType"]
