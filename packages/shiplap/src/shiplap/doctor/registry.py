"""Torch's own catalogue of graph breaks, which ships inside torch: id → type, explanation, hints."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache

from shiplap import torch_private


@dataclass(frozen=True)
class Registered:
    """The newest wording of one entry. Texts are templates whose ``{fields}`` are filled in where torch raises the
    error.
    """

    id: str
    type: str
    explanation: str
    hints: tuple[str, ...]

    @property
    def url(self) -> str:
        """The address of torch's page about this graph break."""
        return f"https://meta-pytorch.github.io/compile-graph-break-site/gb/{self.id.lower()}.html"


@cache
def entries() -> dict[str, Registered]:
    """Return every entry by id. The result is empty when this torch ships no catalogue. The doctor then reads the
    messages alone.
    """
    path = torch_private.graph_break_registry()
    if path is None:
        return {}
    return {id: _entry(id, versions[0]) for id, versions in json.loads(path.read_text(encoding="utf-8")).items()}


def _entry(id: str, row: dict[str, object]) -> Registered:
    """Return an entry from its row in the file."""
    hints = row.get("Hints")
    texts = tuple(map(str, hints)) if isinstance(hints, list) else ()
    return Registered(id, str(row.get("Gb_type", "")), str(row.get("Explanation", "")), texts)


def by_id(id: str) -> Registered | None:
    """Return the entry with an id, or None."""
    return entries().get(id.upper())


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Registered], ...]:
    """Return each entry with a regular expression of its type, the longest type first."""
    # Longest first: a short type may be the start of a longer one.
    rows = sorted(entries().values(), key=lambda e: -len(e.type))
    return tuple((re.compile(re.sub(r"\\\{.*?\\\}", ".+", re.escape(e.type)) + "$"), e) for e in rows)


def by_type(text: str) -> Registered | None:
    """Return the entry of a message's first line, for messages without an id, or None. Types may have ``{fields}``."""
    return next((entry for pattern, entry in _patterns() if pattern.match(text)), None)
