"""Show: findings and measurements as text, JSON and one self-contained HTML file. Takes plain values, imports no op."""

from shiplap.report.facts import facts
from shiplap.report.findings import exit_code, findings_html, findings_json, print_costs, print_findings
from shiplap.report.html import render_html
from shiplap.report.statement import write_statement

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
