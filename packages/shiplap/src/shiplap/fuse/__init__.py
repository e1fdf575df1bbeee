"""Fuse: templates of declared ops lowered through Inductor, with their neighbours inside; every choice verified."""

from shiplap.fuse.decide import Decision, decisions
from shiplap.fuse.explanation import Explanation, explain
from shiplap.fuse.switch import switches
from shiplap.op import digest

__all__ = ["Decision", "Explanation", "decisions", "explain", "switches"]

digest.refresh()  # modules of this room add to the digest, and it is loaded after ops have been declared
