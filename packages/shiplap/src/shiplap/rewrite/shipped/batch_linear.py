"""Rewrite many small linear layers of one shape, each with its own input, to one ``bmm``, if that is faster."""

from shiplap.rewrite.group import StackedLinears

batch_linear = StackedLinears()
