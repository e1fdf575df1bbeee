"""Torch's own catalogue of graph breaks, which ships inside torch: id → type, explanation, hints."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache

from shiplap import torch_private


@dataclass(frozen=True)
class Registered:
    """The newest wording of one entry. Texts are templates: ``{fields}`` are filled in where torch raises it."""

    id: str
    type: str
    explanation: str
    hints: tuple[str, ...]

    @property
    def url(self) -> str:
        return f"https://meta-pytorch.github.io/compile-graph-break-site/gb/{self.id.lower()}.html"


@cache
def entries() -> dict[str, Registered]:
    """Every entry by id. Empty when this torch ships none, and the doctor then goes by the messages alone."""
    path = torch_private.graph_break_registry()
    if path is None:
        return {}
    return {id: _entry(id, versions[0]) for id, versions in json.loads(path.read_text(encoding="utf-8")).items()}


def _entry(id: str, row: dict[str, object]) -> Registered:
    hints = row.get("Hints")
    texts = tuple(map(str, hints)) if isinstance(hints, list) else ()
    return Registered(id, str(row.get("Gb_type", "")), str(row.get("Explanation", "")), texts)


def by_id(id: str) -> Registered | None:
    return entries().get(id.upper())


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Registered], ...]:
    rows = sorted(entries().values(), key=lambda e: -len(e.type))
    return tuple((re.compile(re.sub(r"\\\{.*?\\\}", ".+", re.escape(e.type)) + "$"), e) for e in rows)


def by_type(text: str) -> Registered | None:
    """The entry of a message's first line, for messages without an id; types may have ``{fields}``."""
    return next((entry for pattern, entry in _patterns() if pattern.match(text)), None)
