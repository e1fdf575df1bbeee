"""``Finding`` under the name that the checks import: tuning has findings too, and lies below the audit."""

from shiplap.referee.finding import Finding, Verdict

__all__ = ["Finding", "Verdict"]
