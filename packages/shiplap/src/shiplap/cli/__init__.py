"""``shiplap``: one verb a file. Verbs import torch only when they run."""

from shiplap.cli.app import app, main

__all__ = ["app", "main"]
