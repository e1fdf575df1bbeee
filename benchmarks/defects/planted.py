"""The defects of ``shiplap_testing.defects``, which were planted before, as cases of this benchmark.

They stay where the tests of the audit use them. Their ops are declared when they are asked for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import shiplap as sl
from shiplap_testing.defects import Defect, defects

from .registry import Kind


@dataclass(frozen=True)
class PlantedCase:
    """A planted defect: ``report`` is the group that it belongs to, seen, held out or later."""

    planted: Defect

    @property
    def name(self) -> str:
        return self.planted.name

    @property
    def report(self) -> str:
        return self.planted.half

    @property
    def defect(self) -> str:
        return self.planted.why

    def op(self, kind: Kind) -> sl.Op:
        return self.planted.make_bad() if kind == "broken" else self.planted.make_good()


def load_planted() -> dict[str, PlantedCase]:
    """Return the planted defects by name. Triton's interpreter runs those that are written in Triton."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    return {name: PlantedCase(defect) for name, defect in defects().items()}
