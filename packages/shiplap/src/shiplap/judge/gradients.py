"""Comparison of the gradients of a candidate with those of the reference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from shiplap.judge.case import JudgeSession
from shiplap.judge.variants import SECRET_RANDOM, InputForm
from shiplap.sampling.compare import Reduction
from shiplap.sampling.compare_to_reference import compare_with_rounding
from shiplap.sandbox.candidate import CandidateError, TargetProcess

GRADIENT_FORMS = 4  # other forms on which gradients are compared
GRADIENT_LAYOUTS = ("plain", "one", "turned")  # memory layouts of the gradients of results, in turn


def compare_gradients(case: JudgeSession, witness: TargetProcess, forms: Sequence[InputForm], ends: float) -> None:
    """Compare gradients on the first form twice, on timed forms, and on a secret choice of others.

    No further form is begun after ``ends``.
    """
    wanted = case.options.gradients
    if not (case.subject.gradients if wanted is None else wanted):
        case.unchecked.append("gradients")
        return
    others = [f for f in forms if (f.shapes, f.recipe) != (forms[0].shapes, forms[0].recipe)]
    others = SECRET_RANDOM.sample(others, min(GRADIENT_FORMS, len(others)))
    compared = 0
    for number, form in enumerate((forms[0], *(f for f in forms if f.timed), *others, forms[0])):
        if compared and time.monotonic() > ends:
            case.missing["gradients"] = f"only {compared} were reached in the time"
            return
        with case.record_faults(f"gradients of {form.label}"):
            compared += _compare_form_gradients(case, witness, form, GRADIENT_LAYOUTS[number % len(GRADIENT_LAYOUTS)])
        if case.reasons:
            return
    if not compared:
        case.unchecked.append("gradients: the reference has none")


def _compare_form_gradients(case: JudgeSession, witness: TargetProcess, form: InputForm, way: str) -> bool:
    """Compare the gradients on one form. Return False if the reference has none there. Raises Wrong."""
    args = case.problem.draw(form)
    try:
        outs = [o for o in case.problem.expect_effects(form, args).own if o.is_floating_point()]
        seeds = [_draw_output_gradient(o, way) for o in outs]
        own = case.problem.gradients(args, seeds, wide=False)
        wide = case.problem.gradients(args, seeds, wide=True)
    except Exception:  # the reference refuses these values, or has no gradient
        return False
    got = witness.gradients(args, seeds, own, case.problem.parameters)
    if len(got) < len(own):
        own, wide = own[: len(got)], wide[: len(got)]
        note = "gradients of parameters: the candidate has none of the same names"
        case.unchecked += [note] if note not in case.unchecked else []
    # A gradient may sum over all elements of a result.
    sums = Reduction(max(1, max((o.numel() for o in own), default=1)))
    recompute = partial(case.problem.gradients, args, seeds, wide=True)
    if problem := compare_with_rounding(got, own, wide, sums, recompute, case.problem.tolerance).problem:
        raise CandidateError("gradients", problem)
    return True


def _draw_output_gradient(result: Tensor, way: str) -> Tensor:
    """Return a random gradient of ``result`` in the memory layout ``way``.

    The layouts are rows, columns (``"turned"``), and one number for all elements (``"one"``), as behind a sum.
    """
    if way == "one":
        return torch.randn((), dtype=torch.float64).to(result.device, result.dtype).expand(result.shape)
    if way == "turned":
        turned = torch.randn(result.shape[::-1], dtype=torch.float64).to(result.device, result.dtype)
        return turned.permute(*reversed(range(result.dim())))
    return torch.randn(result.shape, dtype=torch.float64).to(result.device, result.dtype)
