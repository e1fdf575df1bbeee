"""The plan of a call: what a declaration asks of arguments, as steps that print themselves as Python and as C++."""

from shiplap.plan.call_plan import CallPlan
from shiplap.plan.expression import Expression, Text
from shiplap.plan.rule import ArgumentRule

__all__ = ["ArgumentRule", "CallPlan", "Expression", "Text"]
