"""The releases of torch that ``nox -s matrix`` runs, and the table of capabilities that these runs write.

``verified.json`` beside this file has a row for each release that a run was made on: torch, Python, the date, and the
capabilities (``shiplap.torch_private.CAPABILITIES``) whose tests passed. Only such a run writes it: a release that is
listed here is not verified before a run has written its row.
Only Python's own library is imported, since ``noxfile.py`` reads this file in an environment without torch.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

RELEASES = (
    "2.11.0",
    "2.13.0",
    "2.15.0",
)
ALSO = ("2.12.1", "2.14.1")  # releases that ``nox -s core`` runs on, too
TABLE = Path(__file__).with_name("verified.json")


def minor_version(version: str) -> str:
    """Return the major and minor number of a version, such as ``"2.13"`` for ``"2.13.0+cpu"``."""
    return ".".join(version.split(".")[:2])


@cache
def read_table() -> dict[str, Any]:
    """Return the table of capabilities (uses of private torch). It maps each minor version of torch, such as
    ``"2.13"``, to a row, in which ``verified`` lists the capabilities that a run has verified.
    """
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


@cache
def verified_on(version: str) -> frozenset[str]:
    """Return the names of the capabilities (uses of private torch) that a run on this version of torch has verified.

    The set is empty for a version that is not in the table.
    """
    return frozenset(read_table().get(minor_version(version), {}).get("verified", ()))
