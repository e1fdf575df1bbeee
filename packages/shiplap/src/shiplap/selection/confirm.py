"""The winner of a tuning, once more: in a locked process, on values that nobody knew, by the clock of this process.

Candidates that race share a process with each other, with the comparison and with the clock. What wins there by
changing one of those loses here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from shiplap.op import Op
from shiplap.op.config import Config
from shiplap.referee.case import Case
from shiplap.referee.compare import close, reduction
from shiplap.referee.process import Ended, Launcher
from shiplap.referee.recipe import Recipe
from shiplap.referee.run import reference, reference64, tensors
from shiplap.referee.samples import Samples
from shiplap.referee.witness import Expected, Witness, Wrong
from shiplap.selection.inputs import Inputs, inputs
from shiplap.selection.worker import find, provided

__all__ = ["confirm", "maker"]

CALLS = 5
TIMES, SLACK = 4.0, 3e-3  # of the claimed time, and seconds for what one call needs beside its kernel


def confirm(
    launcher: Launcher, opening: Mapping[str, Any], drawn: Inputs, index: int, claimed: float, seed: int
) -> str:
    """Why candidate ``index`` of ``opening`` is not believed, or an empty text.

    ``claimed`` is the time in seconds by which it won. Each call has values of its own seed, and each result is
    compared.
    """
    order = json.dumps({**opening, "index": index})
    places = [str(Path(p)) for p in opening["path"] if p]
    places += [str(Path(opening["file"]).parent)] if opening["file"] else []
    try:
        prisoner = launcher.start(places)
    except Ended as e:
        return f"no process to confirm it in: {e}"
    try:
        nothing, witness = Witness(launcher.start()), Witness(prisoner)
        loaded = {"home": "", "names": [], "path": [], "seed": 0, "compile": False}
        nothing.load({**loaded, "kind": "nothing"}, [], {})
        home = {"home": __name__, "names": ["maker"], "path": opening["path"], "kind": "maker"}
        witness.load({**loaded, **home}, [order], {})
        took = []
        for number in range(CALLS):
            case = Samples(drawn.op, seed + number, drawn.device).build(drawn.recipe)
            empty = nothing.call(case.args).wall
            took.append(witness.call(case.args, _expected(drawn.op, case)).wall - empty)
        nothing.prisoner.kill()
    except Wrong as e:
        return f"{e.evidence} ({e.check}) on new values"
    except Ended as e:
        return str(e)
    finally:
        prisoner.kill()
    least = min(took[1:])
    if least > TIMES * claimed + SLACK:
        return f"won with {claimed * 1e6:.0f} us, and takes {median(took[1:]) * 1e6:.0f} us on new values"
    return ""


def _expected(op: Op, case: Case) -> Expected:
    with torch.no_grad():
        own, wide = reference(op, case.args), reference64(op, case.args)
    sums = reduction(op.spec, case.env)
    flat = tensors(case.args)
    written = [v for a, v in zip(op.spec.args, case.args, strict=True) if a.mutated and isinstance(v, Tensor)]
    changed = tuple(i for i, t in enumerate(flat) if any(t is w for w in written))
    return Expected(own, partial(_against, own=own, wide=wide, sums=sums), changed, aliased=True)


def _against(got: Any, *, own: Any, wide: Any, sums: Any) -> Any:
    return close(got, own, wide, sums, wide_sums=True)


def maker(order: str) -> Callable[..., Any]:
    """In the locked process: the candidate that ``order`` names, as a function of all arguments."""
    asked = json.loads(order)
    op = find({**asked, "path": sys.path})
    drawn = inputs(op, Recipe.parse(asked["recipe"]), asked["device"])
    wanted = asked["candidates"][asked["index"]]
    key = wanted["kernel"], Config.of(wanted["config"])
    candidate = next(c for c in provided(asked["provider"], op, drawn) if (c.kernel, c.config) == key)

    def call(*args: Any) -> Any:
        return candidate.prepare(args)()

    return call
