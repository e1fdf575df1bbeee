"""The zoo: known-bad ops that a check must flag, and known-good ones on which every check must stay silent."""

from tests.zoo.specimen import Specimen

__all__ = ["Specimen"]
