"""The JSON that this package reads, as msgspec types. The module is imported where JSON is read, which most programs do
not.
"""

from __future__ import annotations

import msgspec


class StoredValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The stored value of a choice. Its fields have the meaning of the fields of :class:`Choice` with the same
    names.
    """

    kernel: str
    config: dict[str, bool | int | float | str]
    time: float
    runner_up: str
    runner_up_time: float
    default_time: float
    reason: str
    findings: list[dict[str, str]]
    tried: int
    sizes: str
    unverified: str = ""
