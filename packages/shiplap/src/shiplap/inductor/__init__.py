"""Fuse: Inductor lowers templates of declared ops and fuses neighbours into them. Every choice is verified."""

from shiplap.inductor.explanation import Explanation, explain
from shiplap.inductor.fusion_choice import FusionChoice, fusion_choices
from shiplap.inductor.toggles import switches

__all__ = ["Explanation", "FusionChoice", "explain", "fusion_choices", "switches"]
