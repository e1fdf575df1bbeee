"""Many small linear layers of one shape, each with its own input: one ``baddbmm``, where that pays."""

from shiplap.rewrite.group import StackedLinears

batch_linear = StackedLinears()
