"""The console script, in a package of its own: ``import shiplap`` imports torch, which ``--version`` does not need."""

from __future__ import annotations

import sys

__all__: list[str] = []


def main() -> None:
    """Run the command line of Shiplap. ``shiplap --version`` alone reads the metadata of the distribution."""
    if sys.argv[1:] == ["--version"]:
        from importlib.metadata import version

        print(f"shiplap {version('shiplap')}")
        return
    from shiplap.cli.app import main as run

    run()
