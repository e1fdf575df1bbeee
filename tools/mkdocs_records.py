"""MkDocs hook: below recorded figures, when and where they were measured, and whether that still holds."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from records import ROOT, Record, captioned, records

_records: list[Record] = []


def on_pre_build(config: Any) -> None:
    """Look at the records once a build."""
    _records[:] = records(ROOT)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Add the lines."""
    return captioned(markdown, _records)
