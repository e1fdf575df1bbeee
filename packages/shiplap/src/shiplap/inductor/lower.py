"""The one lowering of every op that has templates: call → verified candidates → choice → node of the graph.

A candidate that was not proven is never submitted, whoever proposes it; if no candidate is proven, the fallback runs:
the op's own kernel as an opaque call, or the reference inlined, for Inductor to fuse as it does any PyTorch code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shiplap.declare.binding import Binding
from shiplap.dispatch import Op, tuned_choices
from shiplap.dispatch.fake import refuse_python
from shiplap.dispatch.tuned_choices import REFERENCE
from shiplap.errors import notice
from shiplap.inductor.bound_call import Call
from shiplap.inductor.fusion_choice import FusionChoice, Verdict, remember
from shiplap.inductor.precompile import look_ahead
from shiplap.inductor.prove_candidate import prove
from shiplap.inductor.pytorch_candidate import candidates
from shiplap.inductor.select_candidate import UNTUNED, Selection, blocked, forced, known, measure, preferred
from shiplap.inductor.template_candidate import TemplateCandidate
from shiplap.inductor.toggles import in_force
from shiplap.inductor.tune_templates import answered, asked
from shiplap.inductor.worker_candidates import collect, collecting
from shiplap.torch_private import aot_packages, inductor_lowering
from shiplap.tuning.choice import Choice

UNTUNED_REFERENCE = f"{REFERENCE}({UNTUNED})"


def lower(op: Op, overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Lower one call of ``op`` to a node of the graph."""
    with Call.bind(op, args, kwargs) as call:
        wanted = forced(op.spec.name)  # a trial of a candidate that has been proven
        if wanted is None:
            if not (asked() or collecting()):
                look_ahead(call, _likely).step(op.spec.name)
            choice = _limited(call, _select(call))
            wanted = choice.chosen
            remember(choice)
        if wanted == REFERENCE:
            return fallback(call, overload, args, kwargs)
        if wanted == UNTUNED_REFERENCE:
            with inductor_lowering.no_autotuning():
                return fallback(call, overload, args, kwargs)
        valid, _ = candidates(call)
        return next(c for c in valid if c.label == wanted).node(in_force(op).fusion)


def _limited(call: Call, choice: FusionChoice) -> FusionChoice:
    """``choice``, after the graph is guarded against sizes for which its template is not proven; else the fallback."""
    if choice.chosen in (REFERENCE, UNTUNED_REFERENCE) or call.sizes.limit_graph():
        return choice
    return _unproven(call, f"no guard can hold the graph to {call.sizes.text}", list(choice.verdicts))


def _unproven(call: Call, why: str, verdicts: list[Verdict]) -> FusionChoice:
    """The fallback for a call whose templates cannot be proven for all sizes of the graph."""
    notice(f"sizes {call.op.identity} {why}", f"{call.op.spec.name}: no template is used: {why}")
    return _fusion_choice(call, REFERENCE, why, verdicts)


def _select(call: Call) -> FusionChoice:
    """The candidate for a call, by what was stored, by measurement if the user asked for it, or the first proven."""
    if answered(call):
        return _fusion_choice(call, REFERENCE, "its candidates are tuned", [])
    switch = in_force(call.op)
    if not switch.templates:
        return _fusion_choice(call, REFERENCE, "templates are switched off", [])
    valid, refused = candidates(call)
    verdicts = [Verdict(name, "refused", why) for name, why in refused.items()]
    valid = [c for c in valid if switch.only in c.label]
    if not valid:
        return _fusion_choice(call, REFERENCE, "no template takes this call", verdicts)
    if collect(call, valid):
        return _fusion_choice(call, REFERENCE, "candidates were collected", verdicts)
    if call.sizes.problem:
        return _unproven(call, call.sizes.problem, verdicts)
    if switch.only:
        return _first_proven(call, valid, verdicts, f"only {switch.only!r} may be chosen")
    selection = Selection.of(call)
    if (choice := known(selection)) is not None:
        return _stored(call, valid, verdicts, choice)
    if not inductor_lowering.autotuning() or tuned_choices.frozen or (why := blocked()):
        reason = "the first candidate that is proven; mode='max-autotune' measures"
        if inductor_lowering.autotuning():
            reason = f"not measured: {'choices are frozen' if tuned_choices.frozen else why}"
        first = preferred(selection, [c.label for c in valid])
        return _by_default(call, valid, verdicts, reason, first)
    choice, measured = measure(selection, valid)
    return _fusion_choice(call, choice.label, choice.reason, [*measured, *verdicts])


def _likely(call: Call) -> TemplateCandidate | None:
    """What is proven first for a call, where nothing is measured; None where nothing has to be."""
    switch = in_force(call.op)
    valid = [c for c in candidates(call)[0] if switch.only in c.label] if switch.templates else []
    if call.sizes.problem:
        return None
    if switch.only or not valid:
        return next(iter(valid), None)
    selection = Selection.of(call)
    choice = known(selection)
    if choice is None:
        if inductor_lowering.autotuning() and not tuned_choices.frozen:
            return None  # candidates are measured, and compiled beside each other for that
        first = preferred(selection, [c.label for c in valid])
    else:
        first = choice.label
    if first in (REFERENCE, UNTUNED_REFERENCE) or (choice is not None and choice.origin == "stored"):
        return None
    return next(iter(_in_order(valid, first)), None)


def _in_order(valid: list[TemplateCandidate], first: str) -> list[TemplateCandidate]:
    """Those that are tried without a measurement, beginning with the one named ``first`` if there is one."""
    taken = [c for c in valid if c.template.default or c.label == first]
    return sorted(taken, key=lambda c: c.label != first) if any(c.label == first for c in taken) else taken


def _stored(call: Call, valid: list[TemplateCandidate], verdicts: list[Verdict], choice: Choice) -> FusionChoice:
    """A stored choice was verified when it was measured, of this very source on this machine; another one is proven."""
    if choice.origin != "stored":
        return _by_default(call, valid, verdicts, f"{choice.origin}: {choice.reason}", choice.label)
    if choice.kernel == REFERENCE or any(c.label == choice.label for c in valid):
        return _fusion_choice(call, choice.label, f"stored: {choice.reason}", verdicts)
    return _by_default(call, valid, verdicts, f"the stored choice {choice.label} does not take this call")


def _by_default(
    call: Call, valid: list[TemplateCandidate], verdicts: list[Verdict], reason: str, first: str = ""
) -> FusionChoice:
    """The choice where nothing is measured. ``first``: what was chosen for the call without its neighbours."""
    if first in (REFERENCE, UNTUNED_REFERENCE):
        return _fusion_choice(call, first, f"the choice of sl.tune; {reason}", verdicts)
    taken = _in_order(valid, first)
    if any(c.label == first for c in taken):
        reason = f"the choice of sl.tune; {reason}"
    if not taken:
        return _fusion_choice(
            call, REFERENCE, "templates are chosen by measurement only: mode='max-autotune'", verdicts
        )
    return _first_proven(call, taken, verdicts, reason)


def _first_proven(call: Call, valid: list[TemplateCandidate], verdicts: list[Verdict], reason: str) -> FusionChoice:
    for candidate in valid:
        verdicts.append(prove(candidate))
        if verdicts[-1].status == "ok":
            return _fusion_choice(call, candidate.label, reason, verdicts)
        _warn(call.op, verdicts[-1])
    return _fusion_choice(call, REFERENCE, "no template is proven for this call", verdicts)


def fallback(call: Call, overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The node of an op without a template: a call of its own kernel, or its reference traced into the graph."""
    if call.op.own(call.device.type):  # a template that runs by itself is what was refused here
        return _opaque(call, overload, args, kwargs)
    try:
        graph = inductor_lowering.trace(call.reference, list(call.tensors.values()))
    except Exception:  # a reference that cannot be traced is called as it stands
        return _opaque(call, overload, args, kwargs)
    return inductor_lowering.inline(
        graph, call.nodes
    )  # if the user asked for it, tuned by Inductor as any PyTorch code is


def _opaque(call: Call, overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The op as a call of itself. SL307 in a package, where Python would run it."""
    if aot_packages.packaging():
        kinds = {a.name: a.tensor for a in call.op.spec.tensors if a.tensor and not a.tensor.concrete}
        dtypes = {kinds[name].dtype_class: dtype for name, dtype in call.dtypes.items() if name in kinds}
        refuse_python(call.op, Binding((), {}, dtypes, call.device))
    return inductor_lowering.extern(overload, args, dict(kwargs))


def _warn(op: Op, verdict: Verdict) -> None:
    notice(
        f"template {op.identity} {verdict.candidate}",
        f"{op.spec.name}: {verdict.candidate} is {verdict.status} and is not used ({verdict.detail})",
    )


def _fusion_choice(call: Call, chosen: str, reason: str, verdicts: list[Verdict]) -> FusionChoice:
    sizes = ", ".join(f"{k}={v}" for k, v in call.hints.items())
    sizes += f"; any {call.sizes.text}" if call.sizes.text and chosen != REFERENCE else ""
    dtypes = ", ".join(f"{k} {str(v).removeprefix('torch.')}" for k, v in call.dtypes.items())
    node = inductor_lowering.current_node().name
    return FusionChoice(call.op.spec.name, node, sizes, dtypes, chosen, reason, tuple(verdicts))
