"""MkDocs hook: the design notes enter the navigation by existing, in the order of their numbers."""

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Fill the section of design notes of ``nav`` with ``docs/design/*.md``."""
    docs = Path(config["docs_dir"])
    notes = sorted(note.relative_to(docs).as_posix() for note in (docs / "design").glob("*.md"))
    if notes:
        config["nav"] = [*config["nav"], {"Design notes": notes}]
    return config
