"""What the tests of single checks share: run one check, and adopt an op that torch already knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shiplap.audit import Finding, audit
from shiplap.dispatch import Op

SEED = 20240607


def look(op: Op, check: str, seed: int = SEED) -> Finding:
    """The finding of one check on ``op``."""
    (finding,) = audit(op, checks=[check], seed=seed)
    assert finding.check == check
    assert finding.subject == op.spec.name
    assert finding.evidence
    return finding


def register(
    name: str,
    schema: str,
    fn: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Register ``fn`` as a foreign library would: nothing of shiplap in between."""
    torch.library.define(name, schema)
    torch.library.impl(name, "CompositeExplicitAutograd", fn)
    if fake is not None:
        torch.library.register_fake(name, fake)
    if backward is not None:
        torch.library.register_autograd(name, backward)
