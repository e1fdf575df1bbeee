"""Prove: ``audit(op)`` runs one check after another on generated samples, and returns findings."""

from shiplap.audit.checks import CHECKS, ON_REQUEST
from shiplap.audit.cost import CostCard, cost
from shiplap.audit.engine import audit
from shiplap.audit.finding import Finding
from shiplap.audit.target import find
from shiplap.referee.samples import Case, Samples, sample

__all__ = ["CHECKS", "ON_REQUEST", "Case", "CostCard", "Finding", "Samples", "audit", "cost", "find", "sample"]
