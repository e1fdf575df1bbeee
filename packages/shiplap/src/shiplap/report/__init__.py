"""Show: findings and measurements as text, JSON and one self-contained HTML file. Takes plain values, imports no op."""

from shiplap.report.facts import facts
from shiplap.report.findings import exit_code, findings_html, findings_json, print_costs, print_findings
from shiplap.report.html import render_html
from shiplap.report.passport import passport_html

__all__ = [
    "exit_code",
    "facts",
    "findings_html",
    "findings_json",
    "passport_html",
    "print_costs",
    "print_findings",
    "render_html",
]
