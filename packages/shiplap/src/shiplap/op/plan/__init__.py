"""The plan of a call: what a declaration asks of arguments, as steps that print themselves as Python and as C++."""

from shiplap.op.plan.call_plan import CallPlan
from shiplap.op.plan.rule import Rule
from shiplap.op.plan.term import Term, Text

__all__ = ["CallPlan", "Rule", "Term", "Text"]
