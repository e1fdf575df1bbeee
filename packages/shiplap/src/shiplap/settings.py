"""All settings: environment variables read once each, listed by ``shiplap env``."""

from __future__ import annotations

import os
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from typing import Any


@cache
def _user_cache() -> str:
    """Return the path of Shiplap's folder in the platform's cache folder of the user."""
    from platformdirs import user_cache_path

    return str(user_cache_path("shiplap"))


@dataclass(frozen=True)
class Settings:
    """All settings of Shiplap. A field is the value of the environment variable ``SHIPLAP_<FIELD>``, or the default if
    the variable is unset. ``shiplap env`` prints what each of them means.
    """

    library_path: str = ""
    strict: bool = False
    native: bool = True
    background_build: bool = False
    cache_dir: str = field(default_factory=_user_cache)
    tuned: str = ""
    record: str = ""
    progress: bool = False
    replay: bool = True

    @staticmethod
    def variable(name: str) -> str:
        """Return the environment variable of the setting ``name``, such as ``SHIPLAP_STRICT`` for ``strict``."""
        return f"SHIPLAP_{name.upper()}"


# The texts that ``shiplap env`` prints.
_MEANING = {
    "library_path": "directory searched first for C ABI kernel libraries",
    "strict": "1: raise SL306 where no kernel exists, and SL607 or SL609 where a frozen table does not fit",
    "native": "0: C ABI kernels stay with the Python binding, also where a native binding is built",
    "background_build": "1: an op that is called often gets its native binding compiled by a process in the background",
    "cache_dir": "directory of native bindings and tuned choices, private to you",
    "tuned": "table of 'shiplap freeze': its choices are in force, nothing is measured",
    "progress": "1: say on stderr what a long compilation is at, also where stderr is no terminal",
    "replay": "0: eager calls of Triton templates are launched by Python, and not by C++ from their second time on",
    "record": "file to which the calls of declared ops are recorded, for 'shiplap tune --profile'",
}


def settings() -> Settings:
    """Return all settings, read from the environment at each call. An unset environment variable gives the default. A
    change in a running process has effect at the next call.
    """
    # Nothing is cached: the environment may change between two calls.
    values: dict[str, Any] = {each.name: _read(each) for each in fields(Settings)}
    return Settings(**{name: value for name, value in values.items() if value is not None})


def is_strict() -> bool:
    """Return whether the environment variable ``SHIPLAP_STRICT`` is set to a value other than 0 and ``false``. Each
    call of a reference reads it, so it is read without the other settings.
    """
    return bool(read_setting("strict"))


def read_setting(name: str) -> Any:
    """Return the setting ``name`` alone, read from its environment variable. If the variable is unset, return the
    default. This takes a small part of the time of :func:`settings`.
    """
    each = _FIELDS[name]
    value = _read(each)
    if value is not None:
        return value
    return each.default if each.default_factory is MISSING else each.default_factory()


def _read(setting: Field[Any]) -> Any:
    """Return the value of a setting from its environment variable, as a bool or a string. Return None if the variable
    is unset, or if the value of a setting that is no bool is empty.
    """
    raw = os.environ.get(Settings.variable(setting.name))
    if raw is None:
        return None
    if setting.type == "bool":
        return raw.strip().lower() not in ("", "0", "false")
    return raw if raw.strip() else None  # an empty path is not the current folder


_FIELDS: dict[str, Field[Any]] = {each.name: each for each in fields(Settings)}


def describe() -> list[tuple[str, str, str]]:
    """Return ``(environment variable, current value as a string, meaning)`` for each setting, in declared order."""
    current = settings()
    return [(Settings.variable(f.name), str(getattr(current, f.name)), _MEANING[f.name]) for f in fields(Settings)]
