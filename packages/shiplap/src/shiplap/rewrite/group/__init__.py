"""Merge independent calls of one kind into one call."""

from shiplap.rewrite.group.base import GroupRewrite
from shiplap.rewrite.group.cost import MACHINES, Machine, MergePrice
from shiplap.rewrite.group.linear import StackedLinears, WideLinears
from shiplap.rewrite.group.norm import StackedNorms
from shiplap.rewrite.group.op import JoinedCalls
from shiplap.rewrite.group.pointwise import StackedChains

__all__ = [
    "MACHINES",
    "GroupRewrite",
    "JoinedCalls",
    "Machine",
    "MergePrice",
    "StackedChains",
    "StackedLinears",
    "StackedNorms",
    "WideLinears",
]
