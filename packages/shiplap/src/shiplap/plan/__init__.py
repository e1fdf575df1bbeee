"""The plan of a call. It has the checks of its arguments, as steps that are printed as Python and as C++."""

from shiplap.plan.call_plan import CallPlan
from shiplap.plan.expression import Expression, Text
from shiplap.plan.rule import ArgumentRule

__all__ = ["ArgumentRule", "CallPlan", "Expression", "Text"]
