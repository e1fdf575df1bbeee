"""``sl.judge``: load reference and candidate, check the candidate, time it, and return the verdict."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shiplap.errors import error, error_line
from shiplap.judge.checks import (
    ENDURANCE_CALLS,
    Endurance,
    JudgeSession,
    ProgressReport,
    check_new_parameters,
    compare_gradients,
)
from shiplap.judge.clock import MIN_ROUNDS, ImplausibleTiming, measure_form, remeasure_without_candidate
from shiplap.judge.conditions import call_elsewhere
from shiplap.judge.declined import FAR_LACK, decline_form
from shiplap.judge.new_shapes import NewShapes
from shiplap.judge.options import JudgeBudget, JudgeOptions, StepDeadline
from shiplap.judge.problem import SEEDING, SLOW_CALL_S
from shiplap.judge.processes import JudgedProcesses, not_started
from shiplap.judge.resubmission import describe_resubmission
from shiplap.judge.result import JudgeResult, Reason, StageClock
from shiplap.judge.target import JudgeTarget, load_subject
from shiplap.judge.variants import InputForm
from shiplap.sampling.ledger import JUDGE, Cell
from shiplap.sampling.perturb import perturb_arguments
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sandbox.candidate import CandidateError, DeviceUnavailable, MachineLack, TargetProcess
from shiplap.sandbox.device_memory import DeviceError
from shiplap.sandbox.machine_lack import bounded_memory, is_lack
from shiplap.sandbox.protocol import OperatorUse
from shiplap.sandbox.request_errors import ProcessEnded, Timeout
from shiplap.sandbox.source_scan import (
    constants_in_sources,
    find_suspicious_names,
    parameters_in_source,
)
from shiplap.sandbox.supervisor import SandboxedProcess, SandboxLauncher
from shiplap.sandbox.unsteady_source import find_unsteady_decisions

__all__ = ["JudgeOptions", "judge"]

TIMING_ATTEMPTS = 3  # measurements before implausible times count as a fault
LEAST_SHAPES, MOST_SHAPES = 4, 14
QUEUED_KERNELS = 960  # kernels that a GPU can queue, less some for the clock
# Shares of the remaining time for each stage, in the order of the stages.
CHOOSING_SHARE = 0.3  # the search for forms that the reference accepts
CHECKING_SHARE = 0.6  # the comparison of all forms, after the first call
ENDURING_SHARE = 0.5  # many calls, and gradients
EXTRA_SHARE = 0.15  # gradients that nobody asks for
TIMING_SHARE = 0.85  # times while the candidate's process exists
UNCHECKED_OF_FUNCTIONS = ["other dtypes, empty tensors, NaN and infinity"]
LOOKED_BY = {axis: part for (axis, duty), part in JUDGE.items() if duty == "value"}
REFERENCE, CANDIDATE = ("Model", "reference"), ("ModelNew", "candidate", "Model")


def judge(
    reference: Any,
    candidate: Any,
    *,
    inputs: Any = None,
    options: JudgeOptions | None = None,
    launcher: SandboxLauncher | None = None,
    report: ProgressReport = lambda what, done, total: None,
    turn: Callable[[bool], None] | None = None,
    same_operators: bool = False,
    **changes: Any,
) -> JudgeResult:
    """Compare ``candidate``, which is not trusted, with ``reference``, which is trusted, and return the verdict with
    its reasons and times.

    Shiplap imports and calls the candidate only in a sandboxed process.

    Args:
        reference, candidate: each ``"path/to/file.py:name"``, ``"module:name"``, or a function, a class or an op at the
            top level of a file.
        inputs: a function, or ``"file.py:name"`` of a function, that returns the arguments of one call. By default it
            is ``get_inputs`` in the file of the reference. A declared op needs none.
        options: the options, by default ``JudgeOptions()``.
        launcher: a launcher to reuse, which saves its start. By default each judgement starts one.
        report: called with ``(stage, done, total)`` to show progress.
        turn: a function that is called between the steps of the judgement, with True before times are measured and with
            False otherwise. It may wait for other judgements, since the time that it takes does not count.
        same_operators: whether the candidate may run the framework's operators as the reference does. The compiled
            reference does so where the compiler calls a library, as for a convolution.
        changes: fields of :class:`JudgeOptions` that replace those of ``options``.

    Raises:
        ShiplapError: ``SL501`` or ``SL601`` for a reference that cannot be loaded. ``SL615`` if its inputs cannot be
            made. ``SL616`` if the reference fails on its inputs. ``SL617`` if no sandboxed process can be started. A
            fault of the candidate raises no error. It becomes a reason of the verdict.

    Example:
        >>> result = sl.judge("problem.py:Model", "generated.py:ModelNew", seconds=30)
        >>> result.verdict, result.min_speedup
    """
    options = replace(options or JudgeOptions(), **changes)
    budget = JudgeBudget(time.monotonic(), options.seconds)
    # One call must not use up the time of the judgement.
    one_call = min(options.bounds.seconds, budget.one_call)
    options = replace(options, bounds=replace(options.bounds, seconds=one_call))
    # Only the kernel of Linux can lock a process in as the sandbox does.
    if not sys.platform.startswith("linux"):
        raise error("SL617", where="judge", got=sys.platform, expected="Linux, whose kernel can lock a process in")
    asked = JudgeTarget.of(reference, REFERENCE)
    judged = JudgeTarget.of(candidate, (*CANDIDATE, *asked.names))
    clock = StageClock()
    with _closed_in_stage(clock, "end") as stack:
        home = launcher or stack.enter_context(SandboxLauncher())
        _begin(home)  # it imports torch while the reference is loaded
        with clock.stage("reference"), SEEDING:
            made = load_subject(
                asked,
                inputs,
                device=options.device,
                sizes=options.sizes,
                tolerance=options.tolerance,
                vary_shapes=options.vary_shapes,
                vary_layouts=options.vary_layouts,
                seed=secrets.randbits(62),
            )
        case = JudgeSession(options, made, judged, asked, report, budget, turn, same_operators, clock=clock)
        read = judged.read_digests()
        _run_checks(case, home, stack)
    # Somebody else did: a sandboxed process cannot write there.
    if changed := sorted(dict(judged.read_digests().items() ^ read.items())):
        case.missing["sources"] = f"{changed[0]}, a source of the candidate, was changed while it was judged: try again"
    cells = _cells_of(case)
    if not case.reasons:  # a refusal ends the judgement early, so that cells stay untouched by its own doing
        case.missing.update({str(c): c.reason for c in cells if c.required and c.state == "untouched"})
    return JudgeResult(
        _target_label(asked, reference),
        _target_label(judged, candidate),
        tuple(case.reasons),
        tuple(case.missing.items()),
        tuple(case.unchecked),
        tuple(case.timings),
        case.calls,
        time.monotonic() - case.budget.began,
        cells,
        clock.times(),
    )


def _begin(launcher: SandboxLauncher) -> None:
    """Start the process of ``launcher``. Raise ``SL617`` if it does not start, or ends at once."""
    try:
        launcher.preload()
    except (ProcessEnded, OSError) as e:  # such as no further open file
        raise not_started(e) from None


@contextmanager
def _closed_in_stage(clock: StageClock, name: str) -> Iterator[ExitStack]:
    """Return a context manager whose value is an ``ExitStack``. The stack is closed at the end of the body, and the
    time that this takes is that of the stage ``name``. Processes that use a GPU take a while to end.
    """
    stack = ExitStack()
    try:
        yield stack
    finally:
        with clock.stage(name):
            stack.callback(_kill_all, clock.prisoners)  # before anything else that the stack ends
            stack.close()


def _kill_all(prisoners: Sequence[SandboxedProcess]) -> None:
    """Kill sandboxed processes side by side, since each takes a while to leave a GPU. Where no thread can be started,
    kill one after the other.
    """
    try:
        with ThreadPoolExecutor(max(1, len(prisoners))) as pool:
            list(pool.map(SandboxedProcess.kill, prisoners))
    except RuntimeError:
        for prisoner in prisoners:
            prisoner.kill()


def _cells_of(case: JudgeSession) -> tuple[Cell, ...]:
    """Return the cells of the report, one for each pair of a property of inputs (such as ``size``) and an obligation
    (such as the gradient).

    A cell says how many samples were compared. If the reference accepts no variation of the property, or the caller has
    switched it off, the cell has this reason instead.
    """
    refused, options = "the reference accepts no other than its own", case.options
    case.ledger.absent = {axis: refused for axis in LOOKED_BY if case.tried and axis not in case.tried}
    case.ledger.absent.pop("order of calls", None)
    if "absence" in case.ledger.absent:
        case.ledger.absent["absence"] = "no argument may be left out"
    if not options.vary_shapes:
        waived = "the caller asks for the shapes of the inputs alone"
        case.ledger.absent |= dict.fromkeys(("size", "scalar", "absence"), waived)
    if not options.vary_layouts:
        case.ledger.absent |= dict.fromkeys(("layout", "alignment"), "the caller asks for contiguous memory alone")
    for (axis, duty), reason in case.waived.items():
        case.ledger.decline(JUDGE[axis, duty], (axis,), (duty,), reason)
    declined = {JUDGE[key] for key in case.waived}
    state = "incomplete" if case.missing else "ok"
    return case.ledger.cells(JUDGE, {part: ("ok" if part in declined else state, "") for part in JUDGE.values()})


def _target_label(target: JudgeTarget, given: Any) -> str:
    """Return the name of a target for reports, such as ``problem.py:Model``. It is the name of the target's file or
    module. The object's name follows if ``given``, which the caller passed, is an object or a string with a colon.
    """
    home = Path(target.home).name if target.home.endswith(".py") else target.home
    named = not isinstance(given, (str, os.PathLike)) or ":" in str(given)
    return f"{home}:{target.names[0]}" if named else home


def _run_checks(case: JudgeSession, launcher: SandboxLauncher, stack: ExitStack) -> None:
    """Run all checks of a judgement, from cheap to expensive, and record faults and gaps in ``case``. A known fault
    ends the judgement before the next expensive check.
    """
    if case.candidate.file and case.candidate.file == case.reference.file:
        case.missing["separation"] = "reference and candidate are in one file: importing one runs the other"
    case.unchecked += UNCHECKED_OF_FUNCTIONS if case.subject.kind != "reference" else []
    if case.subject.kind != "reference" and not case.options.vary_layouts:
        case.unchecked.append("layouts other than contiguous ones")
    case.unchecked += [
        "fakes, torch.compile, graph replay and second gradients: 'shiplap audit' looks at those of an op"
    ]
    # Cheap, and before any code of the candidate runs.
    if names := find_suspicious_names(case.candidate.file, case.candidate.names):
        case.reasons.append(Reason("source", "; ".join(names[:5]), case.candidate.names[0]))
    if decisions := find_unsteady_decisions(case.candidate.file):
        case.missing["later calls"] = (
            f"it decides by what other calls have otherwise, {decisions[0]}: none shows that later ones are right"
        )
    with case.record_faults("all calls"), _note_lack(case):
        with case.clock.stage("start"):
            processes = JudgedProcesses(case, launcher, stack)
        case.missing |= {f"sandbox: {k}": v for k, v in processes.missing.items()}
        with case.clock.stage("forms"):  # while the processes load what they will call
            forms = _choose_forms(case)
        if not forms:
            return
        with case.clock.stage("load"):
            witness = processes.candidate()
        # Of a form for which the machine lacks memory nobody knows whether the reference accepts it.
        case.tried = {axis for form in (*forms, *case.problem.lacked) for axis in _axes(forms[0], form)}
        with case.clock.stage("values"):
            forms = _check_inputs(case, witness, forms)
        share = ENDURING_SHARE if case.subject.gradients or case.options.gradients else EXTRA_SHARE
        # Each of these is expensive and needs right results, so a known fault ends the judgement.
        checks: dict[str, Callable[[], None]] = {
            "parameters": lambda: check_new_parameters(case, witness, forms[0]),
            "calls": lambda: _check_many_calls(case, witness, forms, case.budget.time_of_share(ENDURING_SHARE)),
            "gradients": lambda: compare_gradients(case, witness, forms, case.budget.time_of_share(share)),
            "operators": lambda: _compare_operators(case, witness, processes.reference(), forms),
            "times": lambda: _measure_all_forms(case, witness, processes, forms),
        }
        for stage, check in checks.items():
            if not case.reasons:
                case.wait_for_others(times=stage == "times" and case.options.timed)
                with case.clock.stage(stage):
                    check()


def _choose_forms(case: JudgeSession) -> list[InputForm]:
    """Return the forms of inputs (shapes and kinds of values) on which the candidate is compared with the reference.
    The list is empty if results of the reference cannot be compared at all.

    The search ends early if the reference takes too long. This is recorded in ``case`` as a missing check.
    """
    # Constants of the source of the candidate become sizes: a kernel may branch on them.
    case.problem.until = case.budget.time_of_share(CHOOSING_SHARE)
    case.problem.accepted = parameters_in_source(case.candidate.file, case.candidate.names)
    forms = case.problem.forms(constants_in_sources(case.candidate.file), most=_max_other_shapes(case))
    if case.problem.hurried:
        case.missing["other inputs"] = "the reference takes too long to find all that it accepts"
    if far := [form.label for form in case.problem.lacked if form.far_size]:
        case.missing["far sizes"] = f"{FAR_LACK}: {far[0]}"
    if case.problem.untried:
        why = "to look for indices out of range in them takes too long"
        case.unchecked.append(f"{case.problem.untried} other inputs: {why}")
    return forms if _reference_is_comparable(case, forms) else []


def _reference_is_comparable(case: JudgeSession, forms: Sequence[InputForm]) -> bool:
    """Return whether the results of a candidate can be compared with those of the reference at all. They cannot if the
    reference draws random numbers.

    Arguments that never vary and comparisons that mean little are recorded in ``case``.
    """
    if case.problem.constant:
        case.unchecked.append("times on the inputs that come with the reference: some are always the same")
    given, alike = {f.given[0] for f in forms if f.given}, {f.alike for f in forms}
    for number in (n for n in case.problem.absent if n not in given):
        why = f"argument {number} is always None: let get_inputs give a tensor there in some draws, or leave it out"
        case.note_always_alike("absence", why)
    for number in (n for n in case.problem.always if n not in alike and n not in case.problem.flags):
        why = f"tensor argument {number} has the same integers in each draw: let get_inputs give others in some draws"
        case.note_always_alike(f"integers of {number}", why)
    other = {f.text[0] for f in forms if f.text is not None}
    for number in (n for n in case.problem.texts if n not in other):
        why = f"argument {number} is the same text in each draw: let get_inputs give others in some draws"
        case.note_always_alike(f"text of {number}", why)
    # Smaller shapes that stand for large ones come first: as a rule, one look at results is enough.
    stands = [f for f in forms if f.reduced and f.usual][:1]
    unfit = case.problem.why_unfit([*stands, *(f for f in forms if f.timed)] or forms[:1])
    case.missing.update([unfit] if unfit else [])
    return "values" not in case.missing


@contextmanager
def _note_lack(case: JudgeSession) -> Iterator[None]:
    """Return a context manager that catches errors for lack of time, memory, a device or another resource, and records
    them in ``case.missing``. A recorded lack makes the verdict incomplete.
    """
    try:
        yield
    except Timeout as e:
        case.missing["time"] = f"{e}: it takes longer than {case.options.seconds:g} s"
    except (DeviceUnavailable, DeviceError, torch.OutOfMemoryError) as e:
        case.missing["device"] = str(e)[:300]
    except (MachineLack, MemoryError, OSError, RuntimeError) as e:
        if not isinstance(e, MachineLack) and not is_lack(e):
            raise
        case.missing["machine"] = error_line(e)[:300]


def _max_other_shapes(case: JudgeSession) -> int:
    """Return how many shapes to try besides those of the reference's own inputs. The number is between 4 and 14, and is
    smaller for a slow reference.
    """
    return max(LEAST_SHAPES, min(MOST_SHAPES, int(0.02 * case.options.seconds / max(case.problem.takes, 1e-4))))


def _check_inputs(case: JudgeSession, witness: TargetProcess, forms: Sequence[InputForm]) -> list[InputForm]:
    """Compare the candidate, in the process ``witness``, with the reference on inputs of every form (shapes and kind of
    values). Return the forms without those that were left out, since the candidate takes long for each new shape.

    Forms that will be timed are compared first, unless the candidate is slow. Unless shapes were reduced, they are
    compared again at the end. Faults, missing checks and the properties of inputs that were varied are recorded in
    ``case``.
    """
    ranked = sorted(forms, key=lambda f: not f.timed)
    ranked += [f for f in forms if f.timed] if not any(f.reduced for f in forms) else []
    enough = case.budget.time_of_share(CHECKING_SHARE)
    # A step of a large shape says nothing about how long one of a smaller shape takes.
    paces = {reduced: StepDeadline(case.budget.last) for reduced in (False, True)}
    brief = case.problem.takes > SLOW_CALL_S and any(f.reduced for f in forms)
    answered, shapes = witness.prisoner.answering, NewShapes(case.candidate.file, case.options.seconds)
    for number, form in enumerate(ranked):
        case.report("look", number, len(ranked))
        if shapes.defers(form, case.first_call):
            ranked.append(form)
            continue
        if shapes.leaves_out(form):
            continue
        before = witness.prisoner.answering
        if time.monotonic() > enough and number > sum(f.timed for f in forms):
            case.missing["inputs"] = f"{len(ranked) - number} of {len(ranked)} were not reached in the time"
            break
        compared = False
        with case.record_faults(form.label), decline_form(case, form), bounded_memory():
            compared = _check_one_form(case, witness, form, paces[form.reduced], brief=brief)
            for axis in _axes(forms[0], form) if compared else ():
                case.ledger.look(LOOKED_BY[axis], (axis,), ("value",))
        shapes.note(form, witness.prisoner.answering - before, compared=compared)
        enough += case.wait_for_others(*paces.values())
        if not number:  # the first call may compile, so the share begins after it
            case.first_call = witness.prisoner.answering - answered
            enough = case.budget.time_of_share(CHECKING_SHARE)
        if len(case.reasons) >= 3 or any(r.check in ("process", "memory") for r in case.reasons):
            break
    case.unchecked += shapes.describe(forms)
    if not case.calls and not case.reasons:
        case.missing.setdefault("inputs", "the reference took none of the inputs")
    return [form for form in forms if form.label not in shapes.left_out]


def _axes(first: InputForm, form: InputForm) -> list[str]:
    """Return the names of the properties (``size``, ``value``, ``scalar``, ``layout``, ``alignment``, ``absence``) in
    which inputs of ``form`` differ from those of ``first``.
    """
    recipe, usual = form.recipe or SampleRecipe(), first.recipe or SampleRecipe()
    layouts = {form.layout, *dict(recipe.layouts).values()} - {""}
    varied = {
        "size": form.shapes != first.shapes or recipe.sizes != usual.sizes,
        "value": not form.usual or recipe.values != usual.values,
        "scalar": bool(form.plain or form.text or form.added) or recipe.scalars != usual.scalars,
        "layout": bool(layouts - {"offset"}),
        "alignment": "offset" in layouts,
        "absence": form.given is not None or recipe.absent != usual.absent,
    }
    return [axis for axis, differs in varied.items() if differs]


def _check_one_form(
    case: JudgeSession, witness: TargetProcess, form: InputForm, pace: StepDeadline, *, brief: bool = False
) -> bool:
    """Compare the candidate's results with the reference's on inputs of one form (shapes and kind of values). Raise
    ``CandidateError`` if they differ. Return False if the reference refuses the inputs, so that nothing is compared.

    If the form will be timed, up to three further calls are compared, with nearby values and with new values in the
    same tensors. Set ``brief`` to true if the reference is slow and some shapes stand for large ones. Then only one
    further call is made on the large shapes, and all three are made on the smaller ones.
    """

    def look(args: tuple[Any, ...], *, in_place: bool = False) -> None:
        """Call the candidate once on ``args`` and compare its results with the reference's. If ``in_place`` is true,
        the values are written into the tensors of the previous call, so a candidate that stores results by address
        fails. Otherwise the call gets new tensors.
        """
        with pace.step(witness.prisoner):
            witness.call(args, case.problem.expect_effects(form, args), in_place=in_place)
        case.calls += 1

    with pace.step(witness.prisoner):
        args = case.problem.draw(form)
        try:
            expected = case.problem.expect_effects(form, args)
        except Exception as e:  # the reference refuses these values
            if is_lack(e):
                raise
            return False
        witness.call(args, expected)
    case.calls += 1
    # The same tensors cannot be passed again once they were written to.
    if expected.changed or not (form.timed or (brief and form.reduced and form.usual)):
        return True
    with SEEDING:  # it draws from the generators of this process
        near = perturb_arguments(args)
    if not case.problem.gives_numbers(near):  # values may have to fit together, as in a matrix that is symmetric
        near = case.problem.draw(form)
    # In place: a cache that is keyed by address or version returns the old result.
    look(near, in_place=True)
    if brief and not form.reduced:
        return True
    look(near)
    look(case.problem.draw(form), in_place=True)
    return True


def _check_many_calls(case: JudgeSession, witness: TargetProcess, forms: Sequence[InputForm], ends: float) -> None:
    """Call the candidate many times on the form (shapes and kind of values) with the fewest elements, and compare the
    results. Record faults and leaks in ``case``. If fewer than 100 calls are made before ``ends``, for whatever reason,
    record a missing check, since nothing shows then that the candidate does not leak.
    """
    usual = [f for f in forms if f.usual] or list(forms)
    form = min(usual, key=case.problem.count_elements)
    args = case.problem.draw(form)
    many = Endurance(case.problem, witness, StepDeadline(case.budget.last))
    with case.record_faults(f"{form.label}, one of many calls"):
        try:
            many.run(form, args, ends, case.options.seconds)
        finally:
            case.calls += many.made
            if many.made:
                case.ledger.look(LOOKED_BY["order of calls"], ("order of calls",), ("value",), many.made)
    if not case.reasons and many.made < ENDURANCE_CALLS:
        case.missing["calls"] = (
            f"only {many.made} of {ENDURANCE_CALLS} calls of the smallest shapes were reached in the time"
        )


def _in_any_order(operators: list[OperatorUse] | str) -> list[str] | str:
    """Return the operators as a sorted list of strings, since the threads of one call run them in any order. If
    ``operators`` is a string, which says why they were not read, return it unchanged.
    """
    return operators if isinstance(operators, str) else sorted(map(repr, operators))


def _compare_operators(
    case: JudgeSession, witness: TargetProcess, twin: TargetProcess, forms: Sequence[InputForm]
) -> None:
    """Compare the framework operators that a call of the candidate in ``witness`` and a call of the reference in
    ``twin`` run. Raise ``CandidateError`` if the candidate runs the reference's own operators again, or other operators
    in its second call.

    If the operators of the candidate cannot be listed, record a missing check. The numbers of operators also bound how
    many calls of a batch a GPU can queue.
    """
    form = next((f for f in forms if f.timed), forms[0])
    args = case.problem.draw(form)
    expected = case.problem.expect_effects(form, args)
    with ThreadPoolExecutor(1) as pool:  # side by side, since nothing is timed here
        theirs = pool.submit(twin.list_operators, args, expected, trusted=True)
        first, own = witness.list_operators(args, expected), theirs.result()
    if isinstance(first, str):
        case.missing["operators"] = f"those of a call of the candidate cannot be listed: {first}"[:300]
        return
    if isinstance(own, str):
        case.unchecked.append(f"whether the candidate is the reference again, whose operators cannot be listed: {own}")
    if same := describe_resubmission(own, first):
        if not case.same_operators:
            raise CandidateError("resubmitted", same)
        case.unchecked.append("whether the candidate is the reference again, which the caller allows")
    # A candidate may hide its operators in the first call only.
    again = witness.list_operators(args, expected)
    if isinstance(again, str):
        case.missing["operators"] = f"those of a second call of the candidate cannot be listed: {again}"[:300]
        return
    if _in_any_order(again) != _in_any_order(first):
        raise CandidateError("remembers", "a second call on the same values runs other operators than the first")
    witness.check_interpreter()
    if case.options.device != "cpu":
        most = max(sum(use.count for use in listed) for listed in (first, own) if not isinstance(listed, str))
        case.problem.queueable = min(case.problem.queueable, max(1, QUEUED_KERNELS // max(1, most)))


def _measure_all_forms(
    case: JudgeSession, witness: TargetProcess, processes: JudgedProcesses, forms: Sequence[InputForm]
) -> None:
    """Time the candidate in ``witness`` and the reference, one of ``processes``, on every form of inputs (shapes and
    kind of values) that is to be timed. Add the times to ``case``.
    """
    timed = [f for f in forms if f.timed]
    if not case.options.timed:
        case.unchecked.append("time")
        call_elsewhere(case, witness, forms[0])
        return
    twin = processes.reference()
    judged = {"candidate": witness, "reference": twin, "nothing": twin}
    if case.options.compiled:
        try:
            judged["compiled"] = processes.start_compiled(timed)
        except (CandidateError, DeviceUnavailable, Timeout) as e:
            case.unchecked.append(f"torch.compile of the reference: {e}"[:200])
    # From here on, a process that it started could compute while the candidate itself is stopped.
    witness.prisoner.end_strays()
    witness.prisoner.alone = True
    # Earlier results are released in the first call, so later ones cost no more than in the reference.
    witness.forget_results()
    ends, large = case.budget.time_of_share(TIMING_SHARE), any(f.reduced for f in forms)
    took = 0.0
    for number, form in enumerate(timed):
        case.report("time", number, len(timed))
        if case.timings and large and time.monotonic() + took > ends:
            case.unchecked.append(f"times of {form.label}: {case.options.seconds:g} s are too short for them")
            continue
        began = time.monotonic()
        left = max(0.0, ends - time.monotonic()) / (len(timed) - number)
        with case.record_faults(form.label):
            _measure_one_form(case, form, judged, left)
        took = time.monotonic() - began
        if case.reasons:
            return
    # Last of all, since what it keeps of this call may serve no other.
    call_elsewhere(case, witness, timed[0] if timed else forms[0])
    if case.reasons or "autocast" in case.missing:  # where it may have ended its process
        return
    witness.check_interpreter()
    witness.end()  # work that it left on a device ends with the process
    del judged["candidate"]
    by_label = {form.label: form for form in timed}
    pace = StepDeadline(case.budget.last)
    case.timings[:] = [
        remeasure_without_candidate(case.problem, by_label[t.input], judged, t, pace, case.budget.ends)
        for t in case.timings
    ]


def _measure_one_form(case: JudgeSession, form: InputForm, judged: Mapping[str, TargetProcess], seconds: float) -> None:
    """Time calls on inputs of one form (shapes and kind of values) in about ``seconds``, and add the times to ``case``.

    Implausible times are measured up to three times. If they stay implausible, raise ``ImplausibleTiming``. If load on
    the machine may be the cause, record a missing check instead.
    """
    for attempt in range(TIMING_ATTEMPTS):
        try:
            rounds, ends = max(case.options.rounds, MIN_ROUNDS), time.monotonic() + seconds / (attempt + 1)
            case.timings.append(measure_form(case.problem, form, judged, rounds, ends, StepDeadline(case.budget.last)))
            case.calls += case.timings[-1].rounds
            return
        except ImplausibleTiming as e:
            doubt = e
    if doubt.proven:
        raise doubt
    waited = f"{100 * doubt.busy:.0f} % of the time was spent waiting for a processor"
    case.missing[f"time of {form.label}"] = f"the machine is busy: {doubt.evidence}; {waited}"
