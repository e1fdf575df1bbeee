"""The plan of a call: what a declaration asks of arguments, as steps that print themselves as Python and as C++."""

from shiplap.plan.call_plan import CallPlan
from shiplap.plan.expression import Term, Text
from shiplap.plan.rule import Rule

__all__ = ["CallPlan", "Rule", "Term", "Text"]
