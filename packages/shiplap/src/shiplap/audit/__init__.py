"""``audit(op)``: run one check after another on generated samples, and return findings."""

from shiplap.audit.checks import CHECKS, ON_REQUEST
from shiplap.audit.cost import CostCard, cost
from shiplap.audit.engine import BUDGET_S, audit, card_of
from shiplap.audit.finding import Finding
from shiplap.audit.target import find
from shiplap.audit.verdict import EXIT_CODES, Judgement, judge
from shiplap.sampling.case import Case
from shiplap.sampling.samples import Samples, sample

__all__ = [
    "BUDGET_S",
    "CHECKS",
    "EXIT_CODES",
    "ON_REQUEST",
    "Case",
    "CostCard",
    "Finding",
    "Judgement",
    "Samples",
    "audit",
    "card_of",
    "cost",
    "find",
    "judge",
    "sample",
]
