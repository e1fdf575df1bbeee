"""MkDocs hook: pages include recorded figures, and say when and where they were measured and whether that still holds.

A page takes figures from ``benchmarks/results/NAME.json`` by a template of Jinja: ``[[= demo.demo.iou | round(2) ]]``
and ``[[% for case in dense_gpu.cases ]]``. The delimiters are its own, since pages about templates have the usual ones.
A name is that of a record. A name that does not exist is an error of the build.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from jinja2 import Environment, StrictUndefined
from records import ROOT, Record, captioned, load_records

_TEMPLATES = Environment(
    block_start_string="[[%",
    block_end_string="]]",
    variable_start_string="[[=",
    variable_end_string="]]",
    comment_start_string="[[#",
    comment_end_string="]]",
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,
)
_records: list[Record] = []


@cache
def _results(root: Path) -> dict[str, Any]:
    """The content of every record, by name."""
    files = sorted((root / "benchmarks" / "results").glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def with_figures(markdown: str, root: Path = ROOT) -> str:
    """Return ``markdown`` with its templates of figures rendered."""
    if "[[=" not in markdown and "[[%" not in markdown:
        return markdown
    return _TEMPLATES.from_string(markdown).render(_results(root))


def on_pre_build(config: Any) -> None:
    """Look at the records once a build."""
    _results.cache_clear()
    _records[:] = load_records(ROOT)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Include the figures and add the lines below them."""
    return captioned(with_figures(markdown, ROOT), _records)
