"""Findings, verdicts and measurements as text, JSON and one self-contained HTML file. Takes plain values, no op."""

from typing import TYPE_CHECKING

from shiplap.lazy_imports import names
from shiplap.render.facts import facts  # now: the module has the name of its function

if TYPE_CHECKING:
    from shiplap.render.findings import findings_html, findings_json, print_costs, print_findings
    from shiplap.render.html import render_html
    from shiplap.render.lines import print_lines, value_json
    from shiplap.render.result import exit_status
    from shiplap.render.statement import write_statement

__all__ = [
    "exit_status",
    "facts",
    "findings_html",
    "findings_json",
    "print_costs",
    "print_findings",
    "print_lines",
    "render_html",
    "value_json",
    "write_statement",
]

__getattr__ = names(
    __name__,
    {
        **dict.fromkeys(("findings_html", "findings_json", "print_costs", "print_findings"), "shiplap.render.findings"),
        "exit_status": "shiplap.render.result",
        "render_html": "shiplap.render.html",
        **dict.fromkeys(("print_lines", "value_json"), "shiplap.render.lines"),
        "write_statement": "shiplap.render.statement",
    },
)
