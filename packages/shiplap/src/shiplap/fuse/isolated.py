"""Template candidates in the worker process of ``tune``: a compilation of the op alone renders them, the worker runs
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch

from shiplap.fuse.call import Call
from shiplap.fuse.candidate import TemplateCandidate
from shiplap.op import Op
from shiplap.selection.candidate import Candidate
from shiplap.selection.inputs import Inputs

__all__ = ["collect", "provide"]

_collected: ContextVar[list[Any] | None] = ContextVar("shiplap_collected_candidates", default=None)


def collect(call: Call, candidates: Sequence[TemplateCandidate]) -> bool:
    """Hand the candidates of a call to :func:`provide`, if that is who compiles. The call then uses the fallback."""
    listed = _collected.get()
    if listed is None:
        return False
    from shiplap.fuse.select import rendered

    listed += rendered(call, candidates)
    return True


def provide(op: Op, drawn: Inputs) -> Sequence[Candidate]:
    """The fallback and every template candidate for calls like ``drawn``, ready to be verified and raced."""
    from shiplap.compat import lowering
    from shiplap.referee.run import split

    listed: list[Any] = []
    token = _collected.set(listed)
    positional, named = split(op.spec, drawn.real[0].fresh())
    try:
        with torch.no_grad(), lowering.uncached():
            torch.compile(lambda *a, **k: op.overload(*a, **k), dynamic=False, fullgraph=True)(*positional, **named)
    finally:
        _collected.reset(token)
    return listed
