"""Query, key and value, or gate and up, of one input: one wide product, where that pays."""

from shiplap.rewrite.group import WideLinears

shared_input_linears = WideLinears()
