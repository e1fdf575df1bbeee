"""Torch's own catalogue of graph breaks, which ships inside torch: id → type, explanation, hints."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache

from shiplap import torch_private


@dataclass(frozen=True)
class RegistryEntry:
    """The newest wording of one entry. Texts are templates whose ``{fields}`` are filled in where torch raises the
    error.
    """

    id: str
    type: str
    explanation: str
    hints: tuple[str, ...]

    @property
    def url(self) -> str:
        """The address of torch's web page about this kind of graph break."""
        return f"https://meta-pytorch.github.io/compile-graph-break-site/gb/{self.id.lower()}.html"


@cache
def registry_entries() -> dict[str, RegistryEntry]:
    """Return all entries of torch's catalogue of graph breaks by id. Empty if this version of torch ships none."""
    path = torch_private.graph_break_registry()
    if path is None:
        return {}
    return {id: _parse_entry(id, versions[0]) for id, versions in json.loads(path.read_text(encoding="utf-8")).items()}


def _parse_entry(id: str, row: dict[str, object]) -> RegistryEntry:
    """Return a catalogue entry from its row in the JSON file."""
    hints = row.get("Hints")
    texts = tuple(map(str, hints)) if isinstance(hints, list) else ()
    return RegistryEntry(id, str(row.get("Gb_type", "")), str(row.get("Explanation", "")), texts)


def entry_by_id(id: str) -> RegistryEntry | None:
    """Return the catalogue entry with an id, in any case of letters, or None."""
    return registry_entries().get(id.upper())


@cache
def _type_patterns() -> tuple[tuple[re.Pattern[str], RegistryEntry], ...]:
    """Return ``(pattern of the entry's type, entry)`` of all catalogue entries, the longest type first."""
    # Longest first: a short type may be the start of a longer one.
    rows = sorted(registry_entries().values(), key=lambda e: -len(e.type))
    return tuple((re.compile(re.sub(r"\\\{.*?\\\}", ".+", re.escape(e.type)) + "$"), e) for e in rows)


def entry_by_type(text: str) -> RegistryEntry | None:
    """Return the catalogue entry whose type matches the first line of a message without an id, or None. Types may have
    ``{fields}``.
    """
    return next((entry for pattern, entry in _type_patterns() if pattern.match(text)), None)
