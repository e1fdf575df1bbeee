"""Choose: candidates → verified → measured → stored choice; freeze."""

from shiplap.tune.candidate import Candidate, Refused
from shiplap.tune.choice import Choice
from shiplap.tune.choose import Options, choose
from shiplap.tune.inputs import recipe_of
from shiplap.tune.store import Store

__all__ = ["Candidate", "Choice", "Options", "Refused", "Store", "choose", "recipe_of"]
