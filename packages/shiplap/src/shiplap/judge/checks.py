"""The state of one judgement, and the checks of a candidate beside its results: many calls, parameters, gradients,
operators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shiplap.judge.gradient_jumps import gradient_jumps, settle_jumps
from shiplap.judge.options import JudgeBudget, JudgeOptions, StepDeadline
from shiplap.judge.problem import Args, JudgeProblem
from shiplap.judge.result import Reason, StageClock, Timed
from shiplap.judge.shapes import SECRET_RANDOM
from shiplap.judge.target import JudgeSubject, JudgeTarget
from shiplap.judge.variants import InputForm
from shiplap.sampling.case import tensors_among
from shiplap.sampling.compare import Reduction
from shiplap.sampling.ledger import Key, Ledger
from shiplap.sampling.rounding import compare_with_rounding, describe_kind_difference
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.call_batch import CallBatch
from shiplap.sandbox.candidate import CandidateError, ExpectedEffects, MachineLack, TargetProcess
from shiplap.sandbox.equal_bits import bits_are_equal
from shiplap.sandbox.machine_lack import is_lack
from shiplap.sandbox.proc_filesystem import ProcessResources, read_process_resources

ProgressReport = Callable[[str, int, int], None]
ENDURANCE_CALLS, EARLY_CALLS = 100, 30  # calls one by one, and calls after which lazy allocations are over
EARLY_BATCHES = 8  # batches after which these are over there
# Further calls on a CPU, how many of them a batch has, and the share of the time of the judgement that they may take.
LATE_CALLS, CALLS_AT_ONCE, LATE_SHARE = 4096, 32, 0.1
FRESH_SHARE, KEPT_PAIRS = 0.5, 8  # share of the time of the calls one by one for new values, and values kept for later
LEAKS_PER_CALL, LEAKED_BYTES = 0.5, 32 << 20  # a leak: files or threads for each further call, or bytes in all
LATE_S = 100e-6  # seconds for which other streams may work after a call
NEAR_ZERO = 1e-2  # the size of a parameter behind which the rest of a model would hide
GRADIENT_FORMS = 4  # other forms on which gradients are compared
GRADIENTS_ALONE = 3  # arguments of which each is the only one that requires a gradient in one comparison
GRADIENT_OTHER_LAYOUTS, COMPILING_S = 3, 2.0  # forms of other layouts, and seconds of a comparison that compiles
MAX_JUMPS = 0.5  # the share of elements at which a reference's gradient may jump in a comparison that counts
GRADIENT_LAYOUTS = ("plain", "one", "turned")  # memory layouts of the gradients of results, in turn


@dataclass
class JudgeSession:
    """The state of one judgement. It holds the request, and the faults, gaps and times that were found so far.

    Attributes:
        subject: the reference, with the arguments that its constructor takes.
        candidate, reference: the location of each, as a module or file and a name.
        report: called with ``(stage, done, total)`` to show progress.
        turn: a function that is called between the steps of the judgement (see ``judge``). The deadlines are moved by
            the time that it takes.
        same_operators: whether the candidate may run the framework's operators as the reference does.
        reasons: the faults of the candidate. One is enough for a refusal.
        missing: the comparisons that were not made, each with the reason. One is enough for an incomplete verdict.
        unchecked: properties that the verdict does not cover.
        timings: the times, one entry for each timed form of inputs (shapes and kind of values).
        calls: the number of the candidate's calls whose results were compared.
        ledger: the numbers of these calls, for each property of inputs (such as ``size``) and each thing that is
            compared (such as ``gradient``).
        tried: the properties of inputs that some form of inputs varies.
        waived: the required pairs of a property and a thing to compare that do not apply, with the reason.
        first_call: the seconds of the first comparison of the candidate, which may have compiled it.
        clock: the times of the stages so far.
    """

    options: JudgeOptions
    subject: JudgeSubject
    candidate: JudgeTarget
    reference: JudgeTarget
    report: ProgressReport
    budget: JudgeBudget
    turn: Callable[[bool], None] | None = None
    same_operators: bool = False
    reasons: list[Reason] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)
    timings: list[Timed] = field(default_factory=list)
    calls: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    tried: set[str] = field(default_factory=set)
    waived: dict[Key, str] = field(default_factory=dict)
    first_call: float = 0.0
    clock: StageClock = field(default_factory=StageClock)

    @property
    def problem(self) -> JudgeProblem:
        """The problem of this judgement. It draws the arguments of calls, and computes the results that the candidate
        must return.
        """
        return self.subject.problem

    def wait_for_others(self, *paces: StepDeadline, times: bool = False) -> float:
        """Call ``turn``, which waits while another judgement measures times, or until no other one works if ``times``
        is true. Return the seconds of the wait, which are 0 if ``turn`` is None. The time is granted to this judgement,
        as by ``granted_time``.
        """
        began = time.monotonic()
        if self.turn is None:
            return 0.0
        with self.granted_time(*paces):
            self.turn(times)
        return time.monotonic() - began

    @contextmanager
    def granted_time(self, *paces: StepDeadline) -> Iterator[None]:
        """Return a context manager for a wait that is no work of this judgement. The deadlines of the judgement, of its
        processes and of the stages ``paces`` are moved by the time that the body takes.
        """
        began = time.monotonic()
        try:
            yield
        finally:
            self.grant(time.monotonic() - began, *paces)

    def grant(self, seconds: float, *paces: StepDeadline) -> None:
        """Move the deadlines of the judgement, of its processes and of the stages ``paces`` by ``seconds``, which are
        part of no stage.
        """
        self.budget = replace(self.budget, began=self.budget.began + seconds)
        for prisoner in self.clock.prisoners:
            prisoner.until += seconds
        self.clock.waited += seconds
        for pace in paces:
            pace.last += seconds

    def note_always_alike(self, name: str, why: str) -> None:
        """Record under ``name``, with the reason ``why``, that an argument has the same value in every draw.

        It is recorded as a missing check, which makes the verdict incomplete. If the option ``vary_shapes`` is off, it
        is recorded as an unchecked property instead.
        """
        if self.options.vary_shapes:
            self.missing[name] = why
        else:
            self.unchecked.append(why)

    @contextmanager
    def record_faults(self, label: str) -> Iterator[None]:
        """Return a context manager that catches a ``CandidateError`` and adds it to ``reasons``, the faults of the
        candidate. ``label`` names the inputs of the call that shows the fault.

        A ``MachineLack`` is not caught, since it says that the machine lacks a resource, and not that the candidate has
        a fault.
        """
        try:
            yield
        except MachineLack:  # it ends the judgement, since the process may be gone
            raise
        except CandidateError as e:
            self.reasons.append(Reason(e.check, e.evidence, label))


@dataclass
class Endurance:
    """A series of calls of the candidate on inputs of one form (shapes and kind of values), which shows leaks.

    It also holds the number of files and threads and the memory that the candidate's process had early in the series.

    ``made`` is the number of calls so far. ``own`` is the sum of their durations in seconds. ``late`` has,
    for each call, the seconds for which other streams of a GPU still worked after the call.
    """

    problem: JudgeProblem
    witness: TargetProcess
    pace: StepDeadline
    made: int = 0
    own: float = 0.0
    late: list[float] = field(default_factory=list)
    _early: ProcessResources = field(default_factory=ProcessResources)

    def run(self, form: InputForm, args: Args, ends: float, seconds: float) -> None:
        """Call the candidate 100 times on values of ``form`` (shapes and kind of values), and compare all results. On a
        CPU, batches of up to 4,096 further calls follow.

        Raise ``CandidateError`` for a wrong result, for work that continues after the call, or for a leak. ``args`` are
        the arguments of the first call. No call begins after the time ``ends`` (by ``time.monotonic``). If half of the
        time until then is over, earlier values are used again, since drawing and the reference may take longer than the
        candidate. ``seconds`` is the time of the whole judgement, of which the batches may take a tenth.
        """
        began = time.monotonic()
        pairs: list[tuple[Args, ExpectedEffects]] = []
        while self.made < ENDURANCE_CALLS and time.monotonic() < ends:
            with self.pace.step(self.witness.prisoner):
                if not pairs or time.monotonic() < began + FRESH_SHARE * (ends - began):
                    args = self.problem.draw(form) if pairs else args
                    pairs = [*pairs[1 - KEPT_PAIRS :], (args, self.problem.expect_effects(form, args))]
                    pair = pairs[-1]
                else:
                    pair = SECRET_RANDOM.choice(pairs)
                outcome = self.witness.call(*pair)
                self.own += outcome.wall
                self.late.append(outcome.late)
                self.made += 1
                # Allocators, caches and thread pools are filled by now, so later growth is a leak.
                if self.made == EARLY_CALLS:
                    self._early = self._held_resources()
        if self.late and (late := min(self.late)) > LATE_S:  # load on the machine delays single calls
            raise CandidateError("streams", f"work goes on for {late * 1e6:.0f} us after the call's own stream is done")
        if self.made == ENDURANCE_CALLS and (
            leak := describe_leak(self._early, self._held_resources(), ENDURANCE_CALLS - EARLY_CALLS)
        ):
            raise CandidateError("leaks", leak)
        if self.made == ENDURANCE_CALLS and all(t.device.type == "cpu" for t in tensors_among(args)):
            self._run_batches(form, min(ends, time.monotonic() + LATE_SHARE * seconds))

    def _run_batches(self, form: InputForm, ends: float) -> None:
        """Call the candidate in batches on values of ``form``, in shuffled order, and compare all results. End after
        4,096 further calls, or at the time ``ends`` by ``time.monotonic``. Do nothing if a call changes its arguments,
        or if shapes or plain arguments differ from draw to draw.
        """
        sets = [self.problem.draw(form) for _ in range(CALLS_AT_ONCE)]
        if len({str(ArgumentArena(0).pack(list(args))) for args in sets}) > 1:  # a batch has one layout
            return
        pairs = [(args, self.problem.expect_effects(form, args)) for args in sets]
        # Inputs that change would have to be written anew between the calls of a batch.
        if any(expected.changed for _, expected in pairs):
            return
        early, early_calls = ProcessResources(), ENDURANCE_CALLS + EARLY_BATCHES * CALLS_AT_ONCE
        with CallBatch(self.witness, 0, sets, blank=True) as batch:
            while self.made < ENDURANCE_CALLS + LATE_CALLS and time.monotonic() < ends:
                SECRET_RANDOM.shuffle(pairs)
                with self.pace.step(self.witness.prisoner):
                    batch.fill([args for args, _ in pairs])
                    batch.run_calls([expected for _, expected in pairs])
                    self.made += len(pairs)
                early = self._held_resources() if self.made == early_calls else early
            if self.made > early_calls and (
                leak := describe_leak(early, self._held_resources(), self.made - early_calls)
            ):
                raise CandidateError("leaks", leak)
        self.witness.forget_results()

    def _held_resources(self) -> ProcessResources:
        """Return the number of files and threads and the bytes of memory that the candidate's process holds now. The
        bytes of arguments and results that the process keeps for the judge are subtracted. It keeps no file for them.
        """
        now = read_process_resources(self.witness.prisoner.pid)
        return ProcessResources(now.files, now.threads, now.memory - self.witness.kept_bytes)


def describe_leak(before: ProcessResources, after: ProcessResources, calls: int) -> str:
    """Return a message that names the first resource that leaked between ``before`` and ``after``, or an empty string
    if none did. Files or threads leaked if their number grew by at least half of ``calls``. Memory leaked if it grew by
    more than 32 MiB.
    """
    for what, first, last in (("files", before.files, after.files), ("threads", before.threads, after.threads)):
        # Fewer may be caches that are still being filled.
        if last - first >= LEAKS_PER_CALL * calls:
            return f"{last - first} more {what} after {calls} more calls"
    if after.memory - before.memory > LEAKED_BYTES:
        return f"{(after.memory - before.memory) / 2**20:.0f} MiB more after {calls} more calls of the smallest shapes"
    return ""


def change_parameters(
    state: dict[str, Tensor], load: Callable[[dict[str, Tensor]], bool], *, zeros: bool = True
) -> bool:
    """Multiply the parameters in ``state`` by random factors, pass them to ``load``, and update ``state``. Return
    whether that was done.

    If there are no parameters or ``load`` returns False, return False with ``state`` unchanged. Each number has its own
    positive factor. If ``zeros`` is true, a parameter whose numbers are all near zero, as new biases are, gets positive
    random numbers instead. If it is false, such a parameter is multiplied, too.
    """
    other = {k: _scaled_parameter(v, zeros=zeros) for k, v in state.items()}
    if not other or not load(other):
        return False
    state.update(other)
    return True


def _scaled_parameter(value: Tensor, *, zeros: bool) -> Tensor:
    """Return a tensor like the parameter ``value`` with each number multiplied by a random factor of 0.5 to 1.5. A copy
    of ``value`` is returned if it holds no floating-point numbers.

    If ``zeros`` is true, a parameter whose numbers are all near zero gets random numbers of 0.1 to 0.5 instead.
    """
    if not value.is_floating_point():
        return value.clone()
    rng = torch.Generator().manual_seed(SECRET_RANDOM.getrandbits(62))
    # A bias of zeros hides that a candidate leaves it out.
    if zeros and not (value.abs() > NEAR_ZERO).any():
        return (0.1 + 0.4 * torch.rand(value.shape, generator=rng)).to(value.device, value.dtype)
    factor = 0.5 + torch.rand(value.shape, generator=rng, dtype=torch.float64)
    return (value.double() * factor.to(value.device)).to(value.dtype)


def check_new_parameters(case: JudgeSession, witness: TargetProcess, form: InputForm) -> None:
    """Load other parameters into reference and candidate. Then compare the results of one call on inputs of ``form``,
    and the parameters and buffers that the call changes.

    A candidate that has computed something from the first parameters in advance has wrong results now. Faults and
    missing checks are recorded in ``case``.
    """
    problem, pace = case.problem, StepDeadline(case.budget.last)
    state = case.subject.state
    with case.record_faults(f"{form.label}, other parameters"), pace.step(witness.prisoner):
        for zeros in (True, False):
            if not change_parameters(state, lambda new: witness.renew(new) and problem.renew(new), zeros=zeros):
                if state:
                    case.missing["parameters"] = (
                        "other values of the parameters: the candidate lacks some of the reference's, so that nothing "
                        "shows that it uses them; name its parameters as the reference does"
                    )
                return
            args = problem.draw(form)
            # A zero parameter must stay zero, so try again with zeros unchanged.
            if zeros and not problem.gives_numbers(args):
                continue
            if problem.depends_on_mode(args):
                _compare_evaluation(case, witness, form, args)
            # Computed before the call, from a copy, since the reference must not change.
            kept = problem.kept_after(args)
            witness.call(args, problem.expect_effects(form, args))
            case.calls += 1
            problem.compare_kept(kept, witness.read_module_state(kept))
            _compare_unchanged(case, witness, {k: v for k, v in state.items() if k not in kept})
            return


def _compare_unchanged(case: JudgeSession, witness: TargetProcess, unchanged: dict[str, Tensor]) -> None:
    """Raise ``CandidateError`` if a call of the candidate has changed one of the parameters and buffers ``unchanged``,
    which the reference leaves as they are. The values are those that both had before the call.
    """
    for name, value in unchanged.items():
        before = value.to(case.options.device)  # where the candidate has it
        # Read one by one, so that one in another dtype does not keep the others from being compared.
        try:
            (after,) = witness.read_module_state({name: before})
        except CandidateError as e:
            if e.check != "results":
                raise
            case.unchecked.append(f"whether a call changes {name}: {e.evidence}"[:200])
            continue
        if not bits_are_equal(after, before):
            raise CandidateError("state", f"a call changes {name}, which the reference leaves as it is")


def _compare_evaluation(case: JudgeSession, witness: TargetProcess, form: InputForm, args: Args) -> None:
    """Compare the results of one call on ``args``, of the form ``form``, with modules that are set to evaluation. Raise
    ``CandidateError`` if they differ.

    If the candidate is no module, nothing is compared, and that is recorded in ``case``. If the reference fails in
    evaluation, nothing is compared either.
    """
    if not witness.set_evaluation(True):
        case.unchecked.append("evaluation: the candidate is no module")
        return
    with case.problem.evaluating():
        try:
            expected = case.problem.expect_effects(replace(form, label=f"{form.label} in evaluation"), args)
        except Exception as e:
            if is_lack(e):
                raise
        else:
            try:
                witness.call(args, expected)
            except MachineLack:
                raise
            except CandidateError as e:
                raise CandidateError(e.check, f"in evaluation: {e.evidence}") from None
            case.calls += 1
    witness.set_evaluation(False)


def compare_gradients(case: JudgeSession, witness: TargetProcess, forms: Sequence[InputForm], ends: float) -> None:
    """Compare the gradients of the candidate, in the process ``witness``, with those of the reference.

    They are compared twice on one of ``forms`` (shapes and kinds of values), on the forms that will be timed, and on up
    to four random others. If there are three arguments or more, some of them alone require a gradient in further
    comparisons. No comparison begins after the time ``ends`` (by ``time.monotonic``). Faults and missing checks are
    recorded in ``case``.
    """
    wanted = case.options.gradients
    # An op that declares a gradient promises it.
    required = case.subject.gradients if wanted is None else wanted
    if wanted is False or (forms[0].recipe and not required):
        case.unchecked.append("gradients")
        case.waived["value", "gradient"] = "the caller leaves them out" if forms[0].shapes else "the op declares none"
        return
    plain = [f for f in forms if required or f.usual or f.recipe]  # elsewhere a function may have kinks
    first = next((f for f in plain if f.reduced), plain[0])
    timed = [f for f in plain if f.timed and not first.reduced]
    # Of large shapes, a comparison of gradients takes seconds on a CPU, so that smaller ones stand for them.
    alike = [f for f in plain if not f.timed and f.reduced == first.reduced]
    others = [f for f in alike if (f.shapes, f.recipe) != (first.shapes, first.recipe)]
    others = SECRET_RANDOM.sample(others, min(GRADIENT_FORMS, len(others)))
    # A gradient may read memory of its own accord, whatever the call itself accepts.
    laid = [f for f in forms if f.layout and ("layout", "value") not in case.waived]
    laid = SECRET_RANDOM.sample(laid, min(GRADIENT_OTHER_LAYOUTS, len(laid)))
    compared, slowest = 0, 0.0
    floating = len(_floating_arguments(case.problem.draw(first)))
    alone = SECRET_RANDOM.sample(range(floating), min(GRADIENTS_ALONE, floating)) if floating > 2 else []
    series = [*((form, None) for form in (first, *timed, *others, *laid, first)), *((first, at) for at in alone)]
    for number, (form, only) in enumerate(series):
        began = time.monotonic()
        if (form.layout or only is not None) and slowest > COMPILING_S:  # it is compiled for each of these
            which = f"in the {form.layout} layout" if form.layout else "of which one alone requires one"
            case.unchecked.append(f"gradients of arguments {which}: they take too long")
            continue
        if compared and time.monotonic() > ends:
            if not required or only is not None:
                case.unchecked.append(f"gradients of more than {compared} calls: there was no time for them")
                break
            case.missing["gradients"] = f"only {compared} were reached in the time"
            return
        layout = GRADIENT_LAYOUTS[number % len(GRADIENT_LAYOUTS)]
        with case.record_faults(f"gradients of {form.label}"):
            try:
                compared += _compare_form_gradients(
                    case, witness, form, layout, required=required, partly=number % 2 == 1, only=only
                )
            except _NoGradient as e:
                if compared:  # it has gradients, and refuses this layout of those that come in
                    which = f"that come in as {layout}" if only is None else "of one argument alone"
                    case.unchecked.append(f"gradients {which}: {e}"[:200])
                    continue
                case.unchecked.append(f"gradients: the candidate has none: {e}"[:200])
                case.waived["value", "gradient"] = f"the candidate has none: {e}"[:200]
                return
        slowest = max(slowest, time.monotonic() - began)
        if case.reasons:
            return
    if compared:
        case.ledger.look("gradients", ("value",), ("gradient",), compared)
    else:
        # It has none, refuses the values, or its gradient jumps at half of the places.
        case.unchecked.append("gradients: the reference has none that can be compared")
        case.waived["value", "gradient"] = "the reference has none that can be compared"


class _NoGradient(Exception):
    """The error that a candidate cannot be differentiated, in a judgement that does not require gradients."""


def _compare_form_gradients(
    case: JudgeSession,
    witness: TargetProcess,
    form: InputForm,
    way: str,
    *,
    required: bool,
    partly: bool,
    only: int | None = None,
) -> bool:
    """Compare the gradients on inputs of one form (shapes and kind of values), and the results of the call that is
    differentiated. Return True, or False if the reference raises an error on these inputs, has no gradient, or has one
    that jumps at half of the places or more. If ``partly`` is true, only some of the arguments require a gradient, and
    one of several results gets none. If ``only`` is a number, only the floating-point argument at that place requires
    one.

    ``way`` names the memory layout of each result's gradient (see ``_draw_output_gradient``). Raise ``CandidateError``
    for wrong gradients. Where the gradient of a reference that is no declared op jumps, a candidate may have any value
    within the jump. If the candidate has no gradients, raise ``CandidateError`` if ``required`` is true and the
    arguments have no special layout, and ``_NoGradient`` otherwise.
    """
    args, parameters = case.problem.draw(form), case.problem.parameters
    floating = len(_floating_arguments(args))
    try:
        expected = case.problem.expect_effects(form, args)
    except Exception as e:  # the reference refuses these values
        if is_lack(e):
            raise
        return False
    try:
        outs = [o for o in expected.own if o.is_floating_point()]
        seeds: list[Tensor | None] = [_draw_output_gradient(o, way) for o in outs]
        if partly and len(seeds) > 1:  # a caller may use some of the results alone
            seeds[SECRET_RANDOM.randrange(len(seeds))] = None
        own = case.problem.gradients(args, seeds, wide=False)
        wide = case.problem.wide_gradients(args, seeds) or own
    except Exception as e:  # it has no gradient
        if is_lack(e):
            raise
        with _ignore_missing_gradient():  # results are compared all the same
            witness.gradients(args, [], [], (), [True] * floating, expected)
        return False
    wanted = _choose_wanted([bool(g.any()) for g in own[:floating]], partly=partly, only=only)
    if only is not None and not any(wanted):
        return False
    asked = [*(i for i in range(floating) if wanted[i]), *range(floating, len(own))]
    try:
        got = witness.gradients(args, seeds, [own[i] for i in asked], parameters, wanted, expected)
    except CandidateError as e:
        if (required and not form.layout) or e.check != "gradients":
            raise
        raise _NoGradient(e.evidence) from None
    count = len(asked) - len(parameters)
    missing = [i for i in range(count, len(asked)) if i >= len(got) or (not required and not got[i].any())]
    if missing:
        note = "gradients of parameters that the candidate does not give"
        case.unchecked += [note] if note not in case.unchecked else []
    given = [i for i in range(len(got)) if i not in missing]
    kept = [asked[i] for i in given]
    got, own, wide = [got[i] for i in given], [own[i] for i in kept], [wide[i] for i in kept]
    # A gradient may sum over all elements of a result.
    sums = Reduction(max(1, max((o.numel() for o in own), default=1)))

    def recompute() -> list[Tensor]:
        """Compute the reference's gradients in float64 once more. Return only those whose positions are in ``kept``,
        which the candidate gives as well.
        """
        again = case.problem.gradients(args, seeds, wide=True)
        return [again[i] for i in kept]

    tolerance = case.problem.tolerance
    problem = compare_with_rounding(got, own, wide, sums, recompute, tolerance).problem
    if problem and not form.recipe and not describe_kind_difference(got, own):
        got, share = settle_jumps(got, wide, gradient_jumps(case.problem, args, seeds), kept)
        problem = compare_with_rounding(got, own, wide, sums, recompute, tolerance).problem
        if not problem:
            case.unchecked.append(
                f"gradients at {share:.1%} of the places of one draw, where that of the reference jumps"
            )
            return share < MAX_JUMPS
    if problem:
        raise CandidateError("gradients", problem)
    return True


@contextmanager
def _ignore_missing_gradient() -> Iterator[None]:
    """Return a context manager that ignores the error that a candidate has no gradients."""
    try:
        yield
    except CandidateError as e:
        if e.check != "gradients":
            raise


def _floating_arguments(args: Args) -> list[Tensor]:
    """Return the floating-point tensors among ``args`` that do not lie in a list or dict."""
    return [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]


def _choose_wanted(has_influence: Sequence[bool], *, partly: bool, only: int | None = None) -> list[bool]:
    """Return for each floating-point argument whether it requires a gradient in a comparison. All do, unless ``partly``
    is true. Then a random one of those with influence on the results does not, if there are two or more. If ``only`` is
    a number, the argument at that place alone does, if it has influence.
    """
    if only is not None:
        return [i == only and has for i, has in enumerate(has_influence)]
    able = [i for i, has in enumerate(has_influence) if has]
    left_out = SECRET_RANDOM.choice(able) if partly and len(able) > 1 else -1
    return [i != left_out for i in range(len(has_influence))]


def _draw_output_gradient(result: Tensor, way: str) -> Tensor:
    """Return a random gradient of ``result``, with its shape and dtype, in the memory layout that ``way`` names.

    In the layout ``"plain"`` the last dim is contiguous, and in ``"turned"`` the first one. In ``"one"``, all elements
    are one number with stride 0, as in the gradient of a sum.
    """
    shapes = {"one": (), "turned": result.shape[::-1]}
    precise = torch.float64 if result.dtype == torch.float64 else torch.float32
    # On the device of the result: a CPU takes seconds to draw as many numbers as a large result has.
    drawn = torch.randn(shapes.get(way, result.shape), dtype=precise, device=result.device).to(result.dtype)
    if way == "one":
        return drawn.expand(result.shape)
    return drawn.permute(*reversed(range(result.dim()))) if way == "turned" else drawn
