"""The digest of code and of all that it uses. It is equal in every process that loaded the same code."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable

from shiplap.declare.code_parts import AnyValue
from shiplap.declare.code_walk import CodePart, walk_code

HEAD = sys.implementation.cache_tag or ""  # another Python compiles to other instructions


def code_digest(*roots: AnyValue) -> str:
    """Return a digest of functions and objects together with all code that they use, as 16 hexadecimal digits.

    A change of the code's behaviour changes the digest.
    """
    return digest_of_parts(walk_code(*roots))


def digest_of_parts(parts: Iterable[CodePart]) -> str:
    """Return a digest of the parts that :func:`walk_code` found, in their order, as 16 hexadecimal digits. Constants
    are left out, because the code that holds them contains their text.
    """
    digest = hashlib.sha256(HEAD.encode())
    for part in parts:
        if part.kind != "constant":  # it is in the text of what holds it
            digest.update(f"{part.kind} {part.text}\n".encode())
    return digest.hexdigest()[:16]


def first_unfollowed(*roots: AnyValue) -> str:
    """Return the reason why :func:`walk_code` cannot read some of the code that ``roots`` use, such as ``eval`` or
    ``import table``. If there are several, return the first that was found. Return an empty string if all code can be
    read.
    """
    return next((str(part.value) for part in walk_code(*roots) if part.kind == "unfollowed"), "")
