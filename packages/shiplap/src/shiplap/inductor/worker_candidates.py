"""Template candidates in the worker process of ``tune``. A compilation of the op alone renders them, and the worker
runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch

from shiplap.dispatch import Op
from shiplap.inductor.bound_call import LoweredCall
from shiplap.inductor.template_candidate import TemplateCandidate
from shiplap.tuning.candidate import Candidate
from shiplap.tuning.inputs import Inputs

_collected: ContextVar[list[Any] | None] = ContextVar("shiplap_collected_candidates", default=None)


def collect_candidates(call: LoweredCall, candidates: Sequence[TemplateCandidate]) -> bool:
    """If :func:`provide` is compiling, render ``candidates`` and the fallback, which is the op without a template.
    Append them to the list that :func:`provide` returns. Return whether this was done.

    If the result is True, the caller lowers the call without a template.
    """
    listed = _collected.get()
    # A compilation of the user's, in this process.
    if listed is None:
        return False
    from shiplap.inductor.select_candidate import render_candidates

    listed += render_candidates(call, candidates)
    return True


def is_collecting() -> bool:
    """Return whether :func:`provide` is compiling in this context."""
    return _collected.get() is not None


def provide(op: Op, drawn: Inputs) -> Sequence[Candidate]:
    """Return the fallback, which is the op without a template, and every candidate for calls like ``drawn``. They are
    rendered by compiling the op alone. The worker process that verifies and times them calls this function.
    """
    listed: list[Any] = []
    token = _collected.set(listed)
    try:
        compile_alone(op, drawn)
    finally:
        _collected.reset(token)
    return listed


def compile_alone(op: Op, drawn: Inputs) -> None:
    """Compile a call of ``op`` on the sample inputs ``drawn`` without other operations, and run it once. No code of an
    earlier compilation is used.
    """
    from shiplap.torch_private import inductor_lowering

    def call(*args: Any, **named: Any) -> Any:
        """Return the result of the op for the given arguments. Each compilation copies the code object of this
        function, so that Dynamo compiles it again.
        """
        return op.overload(*args, **named)

    positional, named = op.spec.split(drawn.real[0].fresh())
    anew = FunctionType(
        call.__code__.replace(), call.__globals__, closure=call.__closure__
    )  # Dynamo's cache is per code
    with torch.no_grad(), inductor_lowering.without_graph_caches():
        torch.compile(anew, dynamic=False, fullgraph=True)(*positional, **named)
