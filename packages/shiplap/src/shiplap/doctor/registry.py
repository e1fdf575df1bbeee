"""Torch's own catalogue of graph breaks, which ships inside torch: id → type, explanation, hints."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache

from shiplap import torch_private


@dataclass(frozen=True)
class RegistryEntry:
    """One kind of graph break in torch's catalogue of graph breaks, in its newest wording.

    Its texts are templates. Torch fills in their ``{fields}`` when it raises the error.
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
    """Return all entries of torch's catalogue of graph breaks by id. Return an empty dict if this version of torch
    ships none.
    """
    path = torch_private.graph_break_registry()
    if path is None:
        return {}
    return {id: _parse_entry(id, versions[0]) for id, versions in json.loads(path.read_text(encoding="utf-8")).items()}


def _parse_entry(id: str, row: dict[str, object]) -> RegistryEntry:
    """Return the entry with the id ``id`` of torch's catalogue of graph breaks, made from ``row``, its fields in the
    JSON file.
    """
    hints = row.get("Hints")
    texts = tuple(map(str, hints)) if isinstance(hints, list) else ()
    return RegistryEntry(id, str(row.get("Gb_type", "")), str(row.get("Explanation", "")), texts)


def entry_by_id(id: str) -> RegistryEntry | None:
    """Return the entry of torch's catalogue of graph breaks with the id ``id``, in any case of letters. Return None if
    there is none.
    """
    return registry_entries().get(id.upper())


@cache
def _type_patterns() -> tuple[tuple[re.Pattern[str], RegistryEntry], ...]:
    """Return ``(pattern, entry)`` of all entries in torch's catalogue of graph breaks. An entry with a longer ``type``
    comes first.

    The pattern matches the entry's ``type``, which is the first line of a message.
    """
    # Longest first: a short type may be the start of a longer one.
    rows = sorted(registry_entries().values(), key=lambda e: -len(e.type))
    return tuple((re.compile(re.sub(r"\\\{.*?\\\}", ".+", re.escape(e.type)) + "$"), e) for e in rows)


def entry_by_type(text: str) -> RegistryEntry | None:
    """Return the entry of torch's catalogue of graph breaks whose ``type`` matches ``text``, the first line of a
    message without an id. Return None if there is none. Types may have ``{fields}``, which match any text.
    """
    return next((entry for pattern, entry in _type_patterns() if pattern.match(text)), None)
