"""Findings, verdicts and measurements as text, JSON and one self-contained HTML file. Takes plain values, no op."""
