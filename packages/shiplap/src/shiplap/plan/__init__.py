"""The plan of a call: the checks of its arguments, as steps that are printed as Python and as C++."""

from shiplap.plan.call_plan import CallPlan
from shiplap.plan.expression import Term, Text
from shiplap.plan.rule import Rule

__all__ = ["CallPlan", "Rule", "Term", "Text"]
