"""Declare: an annotated function becomes a frozen ``OpSpec`` and a registered torch op."""

from shiplap.op.op import AdoptedOp, Op, adopt, op
from shiplap.op.spec import Arg, Dim, OpSpec, Output, TensorType

__all__ = ["AdoptedOp", "Arg", "Dim", "Op", "OpSpec", "Output", "TensorType", "adopt", "op"]
