"""All settings: environment variables read once each, listed by ``shiplap env``."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Settings", "describe", "settings"]


@dataclass(frozen=True)
class Settings:
    """At most eight. Defaults are the values in force when the variable is unset."""

    library_path: str = ""
    strict: bool = False

    @staticmethod
    def variable(field: str) -> str:
        return f"SHIPLAP_{field.upper()}"


_MEANING = {
    "library_path": "directory searched first for C ABI kernel libraries",
    "strict": "1: raise SL306 instead of running the reference where no kernel exists",
}


def settings() -> Settings:
    """Read the environment now: cheap, and a test or notebook that sets a variable is believed."""
    values: dict[str, Any] = {}
    for field in fields(Settings):
        raw = os.environ.get(Settings.variable(field.name))
        if raw is not None:
            values[field.name] = raw not in ("", "0", "false") if field.type == "bool" else raw
    return Settings(**values)


def describe() -> list[tuple[str, str, str]]:
    """``(variable, value in force, meaning)`` for each setting."""
    current = settings()
    return [(Settings.variable(f.name), str(getattr(current, f.name)), _MEANING[f.name]) for f in fields(Settings)]
