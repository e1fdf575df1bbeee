"""Findings and measurements as text, JSON and one self-contained HTML file. The room takes plain values and imports no
op.
"""

from shiplap.render.facts import facts
from shiplap.render.findings import exit_code, findings_html, findings_json, print_costs, print_findings
from shiplap.render.html import render_html
from shiplap.render.statement import write_statement

__all__ = [
    "exit_code",
    "facts",
    "findings_html",
    "findings_json",
    "print_costs",
    "print_findings",
    "render_html",
    "write_statement",
]
