"""``Finding`` under the name that the checks import. The class is in ``shiplap.sampling``, since tuning has findings as
well.
"""

from shiplap.sampling.finding import Finding, Verdict

__all__ = ["Finding", "Verdict"]
