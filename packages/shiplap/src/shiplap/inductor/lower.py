"""The one lowering of every op that has templates. It verifies candidates, chooses one, and returns a node of the
graph.

A candidate is used only after it has been proven. If no candidate is proven, the fallback runs. It is a call of the
op's own kernel, or the reference traced into the graph, which Inductor fuses like any PyTorch code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shiplap.declare.binding import Binding
from shiplap.dispatch import Op, tuned_choices
from shiplap.dispatch.fake import refuse_python_in_package
from shiplap.dispatch.tuned_choices import REFERENCE
from shiplap.errors import ShiplapError, notice
from shiplap.inductor.bound_call import LoweredCall
from shiplap.inductor.fusion_choice import CandidateVerdict, FusionChoice, remember_fusion_choice
from shiplap.inductor.precompile import precompile_later_calls
from shiplap.inductor.prove_candidate import NO_MEMORY, prove_template
from shiplap.inductor.pytorch_candidate import template_candidates
from shiplap.inductor.select_candidate import (
    UNTUNED,
    CandidateSelection,
    choice_for_selection,
    forced_candidate,
    measure_candidates,
    preferred_candidate,
    why_not_measurable,
)
from shiplap.inductor.template_candidate import TemplateCandidate
from shiplap.inductor.toggles import switches_of
from shiplap.inductor.tune_templates import (
    answer_tuning_request,
    collect_candidates,
    is_collecting,
    is_tuning_templates,
)
from shiplap.torch_private import dynamo, inductor_lowering
from shiplap.tuning.choice import Choice

UNTUNED_REFERENCE = f"{REFERENCE}({UNTUNED})"
MEMORY_FIX = "free memory of the device, where other processes or tensors may hold it, and make the package again"
LIMIT_FIX = "export with a smaller upper end for each size that varies, as in torch.export.Dim('rows', max=4096)"


def lower_op(op: Op, overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the Inductor IR node for one call of ``op`` with ``args`` and ``kwargs``, which hold IR nodes.

    It is the kernel of the chosen template, with which Inductor can fuse neighbours, or the fallback. The fallback is a
    call of ``overload``, or the op's reference traced into the graph.
    """
    with LoweredCall.bind(op, args, kwargs) as call:
        wanted, choice = forced_candidate(op.spec.name), None  # a trial of a candidate that has been proven
        if wanted is None:
            if not (is_tuning_templates() or is_collecting()):
                precompile_later_calls(call, _likely_candidate).step(op.spec.name)
            choice = _guarded_by_range(call, _choose_candidate(call))
            wanted = choice.chosen
            remember_fusion_choice(choice)
        if wanted == REFERENCE:
            return fallback_node(call, overload, args, kwargs, choice)
        if wanted == UNTUNED_REFERENCE:
            # The fallback took part in the race as Inductor compiles it without tuning, so it has to be compiled that
            # way again.
            with inductor_lowering.no_autotuning():
                return fallback_node(call, overload, args, kwargs, choice)
        return _template_node(call, wanted)


def _template_node(call: LoweredCall, label: str) -> Any:
    """Return the IR node of the candidate with this label, which is a template with one config."""
    # The candidates are cached in the call, so that the chosen one is the object that was proven.
    valid, _ = template_candidates(call)
    return next(c for c in valid if c.label == label).node(switches_of(call.op).fusion)


def _guarded_by_range(call: LoweredCall, choice: FusionChoice) -> FusionChoice:
    """Return ``choice`` after adding guards to the graph. They keep the graph from running at sizes for which the
    chosen template is not proven. If such a guard cannot be set, return the choice of the fallback, which uses no
    template.
    """
    if choice.chosen in (REFERENCE, UNTUNED_REFERENCE) or call.sizes.limit_graph():
        return choice
    return _unproven_sizes(call, f"no guard can hold the graph to {call.sizes.text}", list(choice.verdicts))


def _unproven_sizes(call: LoweredCall, why: str, verdicts: list[CandidateVerdict]) -> FusionChoice:
    """Return the choice of the fallback, which uses no template, for a call whose templates cannot be proven for all
    sizes of the graph. Issue a notice. ``why`` is the reason. ``verdicts`` are the results of the candidates so far.
    """
    notice(f"sizes {call.op.identity} {why}", f"{call.op.spec.name}: no template is used: {why}")
    return _fusion_choice(call, REFERENCE, why, verdicts)


def _choose_candidate(call: LoweredCall) -> FusionChoice:
    """Return the choice of a candidate for ``call``. A candidate is a template with one config, or the fallback, which
    uses no template.

    A candidate that an earlier tuning stored, or that an installed table names, comes first. If there is none and the
    user requested tuning, the candidates are measured now, and the fastest is chosen. Without tuning, the first
    template candidate that agrees with the reference is chosen. If there is none, the fallback is chosen.
    """
    # The tuner compiles only to get here, and takes the result from its request.
    if answer_tuning_request(call):
        return _fusion_choice(call, REFERENCE, "its candidates are tuned", [])
    switch = switches_of(call.op)
    if not switch.templates:
        return _fusion_choice(call, REFERENCE, "templates are switched off", [])
    valid, refused = template_candidates(call)
    verdicts = [CandidateVerdict(name, "refused", why) for name, why in refused.items()]
    valid = [c for c in valid if switch.only in c.label]
    if not valid:
        return _fusion_choice(call, REFERENCE, "no template takes this call", verdicts)
    # A worker process compiles only to get candidates, and measures them after this compilation.
    if collect_candidates(call, valid):
        return _fusion_choice(call, REFERENCE, "candidates were collected", verdicts)
    if call.sizes.problem:
        return _unproven_sizes(call, call.sizes.problem, verdicts)
    # The user named one candidate for an experiment, so neither the store nor a measurement may replace it.
    if switch.only:
        return _first_proven(call, valid, verdicts, f"only {switch.only!r} may be chosen")
    selection = CandidateSelection.of(call)
    if (choice := choice_for_selection(selection)) is not None:
        return _apply_known_choice(call, valid, verdicts, choice)
    if not inductor_lowering.is_autotuning() or tuned_choices.frozen or (why := why_not_measurable()):
        reason = "the first candidate that is proven; mode='max-autotune' measures"
        if inductor_lowering.is_autotuning():
            reason = f"not measured: {'choices are frozen' if tuned_choices.frozen else why}"
        first = preferred_candidate(selection, [c.label for c in valid])
        return _by_default(call, valid, verdicts, reason, first)
    choice, measured = measure_candidates(selection, valid)
    return _fusion_choice(call, choice.label, choice.reason, [*measured, *verdicts])


def _likely_candidate(call: LoweredCall) -> TemplateCandidate | None:
    """Return the candidate, that is a template with one config, that will probably be tested and used for ``call``. Its
    compilation can then start early. Return None if no candidate needs a test, or if none can be foreseen.
    """
    switch = switches_of(call.op)
    valid = [c for c in template_candidates(call)[0] if switch.only in c.label] if switch.templates else []
    if call.sizes.problem:
        return None
    if switch.only or not valid:
        return next(iter(valid), None)
    selection = CandidateSelection.of(call)
    choice = choice_for_selection(selection)
    if choice is None:
        if inductor_lowering.is_autotuning() and not tuned_choices.frozen:
            return None  # candidates are measured, and compiled beside each other for that
        first = preferred_candidate(selection, [c.label for c in valid])
    else:
        first = choice.label
    # A fallback needs no proof, and a stored choice was proven when it was measured.
    if first in (REFERENCE, UNTUNED_REFERENCE) or (choice is not None and choice.origin == "stored"):
        return None
    return next(iter(_default_candidates(valid, first)), None)


def _default_candidates(valid: list[TemplateCandidate], first: str) -> list[TemplateCandidate]:
    """Return those of ``valid`` that may be used without a measurement. They are the candidates of templates that are
    marked as default, and the candidate labelled ``first``, if there is one. That candidate comes first.
    """
    taken = [c for c in valid if c.template.default or c.label == first]
    return sorted(taken, key=lambda c: c.label != first) if any(c.label == first for c in taken) else taken


def _apply_known_choice(
    call: LoweredCall, valid: list[TemplateCandidate], verdicts: list[CandidateVerdict], choice: Choice
) -> FusionChoice:
    """Return the choice for a call for which ``choice`` is stored, installed or frozen. ``valid`` are the candidates
    that can run the call. The result of each candidate that is tested is appended to ``verdicts``.

    A stored choice was verified when it was measured, with equal source code on this machine, and is used without a
    test. If no candidate has its label, or for any other choice, candidates are tested as by :func:`_by_default`.
    """
    if choice.origin != "stored":
        return _by_default(call, valid, verdicts, f"{choice.origin}: {choice.reason}", choice.label)
    if choice.kernel == REFERENCE or any(c.label == choice.label for c in valid):
        return _fusion_choice(call, choice.label, f"stored: {choice.reason}", verdicts)
    return _by_default(call, valid, verdicts, f"the stored choice {choice.label} does not take this call")


def _by_default(
    call: LoweredCall, valid: list[TemplateCandidate], verdicts: list[CandidateVerdict], reason: str, first: str = ""
) -> FusionChoice:
    """Return the choice for a call for which nothing is measured. ``valid`` are the candidates that can run the call,
    and ``reason`` is the reason for the choice. The result of each candidate that is tested is appended to
    ``verdicts``.

    The choice is the candidate labelled ``first``, which ``sl.tune`` chose, or a candidate of a default template. If
    none of them agrees with the reference, it is the reference. Issue a notice if an unmeasured template is chosen.
    """
    if first in (REFERENCE, UNTUNED_REFERENCE):
        return _fusion_choice(call, first, f"the choice of sl.tune; {reason}", verdicts)
    taken = _default_candidates(valid, first)
    if tuned := any(c.label == first for c in taken):
        reason = f"the choice of sl.tune; {reason}"
    if not taken:
        return _fusion_choice(
            call, REFERENCE, "templates are chosen by measurement only: mode='max-autotune'", verdicts
        )
    choice = _first_proven(call, taken, verdicts, reason)
    # A choice that nobody measured may make the model slower, so the user is told once.
    if not tuned and choice.chosen != REFERENCE and not switches_of(call.op).only:
        notice(
            f"unmeasured {call.op.identity}",
            f"{call.op.spec.name}: {choice.chosen} is used, and nothing was measured: it may be slower than what it "
            "replaces; mode='max-autotune' and shiplap tune measure it",
        )
    return choice


def _first_proven(
    call: LoweredCall, valid: list[TemplateCandidate], verdicts: list[CandidateVerdict], reason: str
) -> FusionChoice:
    """Return the choice of the first candidate in ``valid`` whose results agree with the reference on test inputs. If
    none agrees, return the choice of the reference. The result of each candidate that is tested is appended to
    ``verdicts``. ``reason`` becomes the reason of the choice.
    """
    for candidate in valid:
        verdicts.append(prove_template(candidate))
        if verdicts[-1].status == "ok":
            return _fusion_choice(call, candidate.label, reason, verdicts)
        _warn_unused_candidate(call.op, verdicts[-1])
    return _fusion_choice(call, REFERENCE, "no template is proven for this call", verdicts)


def fallback_node(
    call: LoweredCall,
    overload: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    choice: FusionChoice | None = None,
) -> Any:
    """Return the IR node of a call for which no template is used. It is a call of ``overload`` if the op has a kernel
    of its own, or if its reference cannot be traced. Otherwise it is the reference traced into the graph for Inductor
    to fuse. ``choice`` says why no template is used, for the error of a package.
    """
    if call.op.native_kernels(call.device.type):  # without the eager form of a template, which was refused here
        return _opaque_call(call, overload, args, kwargs, choice)
    try:
        # Inductor fuses the operators of the reference with their neighbours.
        graph = inductor_lowering.trace_to_aten(call.reference, list(call.tensors.values()))
    except Exception:  # a reference that cannot be traced is called as it stands
        return _opaque_call(call, overload, args, kwargs, choice)
    return inductor_lowering.inline_graph(
        graph, call.nodes
    )  # if the user asked for it, tuned by Inductor as any PyTorch code is


def _opaque_call(
    call: LoweredCall,
    overload: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    choice: FusionChoice | None,
) -> Any:
    """Return the IR node that calls ``overload`` as an opaque function, with which Inductor fuses nothing. While a
    package (AOTInductor) is made and the call would need Python there, return the node of a template that was not
    tried, or raise ``SL307`` if none is proven. The error then has the reasons of ``choice`` for using no template.
    """
    if dynamo.is_packaging():
        try:
            _refuse_python(call, choice)
        except ShiplapError:
            packed = _choose_untried(call, choice)
            _refuse_python(call, packed) if packed.chosen == REFERENCE else remember_fusion_choice(packed)
            return _template_node(call, packed.chosen)
    return inductor_lowering.extern_call(overload, args, dict(kwargs))


def _refuse_python(call: LoweredCall, choice: FusionChoice | None) -> None:
    """Raise ``SL307`` if ``call`` without a template would need Python in a package. The error has the reasons of
    ``choice`` for using no template.
    """
    kinds = {a.name: a.tensor for a in call.op.spec.tensors if a.tensor and not a.tensor.concrete}
    dtypes = {kinds[name].dtype_class: dtype for name, dtype in call.dtypes.items() if name in kinds}
    verdicts = choice.verdicts if choice is not None else ()
    why = [f"{v.candidate} is {v.status} ({v.detail})" for v in verdicts]
    if choice is not None:  # it may be another reason than what is wrong with each of them, such as a size without end
        why.insert(0, choice.reason)
    fix = ""
    if any(v.detail.startswith(NO_MEMORY) for v in verdicts):
        fix = MEMORY_FIX
    elif choice is not None and choice.reason == call.sizes.problem:
        fix = LIMIT_FIX
    refuse_python_in_package(call.op, Binding((), {}, dtypes, call.device), templates=why, fix=fix)


def _choose_untried(call: LoweredCall, choice: FusionChoice | None) -> FusionChoice:
    """Return the choice of the first template for ``call`` that is proven among those that ``choice`` has not found
    unusable, or of the reference if there is none. A measurement, which may be an earlier one that was stored, had
    found the reference the fastest, or only measured templates are taken otherwise.
    """
    verdicts = [] if choice is None else list(choice.verdicts)
    unusable = {v.candidate for v in verdicts if v.status in ("wrong", "broken", "refused")}
    switch = switches_of(call.op)
    left = [c for c in template_candidates(call)[0] if switch.only in c.label and c.label not in unusable]
    if not left or not switch.templates or call.sizes.problem:
        return choice or _fusion_choice(call, REFERENCE, "no template takes this call", verdicts)
    return _guarded_by_range(call, _first_proven(call, left, verdicts, "a package cannot run the reference in Python"))


def _warn_unused_candidate(op: Op, verdict: CandidateVerdict) -> None:
    """Issue a notice that a candidate of ``op``, that is a template with one config, is not used. ``verdict`` holds its
    label and the reason.
    """
    notice(
        f"template {op.identity} {verdict.candidate}",
        f"{op.spec.name}: {verdict.candidate} is {verdict.status} and is not used ({verdict.detail})",
    )


def _fusion_choice(call: LoweredCall, chosen: str, reason: str, verdicts: list[CandidateVerdict]) -> FusionChoice:
    """Return the record of the choice of the candidate labelled ``chosen`` for ``call``, with ``reason`` and
    ``verdicts``. The sizes and dtypes of the call are added as text.
    """
    # The numbers are those of the call at hand, also where the graph serves a range of sizes.
    sizes = ", ".join(f"{k}={v}" for k, v in call.hints.items())
    sizes += f"; any {call.sizes.text}" if call.sizes.text and chosen != REFERENCE else ""
    dtypes = ", ".join(f"{k} {str(v).removeprefix('torch.')}" for k, v in call.dtypes.items())
    node = inductor_lowering.current_node().name
    return FusionChoice(call.op.spec.name, node, sizes, dtypes, chosen, reason, tuple(verdicts))
