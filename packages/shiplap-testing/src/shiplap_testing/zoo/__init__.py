"""The zoo: known-bad ops that a check must flag, and known-good ones on which every check must stay silent."""

from shiplap_testing.zoo.specimen import Specimen

__all__ = ["Specimen"]
