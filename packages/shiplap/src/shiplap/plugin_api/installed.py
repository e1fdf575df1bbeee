"""The families that are installed, found through entry points: ``families()`` imports none, ``load_families()`` all."""

from shiplap.cli.families import Family, families, load_families

__all__ = ["Family", "families", "load_families"]
