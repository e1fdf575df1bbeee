"""The checks, one file each: a module in this folder that defines ``CHECK`` is part of every audit.

``CHECKS`` has their names in the order in which an audit runs them (``Check.order``). A check that explains the
findings of later ones comes first. An error that the call itself raises is reported by the first check that meets it,
so plain calls come before all else.
"""

from __future__ import annotations

import pkgutil
from difflib import get_close_matches
from importlib import import_module

from shiplap.audit.check import Check
from shiplap.errors import error

__all__ = ["CHECKS", "ON_REQUEST", "load_check"]


def _find_checks() -> dict[str, Check]:
    """Return a dict from the name of each check to the check that a module in this folder defines. The checks are in
    the order in which an audit runs them.
    """
    # A new file is a new check, without a list to edit.
    checks = [import_module(f"{__name__}.{module.name}").CHECK for module in pkgutil.iter_modules(__path__)]
    return {check.name: check for check in sorted(checks, key=lambda check: (check.order, check.name))}


_CHECKS_BY_NAME = _find_checks()
# A check of order 0 runs on request only.
CHECKS = tuple(name for name, check in _CHECKS_BY_NAME.items() if check.order)
# Not part of an audit unless asked for: each runs the samples again in a process of its own, a minute per tool.
ON_REQUEST = ("sanitizer", "sanitizer:memcheck", "sanitizer:racecheck", "sanitizer:initcheck", "sanitizer:synccheck")


def load_check(name: str) -> Check:
    """Return the check called ``name``. Raise ``SL503`` if there is none. The error suggests the most similar name."""
    if name in _CHECKS_BY_NAME:
        return _CHECKS_BY_NAME[name]
    if name not in ON_REQUEST:
        known = (*CHECKS, *ON_REQUEST)
        meant = "".join(f"did you mean {near!r}? One of " for near in get_close_matches(name, known, n=1))
        raise error("SL503", where="audit(checks=...)", got=name, expected=meant + ", ".join(known))
    # A module may define a check for each of several tools, as in sanitizer:memcheck.
    module, _, variant = name.partition(":")
    check: Check = vars(import_module(f"{__name__}.{module}"))[variant.upper()]
    return check
