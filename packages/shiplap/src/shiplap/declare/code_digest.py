"""The digest of code: of all that a walk from it finds, the same in every process that loaded the same code."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable

from shiplap.declare.code_parts import AnyValue
from shiplap.declare.code_walk import CodePart, walk_code

HEAD = sys.implementation.cache_tag or ""  # another Python compiles to other instructions


def code_digest(*roots: AnyValue) -> str:
    """The digest of functions and objects with all that they use: another one when they behave differently."""
    return digest_of_parts(walk_code(*roots))


def digest_of_parts(parts: Iterable[CodePart]) -> str:
    """The digest of the parts of a walk."""
    digest = hashlib.sha256(HEAD.encode())
    for part in parts:
        if part.kind != "constant":  # it is in the text of what holds it
            digest.update(f"{part.kind} {part.text}\n".encode())
    return digest.hexdigest()[:16]


def first_unfollowed(*roots: AnyValue) -> str:
    """The first thing that ``roots`` use and no walk can look into. Empty if there is none."""
    return next((str(part.value) for part in walk_code(*roots) if part.kind == "unfollowed"), "")
