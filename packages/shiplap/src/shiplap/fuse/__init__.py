"""Fuse: Inductor lowers templates of declared ops and fuses neighbours into them. Every choice is verified."""

from shiplap.fuse.choice import FusionChoice, fusion_choices
from shiplap.fuse.explanation import Explanation, explain
from shiplap.fuse.switch import switches
from shiplap.op import digest

__all__ = ["Explanation", "FusionChoice", "explain", "fusion_choices", "switches"]

digest.refresh()  # modules of this room add to the digest, and it is loaded after ops have been declared
