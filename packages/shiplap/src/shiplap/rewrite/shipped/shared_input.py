"""Rewrite linear layers of one input (query, key and value, or gate and up) to one wide product, if that is faster."""

from shiplap.rewrite.group import WideLinears

shared_input_linears = WideLinears()
