"""A passport as one self-contained page. Takes the plain values of its JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shiplap.report.findings import in_ns
from shiplap.report.html import render_html

__all__ = ["passport_html"]

CARD = ("raw_ns", "eager_ns", "compiled_ns", "captured_ns")


def passport_html(passport: Mapping[str, Any]) -> str:
    """One page that needs nothing else; everything in it is escaped."""
    about = {
        "date": passport["date"],
        "seed": passport["seed"],
        "seal": passport["seal"][:16],
        **{f"device {k}": v for k, v in passport["device"].items()},
        **passport["versions"],
    }
    cost = passport["cost"]
    return render_html(
        "passport.html.jinja",
        title=f"Passport of {passport['op']}",
        facts=about,
        passport=passport,
        declaration={k: _shown(v) for k, v in passport["declaration"].items()},
        cost=cost,
        times=[in_ns(cost[name]) for name in CARD] if cost else [],
    )


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return value if isinstance(value, str) else json.dumps(value)
