"""Prove: ``audit(op)`` runs one check after another on generated samples, and returns a ``Report``."""

from shiplap.audit.checks import CHECKS, ON_REQUEST
from shiplap.audit.cost import CostCard, cost
from shiplap.audit.engine import BUDGET_S, audit, card_of
from shiplap.audit.finding import Finding
from shiplap.audit.report import Report
from shiplap.audit.target import find
from shiplap.sampling.case import Case
from shiplap.sampling.samples import Samples, sample

__all__ = [
    "BUDGET_S",
    "CHECKS",
    "ON_REQUEST",
    "Case",
    "CostCard",
    "Finding",
    "Report",
    "Samples",
    "audit",
    "card_of",
    "cost",
    "find",
    "sample",
]
