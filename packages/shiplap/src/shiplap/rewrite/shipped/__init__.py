"""The rewrites that ship, one file each. Those that need the kernels of a family lie in that family."""

from shiplap.rewrite.shipped.attention import attention
from shiplap.rewrite.shipped.attention_mask import attention_mask
from shiplap.rewrite.shipped.batch_linear import batch_linear
from shiplap.rewrite.shipped.conv_norm import conv_norm
from shiplap.rewrite.shipped.no_ops import no_ops
from shiplap.rewrite.shipped.rms_norm import rms_norm
from shiplap.rewrite.shipped.rotary import rotary
from shiplap.rewrite.shipped.shared_input import shared_input_linears

__all__ = [
    "attention",
    "attention_mask",
    "batch_linear",
    "conv_norm",
    "everything",
    "no_ops",
    "rms_norm",
    "rotary",
    "shared_input_linears",
]

everything = (no_ops, *attention, attention_mask, rms_norm, rotary, shared_input_linears, batch_linear, conv_norm)
"""What ``backend="shiplap"`` and ``shiplap rewrite`` put into force, in the order in which it is tried."""
