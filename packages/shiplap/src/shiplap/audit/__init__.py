"""Prove: ``audit(op)`` runs one check after another on generated samples, and returns a ``Report``."""

from shiplap.audit.checks import CHECKS, ON_REQUEST
from shiplap.audit.cost import CostCard, measure_cost
from shiplap.audit.engine import DEFAULT_BUDGET_SECONDS, audit, measure_cost_isolated
from shiplap.audit.report import Report
from shiplap.audit.target import find
from shiplap.sampling.case import SampleCase
from shiplap.sampling.finding import Finding
from shiplap.sampling.samples import Samples, sample

__all__ = [
    "CHECKS",
    "DEFAULT_BUDGET_SECONDS",
    "ON_REQUEST",
    "CostCard",
    "Finding",
    "Report",
    "SampleCase",
    "Samples",
    "audit",
    "find",
    "measure_cost",
    "measure_cost_isolated",
    "sample",
]
