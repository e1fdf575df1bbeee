"""Many small linear layers of one shape, each with its own input: one ``baddbmm``, where that pays."""

from shiplap.rewrite.group import StackedLinears

__all__ = ["batch_linear"]

batch_linear = StackedLinears()
