"""The parameter list of a drafted function: which defaults Python allows, and where the star stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from shiplap.scaffold.schema import SchemaField
from shiplap.scaffold.signature import DraftParameter

NO_LITERAL = "..."  # a default that has no source
P = TypeVar("P", bound=DraftParameter | SchemaField)


def names_with_default(parameters: Sequence[DraftParameter] | Sequence[SchemaField]) -> set[str]:
    """Return the names of the arguments that can keep their default in a drafted signature. Python admits a default
    only behind the last positional argument without one. The default must also be a literal.
    """
    positional = [p for p in parameters if not p.keyword_only]
    keep = len(positional)
    while keep and positional[keep - 1].default not in (None, NO_LITERAL):
        keep -= 1
    named = {p.name for p in positional[keep:]} | {p.name for p in parameters if p.keyword_only}
    return named - {p.name for p in parameters if p.default == NO_LITERAL}


def with_star(parameters: Sequence[P]) -> list[P | None]:
    """Return the parameters as a list, with None inserted before the first keyword-only one. Python's signature has
    ``*`` there.
    """
    listed: list[P | None] = [*parameters]
    first = next((i for i, p in enumerate(parameters) if p.keyword_only), None)
    if first is not None:
        listed.insert(first, None)
    return listed
