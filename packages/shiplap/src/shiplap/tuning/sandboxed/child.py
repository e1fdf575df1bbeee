"""The code in a locked process: the candidates of one kernel, each prepared for arguments that the tuner sends.

The tuner does not rely on anything here, because the candidate shares this interpreter.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from shiplap.declare.config import Config
from shiplap.dispatch.launch import poisoned_workspace
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sandbox.child import ArgumentsDeclined
from shiplap.tuning.allowed import WORKER
from shiplap.tuning.candidate import Candidate, CandidateRefused, CandidateRun
from shiplap.tuning.inputs import draw_inputs
from shiplap.tuning.poison_memory import Poison
from shiplap.tuning.worker import candidates_by_provider, import_op

Ready = Callable[[Mapping[str, Any], list[Any]], CandidateRun]


def maker(order: str) -> Ready:
    """Return the function that prepares calls: ``{"index": i, "poison": byte or None}`` and arguments → a function
    without any.

    ``order`` is the opening of a task as JSON. Index -1 binds the arguments and runs nothing. Raises LookupError if the
    op, or a candidate, differs in this process.
    """
    asked = json.loads(order)
    os.environ[WORKER] = str(os.getpid())  # a module that tunes when it is imported does not tune here
    op = import_op({**asked, "path": [*asked["path"], *(p for p in sys.path if p not in asked["path"])]})
    if op.identity != asked["identity"]:
        raise LookupError(f"{op.spec.name} differs there: kernels attached elsewhere, or changed files")
    drawn = draw_inputs(op, SampleRecipe.parse(asked["recipe"]), asked["device"])
    listed = {(c.kernel, c.config): c for c in candidates_by_provider(asked["provider"], op, drawn)}
    wanted = [(c["kernel"], Config.of(c["config"])) for c in asked["candidates"]]
    if missing := [w for w in wanted if w not in listed]:
        raise LookupError(f"candidate {missing[0]} is unknown here")

    def ready(which: Mapping[str, Any], args: list[Any]) -> CandidateRun:
        if which["index"] < 0:
            op.bind(tuple(args))
            return lambda: ()
        return _make_ready(listed[wanted[which["index"]]], which.get("poison"), tuple(args))

    return ready


def _make_ready(candidate: Candidate, byte: int | None, args: tuple[Any, ...]) -> CandidateRun:
    try:
        with nullcontext() if byte is None else poisoned_workspace(byte):
            run = candidate.prepare(args)
    except CandidateRefused as e:
        raise ArgumentsDeclined(str(e)) from None
    if byte is None:
        return run

    def poisoned() -> Any:
        with poisoned_workspace(byte), nullcontext() if candidate.opaque else Poison(byte):
            return tuple(run())

    return poisoned
