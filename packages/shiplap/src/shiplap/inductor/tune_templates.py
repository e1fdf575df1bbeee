"""Templates in ``sl.tune``. The op is compiled alone, and the candidates of this compilation are measured.

The choice is stored under the key that such a compilation looks up. If an op is compiled with other operations around
it, and no choice was measured there, this choice is the first candidate that is tried.

In the worker process of ``tune``, a compilation of the op alone renders the candidates, and the worker runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch

from shiplap.dispatch import Op, tuned_choices
from shiplap.dispatch.tuned_choices import REFERENCE
from shiplap.errors import ShiplapError, error, error_line
from shiplap.inductor.bound_call import LoweredCall
from shiplap.inductor.pytorch_candidate import template_candidates
from shiplap.inductor.select_candidate import (
    CandidateSelection,
    choice_for_selection,
    measure_candidates,
    render_candidates,
)
from shiplap.inductor.template_candidate import TemplateCandidate
from shiplap.sampling.finding import Finding
from shiplap.sampling.recipe import SampleRecipe
from shiplap.settings import settings
from shiplap.tuning.allowed import require_quiet
from shiplap.tuning.candidate import Candidate
from shiplap.tuning.choice import Choice
from shiplap.tuning.compiled_templates import ALONE, templates_by_need
from shiplap.tuning.frozen_table import remember_choice
from shiplap.tuning.inputs import Inputs, draw_inputs
from shiplap.tuning.key import Key, key_for
from shiplap.tuning.search import Report
from shiplap.tuning.selector import SelectionOptions, install_choices
from shiplap.tuning.worker_process import WorkerProcess


@dataclass
class TemplateTuningRequest:
    """The request of :func:`tune_templates` to the lowering of the call that it compiles. The lowering stores the key
    of the call, the choice or None, and findings about refused candidates in it.
    """

    op: Op
    options: SelectionOptions
    report: Report
    isolation: WorkerProcess | None
    key: Key | None = None
    choice: Choice | None = None
    findings: list[Finding] = field(default_factory=list)


# A context variable, because Inductor calls the lowering: no argument of ours reaches it.
_request: ContextVar[TemplateTuningRequest | None] = ContextVar("shiplap_tuned_call", default=None)


def is_tuning_templates() -> bool:
    """Return whether :func:`tune_templates` is compiling now."""
    return _request.get() is not None


def answer_tuning_request(call: LoweredCall) -> bool:
    """If :func:`tune_templates` is compiling ``call`` and has no result for it yet, find the best candidate and store
    it in the request. Return whether this was done.

    If the result is True, the caller lowers the call without a template.
    """
    request = _request.get()
    # The reference of the op may call other ops with templates.
    if request is None or request.op is not call.op or request.key is not None:
        return False
    selection = CandidateSelection.of(call)
    request.key = selection.key
    valid, refused = template_candidates(call)
    request.findings += [
        _skipped_finding(call.op, f"{name}: {why}", selection.inputs.recipe) for name, why in refused.items()
    ]
    # Frozen choices are used even with remeasure, since nothing is measured beside them.
    request.choice = None if request.options.remeasure and not tuned_choices.frozen else choice_for_selection(selection)
    if request.choice is None and tuned_choices.frozen:
        request.choice = _frozen_default(selection, valid)
    elif request.choice is None and valid:
        request.choice, _ = measure_candidates(selection, valid, request.options, request.report, request.isolation)
    return True


def tune_templates(
    op: Op,
    recipe: SampleRecipe,
    device: str,
    options: SelectionOptions,
    report: Report,
    isolation: WorkerProcess | None,
) -> Choice:
    """Return the choice among the templates of ``op`` in compiled code for calls like ``recipe``. It is an earlier
    choice, or the fastest template by measurement. A measured choice is stored and put into use. If nothing could be
    measured, the reference is chosen, with findings that state why.

    ``report`` is called with each step. ``isolation`` is the worker process that runs candidates, or None for this
    process.

    Raises:
        ShiplapError: ``SL502``, ``SL606`` or ``SL610`` if there are no valid inputs. ``SL607`` if a frozen table lacks
            the call in strict mode. ``SL608`` inside an op, a backward, a capture or a trace.
    """
    require_quiet(f"{op.spec.name} in compiled code")
    drawn = draw_inputs(op, recipe, device)
    asked = TemplateTuningRequest(op, options, report, isolation)
    report("compile the op alone", 0, 1)
    why = _compile_for_request(asked, drawn)
    choice = asked.choice
    if choice is None:
        names = ", ".join(t.name for each in templates_by_need(op, device) for t in each)
        if why:
            asked.findings.append(_skipped_finding(op, f"{names}: the op cannot be compiled here: {why}", recipe))
        choice = _reference_choice(op, drawn, asked.key, f"{names}: no candidate could be measured")
        return choice.but(findings=tuple(asked.findings), origin="default")
    choice = choice.but(findings=(*choice.findings, *asked.findings))
    if choice.origin == "default" and settings().strict:
        raise error(
            "SL607",
            where=f"{op.spec.name} {drawn.bucket} in compiled code",
            got=f"no entry in {tuned_choices.frozen}",
            expected="a frozen choice",
        )
    # A frozen table is the only source of choices.
    if not tuned_choices.frozen and asked.key is not None:
        remember_choice(asked.key, choice)
        install_choices(op, [choice])
    return choice


def _compile_for_request(asked: TemplateTuningRequest, drawn: Inputs) -> str:
    """Compile a call of the op alone on the sample inputs ``drawn``. The lowering of this call stores the choice in
    ``asked``. Return the reason as a line of text if the compilation fails or the compiled code does not contain the
    op. Otherwise return an empty string.
    """
    token = _request.set(asked)
    try:
        compile_alone(asked.op, drawn)
    # An error of the catalogue names something that the user can correct, so it is not turned into a finding.
    except ShiplapError:
        raise
    except Exception as e:  # of Inductor, or of the compiler that it calls
        return error_line(e)
    finally:
        _request.reset(token)
    return "" if asked.key is not None else "the compiled code does not hold the op"


def _frozen_default(selection: CandidateSelection, valid: list[TemplateCandidate]) -> Choice:
    """Return the choice for a call that a frozen table of choices does not list. It is the first candidate in ``valid``
    whose template is marked as default, or the reference if there is none.
    """
    blank = _reference_choice(selection.call.op, selection.inputs, selection.key, "")
    taken = next((c for c in valid if c.template.default), None)
    blank = blank.but(reason=f"declared default: not in {tuned_choices.frozen}", origin="default")
    return blank if taken is None else blank.but(kernel=taken.kernel, config=taken.config)


def _reference_choice(op: Op, drawn: Inputs, key: Key | None, reason: str) -> Choice:
    """Return a record which says that the reference is chosen for calls like ``drawn``, for the reason ``reason``.
    ``key`` is the key of these calls in the store of choices. If it is None, it is computed.
    """
    place: Mapping[str, str] = dict(ALONE)
    blank = key_for(op, drawn, place) if key is None else key
    return Choice(
        op.spec.name,
        blank["device"],
        drawn.bucket,
        drawn.dtypes,
        drawn.layout,
        REFERENCE,
        reason=reason,
        sizes=str(drawn.recipe),
        place=tuple(place.items()),
    )


def _skipped_finding(op: Op, evidence: str, recipe: SampleRecipe) -> Finding:
    """Return a finding of the tuning with the verdict ``skip``. It says that a candidate of ``op`` was not measured for
    calls like ``recipe``, and ``evidence`` states why.
    """
    return Finding("tune.candidates", "skip", op.spec.name, evidence, str(recipe), "")


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
