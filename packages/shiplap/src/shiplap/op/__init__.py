"""Declare: an annotated function becomes a frozen ``OpSpec`` and a registered torch op."""

from shiplap.op.adopt import AdoptedOp, adopt
from shiplap.op.kernel import Implementation, Kernel
from shiplap.op.op import Op, op
from shiplap.op.spec import Arg, Dim, OpSpec, Output, TensorType

__all__ = [
    "AdoptedOp",
    "Arg",
    "Dim",
    "Implementation",
    "Kernel",
    "Op",
    "OpSpec",
    "Output",
    "TensorType",
    "adopt",
    "op",
]
