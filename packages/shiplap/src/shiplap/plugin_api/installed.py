"""The installed families, found through entry points. ``families()`` imports none of them, ``load_families()`` all."""

from shiplap.cli.families import Family, families, load_families

__all__ = ["Family", "families", "load_families"]
