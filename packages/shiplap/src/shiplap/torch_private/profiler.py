"""Configurations of torch's profiler that have no public name."""

from __future__ import annotations

from typing import Any

from torch._C._profiler import _ExperimentalConfig


def all_threads_config() -> Any:
    """Return the configuration that lists the operators of threads which existed before. None if torch has none.

    Known to work on torch 2.11 and 2.13.
    """
    try:
        return _ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        return None
