"""The names of the ops, which no other version has."""

import torch

NAMESPACE = "_squash_cpu_0000002"
ops = getattr(torch.ops, NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """Return the name under which this version registers an op."""
    return f"{NAMESPACE}::{op_name}"
