"""Rewrites put kernels into unmodified models. They report each place, and the reason for each near miss."""

from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.graph import place_replacement
from shiplap.rewrite.guard import Guard
from shiplap.rewrite.match import Level, Match, NearMiss, Saving
from shiplap.rewrite.pattern import PatternRewrite, rewrite
from shiplap.rewrite.program import Program
from shiplap.rewrite.prove import prove_rewrite
from shiplap.rewrite.scope import Rewrites, rewrites

__all__ = [
    "Guard",
    "Level",
    "Match",
    "NearMiss",
    "PatternRewrite",
    "Program",
    "Rewrite",
    "Rewrites",
    "Saving",
    "place_replacement",
    "prove_rewrite",
    "rewrite",
    "rewrites",
]
