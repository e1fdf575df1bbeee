"""The parts of a check: its samples, a function that observes one sample, and the texts of the finding."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from shiplap.audit.causes import (
    EMPTY,
    WRAPPED_FIX,
    environment_fault,
    fix_of,
    lack_in_reasons,
    names_of_varied,
    varied_of,
)
from shiplap.audit.separation import separate
from shiplap.audit.small_example import describe_example
from shiplap.audit.target import write_reproducer
from shiplap.cached_property import cached_property
from shiplap.dispatch import Op
from shiplap.errors import ShiplapError, error_line
from shiplap.kernels.triton.interpreter_budget import LaunchTooLong
from shiplap.sampling.admitted_axes import admits_beyond, admits_large, unseen_dtypes
from shiplap.sampling.argument_effects import arguments_without_effect, is_never_varied
from shiplap.sampling.case import SampleCase, describe_arguments, tensors_among, tree_map
from shiplap.sampling.difference_pattern import WRAPPED
from shiplap.sampling.finding import Finding
from shiplap.sampling.ledger import AUDIT, LARGE_ELEMENTS, Ledger, is_large, varied_axes
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.run import (
    needs_builder,
    reference_accepts,
    reference_effects,
    reference_error,
    run_op,
    why_reference_missing,
)
from shiplap.sampling.sample_times import count_elements
from shiplap.sampling.samples import Samples, sample

OUT_OF_BUDGET_TEXT = "out of budget"
UNSEEN_DTYPES_FIX = "narrow the declaration's dtypes, or let reference and builder of samples take these"
SHOWN_FIX = "and return the scalars that it is asked for"
LARGE_RESULTS = "the results for such a tensor are too large to be made"
NO_LARGE_SAMPLE = "the builder of samples makes none, though the declaration admits them"
TILE = 64  # elements of a usual tile of a kernel: beyond them, it needs several
SHRINK_S, SMALL = 2.0, 8  # seconds spent on a smaller failing sample; sizes up to this are small enough


@dataclass(frozen=True)
class Observation:
    """What a check has observed on one sample. It has a ``problem``, a reason to ``skip`` the sample, a reason why it
    was ``missed``, or none of these.

    A skipped sample is no evidence about the op. If ``limited`` is true, it was skipped for a limit of the audit, such
    as the time of an interpreter, and the cells of the ledger that it would cover stay untouched. A missed sample would
    be evidence, but could not be examined. ``error`` is the largest error as a multiple of the tolerance. ``note`` is a
    detail for the report, and ``fix`` a repair that replaces the usual one. ``axes`` names properties, such as
    ``alignment``, that the observation itself varied. ``declined`` has pairs of an obligation of the check, such as
    ``gradient``, that does not apply to the sample, and the reason.
    """

    problem: str = ""
    skip: str = ""
    limited: bool = False
    missed: str = ""
    error: float = 0.0
    note: str = ""
    fix: str = ""
    axes: tuple[str, ...] = ()
    declined: tuple[tuple[str, str], ...] = ()


@dataclass
class AuditSubject:
    """The op under audit with its samples, and the results of the audit so far.

    ``failed`` has the names of the failed checks, and ``deadline`` is the time by ``time.monotonic`` after which no
    sample begins. ``raised`` maps errors to the check that reports them, and ``lethal`` labels of samples to the check
    in which they ended the process. ``begins`` is called before a sample is observed, and ``looked`` after it.
    ``ledger`` counts the samples, and ``failing`` is the label of the last sample that a finding shows as failing.
    """

    op: Op
    samples: Samples
    deadline: float = float("inf")
    failed: set[str] = field(default_factory=set)
    raised: dict[str, str] = field(default_factory=dict)  # error → the check that reports it
    begins: Callable[[Check, SampleCase | None], None] = lambda check, case: None
    looked: Callable[[str, SampleCase], None] = lambda check, case: None
    lethal: dict[str, str] = field(default_factory=dict)  # sample → the check in which it ended the process
    ledger: Ledger = field(default_factory=Ledger)
    failing: str = ""  # the sample of the last failed finding

    @cached_property
    def first(self) -> SampleCase:
        """The base sample of the op, with small distinct sizes, default scalars and float32. Each other sample differs
        from it in some property, such as the layout.
        """
        return self.samples.build(self.samples.base)

    def axes_of(self, case: SampleCase) -> tuple[str, ...]:
        """Return the names of the properties, such as ``layout`` or ``dtype``, in which a sample differs from the base
        sample.
        """
        return varied_axes(case, self.first)

    @property
    def name(self) -> str:
        """The name of the audited op, with its namespace."""
        return self.op.spec.name


# Why a check of captures does not apply where samples are on another device.
NO_CAPTURE = "graphs are captured on a CUDA device: audit with device='cuda'"


def _never_skip(op: Op) -> str:
    """Return an empty string, which means that a check is not skipped. Checks that apply to every op use this
    function.
    """
    return ""


def why_random(op: Op) -> str:
    """Return why a check that repeats calls does not apply to an op that draws random numbers. Return an empty string
    for an op that draws none.
    """
    return "each call draws other numbers" if op.spec.draws else ""


@dataclass(frozen=True)
class Check:
    """A check of an audit. Each check is defined once, in the module of its name.

    Attributes:
        name: the id of the check, which is the name of its module.
        observes: one line of text that says what the check compares.
        observe: the function that observes one sample. An exception in it counts as a problem.
        cases: the function that yields the samples, the simplest ones first.
        fix: advice on how an op that fails is usually repaired.
        order: the rank of the check in an audit, which runs its checks by ascending rank. It is 0 for a check that runs
            on request only.
        skips: a function that returns the reason why the check cannot apply to an op, or an empty string.
        needs: the names of the checks that must succeed before this one runs. If one of them fails, this check would
            find nothing new or could end the process.
        sequence: a function that observes all samples together, after each was observed alone, or None.
        error: the format string for the largest ``Observation.error``.
        symbol: the name of the variable that holds the check in its module.
        patience: the seconds of processor time after which a sample counts as hanging, if more than usual.
        obligations: what the check observes on each sample, such as ``value`` or ``gradient``.
        varies: the properties, such as ``thread``, that the check itself varies on each sample.
        quiet: the seconds without any work after which a deadlock is supposed, if more than usual. Compilers may wait
            that long for the compilations of other processes.
    """

    name: str
    observes: str
    observe: Callable[[Op, SampleCase], Observation]
    cases: Callable[[Samples], Iterable[SampleCase]]
    fix: str
    order: int = 0
    skips: Callable[[Op], str] = _never_skip
    needs: tuple[str, ...] = ()
    sequence: Callable[[Op, list[SampleCase]], Observation] | None = None
    error: str = "largest error {:.2g} of the tolerance"
    symbol: str = "CHECK"
    patience: float | None = None
    quiet: float | None = None
    obligations: tuple[str, ...] = ("value",)
    varies: tuple[str, ...] = ()

    @property
    def own_limits(self) -> dict[str, float]:
        """The time limits ``patience`` and ``quiet``, in seconds, that this check sets for the child process, as a dict
        by name. A limit that the check does not set is left out.
        """
        limits = {"patience": self.patience, "quiet": self.quiet}
        return {name: seconds for name, seconds in limits.items() if seconds}

    def run(self, subject: AuditSubject) -> Finding:
        """Run the check on its samples of the op and return the finding. If samples fail, the finding shows the
        simplest one. If a check that this one needs has failed, nothing runs and the finding is incomplete.
        """
        # A check that builds on a failed one would report the same fault in other words.
        broken = [name for name in self.needs if name in subject.failed]
        if broken:
            return Finding(self.name, "incomplete", subject.name, f"says nothing while {broken[0]} fails")
        if reason := self.skips(subject.op):
            return Finding(self.name, "skip", subject.name, reason)
        tally = _CheckTally(self, subject)
        subject.samples.times.forget_left_out()
        for case in self.cases(subject.samples):
            if time.monotonic() > subject.deadline:
                tally.cut = True
                break
            # A sample that has ended one process would end this one as well.
            if dead := subject.lethal.get(case.label):
                tally.add(case, Observation(missed=f"this sample ends the process, see {dead}"))
                continue
            # Sent before the sample runs, so that the parent knows which one has ended the process.
            subject.begins(self, case)
            tally.add(case, self._observe_once(subject, case))
        subject.begins(self, None)
        # A series with a failing sample, or cut short, would repeat the failure or miss the evidence.
        if self.sequence and tally.seen and not tally.failed and not tally.cut:
            tally.add(None, _observe_guarded(self.sequence, subject.op, tally.seen))
        return tally.finding()

    def _observe_once(self, subject: AuditSubject, case: SampleCase) -> Observation:
        """Return the observation of one sample. An exception becomes its problem, except in the following cases.

        If an earlier check has reported the same error, or torch lacks a kernel for the dtype, the observation is
        ``missed``. If the reference refuses generated arguments, or a launch takes too long, the observation is a
        ``skip``.
        """
        try:
            return self.observe(subject.op, case)
        except LaunchTooLong as e:
            return Observation(skip=str(e), limited=True)
        except Exception as e:
            if missing := why_reference_missing(e) or why_unimplemented(e):
                return Observation(missed=missing)
            # One error of the call itself is reported once, and not by each check.
            key = e.id if isinstance(e, ShiplapError) else error_line(e)
            # A dtype that a kernel does not take has an error of its own in each check, and one cause.
            if self._varies_dtype_alone(subject, case):
                key = f"{type(e).__name__} in {sorted({str(t.dtype) for t in tensors_among(case.args)})}"
            if needs_builder(subject.op) and (why := _why_reference_refuses(subject.op, case)):
                return Observation("", f"generated integers mean nothing here, declare @op.samples: {why}", True)
            reporter = subject.raised.setdefault(key, self.name)
            if reporter != self.name:
                return Observation(missed=f"the call itself fails, see {reporter}: {error_line(e)}")
            return Observation(f"raised {error_line(e)}", fix=fix_of_refusal(subject.op, e))

    def _varies_dtype_alone(self, subject: AuditSubject, case: SampleCase) -> bool:
        """Return whether a sample differs from the base sample in dtypes, and neither in layouts, nor in the number of
        dims, nor in absent arguments.
        """
        return "dtype" in subject.axes_of(case) and not {"layout", "absence", "rank"} & {*subject.axes_of(case)}

    def look(self, op: Op, case: SampleCase) -> Observation:
        """Return the check's observation of one sample. An exception of the op or of the check becomes its problem."""
        return _observe_guarded(self.observe, op, case)

    def replay_history(self, op: Op, label: str, seed: int, device: str = "cpu") -> Observation:
        """Return the observation of the sample ``label`` after a call on the base sample and observations of those
        before it, as in an audit with ``seed`` on ``device``. It shows faults that depend on earlier calls.
        """
        samples = Samples(op, seed, device)
        with suppress(Exception, LaunchTooLong):  # an audit makes the first call before its checks
            run_op(op, samples.build(samples.base))
        for case in self.cases(samples):
            observation = self.look(op, case)
            if case.label == label:
                return observation
        return self.look(op, sample(op, label, seed, device))

    def replay(self, op: Op, seed: int, device: str = "cpu") -> Observation:
        """Return the observation that the check's function ``sequence`` makes of all samples as one series. The samples
        are those of an audit with ``seed`` on ``device``, without skipped ones.
        """
        assert self.sequence is not None
        cases = [c for c in self.cases(Samples(op, seed, device)) if not self.look(op, c).skip]
        return _observe_guarded(self.sequence, op, cases)


def _why_reference_refuses(op: Op, case: SampleCase) -> str:
    """Return the error with which the op's reference refuses a sample, or an empty string if it computes the sample.

    A generated row number may lie outside a tensor, which is no fault of the op. The reference runs on the CPU,
    since such a row number would end the process on another device.
    """
    return reference_error(op, tree_map(lambda t: t.cpu(), case.args))


def fix_of_refusal(op: Op, e: Exception) -> str:
    """Return the advice for a kernel that has raised ``e`` on a sample, if ``e`` is its refusal of values (``SL211``)
    and the sample's integers mean nothing. Return an empty string otherwise.
    """
    if not (isinstance(e, ShiplapError) and e.id == "SL211" and needs_builder(op)):
        return ""
    return (
        "if integers of the op are row numbers or offsets, declare @op.samples, which draws valid ones: those of this "
        "sample are generated, and no row of an empty tensor is valid. Otherwise compute what the reference computes"
    )


def why_unimplemented(e: Exception) -> str:
    """Return the message of ``e`` with advice if it says that torch has no kernel for a dtype. Return an empty string
    for other errors.
    """
    text = error_line(e)
    return f"{text}: narrow the declaration's dtypes" if "\" not implemented for '" in text else ""


def _observe_guarded(observe: Callable[..., Observation], *args: object) -> Observation:
    """Return ``observe(*args)``, an observation. An exception of the call becomes its problem. If a launch takes too
    long, the observation is a ``skip``, and if the reference is missing, it is ``missed``.
    """
    try:
        return observe(*args)
    except LaunchTooLong as e:
        return Observation(skip=str(e), limited=True)
    except Exception as e:
        missing = why_reference_missing(e)
        return Observation(missed=missing) if missing else Observation(problem=f"raised {error_line(e)}")


def _shrink_failure(
    check: Check, subject: AuditSubject, case: SampleCase, observation: Observation
) -> tuple[SampleCase, Observation]:
    """Return the smallest sample found within 2 s that fails, too, with its observation. Return ``case`` and
    ``observation`` themselves if none is found.
    """

    def fails(recipe: SampleRecipe) -> bool:
        """Return whether the sample of ``recipe`` fails the check as well. If so, store it in ``case`` and its
        observation in ``observation``.
        """
        nonlocal case, observation
        tried = subject.samples.make(recipe)
        seen = None if tried is None else _look_at_another(check, subject, tried)
        if tried is not None and seen is not None:
            case, observation = tried, seen
        return seen is not None

    case.recipe.shrunk(fails, lambda size: (size // 2, size - 1) if size > SMALL else (), SHRINK_S)
    return case, observation


def _look_at_another(check: Check, subject: AuditSubject, tried: SampleCase) -> Observation | None:
    """Return the check's observation of the sample ``tried`` if the sample fails. Return None if it passes, if the
    machine causes the failure, such as a missing compiler, or if the sample has ended a process before.
    """
    if tried.label in subject.lethal:
        return None
    subject.begins(check, tried)  # the parent must know the sample if it ends the process
    seen = check.look(subject.op, tried)
    return seen if seen.problem and not seen.skip and not environment_fault(seen.problem) else None


@dataclass
class _CheckTally:
    """The results of one check on the samples so far. ``seen`` has the samples that were examined, and ``failed`` the
    failing ones with their observations. ``skipped`` and ``missed`` have the reasons why samples were not examined.
    ``error`` is the largest error as a multiple of the tolerance. ``cut`` is true if the check ended early because its
    time was over, and ``limited`` if a sample was skipped for another limit of the audit.
    """

    check: Check
    subject: AuditSubject
    seen: list[SampleCase] = field(default_factory=list)
    failed: list[tuple[SampleCase | None, Observation]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: float = 0.0
    cut: bool = False
    limited: bool = False

    def add(self, case: SampleCase | None, observation: Observation) -> None:
        """Add the observation of ``case``, or of the whole series if ``case`` is None, to the results. A problem that
        the machine causes, such as a missing compiler, counts as ``missed``.
        """
        unseen = (observation.skip, observation.note, *(why for _, why in observation.declined))
        lacking = environment_fault(observation.problem)
        if lacking := lacking or ("" if observation.problem else lack_in_reasons(unseen)):
            observation = Observation(missed=lacking)
        if observation.missed:
            self.missed.append(observation.missed)
            return
        if case is not None:
            self._record(case, observation)
        if observation.skip:
            self.limited |= observation.limited
            self.skipped.append(observation.skip)
            if case is None:  # nothing came of the series, and the single samples alone prove nothing
                self.seen, self.skipped = [], [observation.skip]
            return
        if case is not None:
            self.seen.append(case)
            self.subject.looked(self.check.name, case)
        if observation.problem:
            self.failed.append((case, observation))
        if observation.note and observation.note not in self.notes:
            self.notes.append(observation.note)
        self.error = max(self.error, observation.error)

    def _record(self, case: SampleCase, observation: Observation) -> None:
        """Count the sample in the audit's ledger, a table of properties that samples vary (such as layout) and
        obligations that checks observe (such as gradient). If the observation declined an obligation, or skipped the
        sample, record the reason instead.
        """
        check, ledger = self.check, self.subject.ledger
        axes = (*self.subject.axes_of(case), *check.varies, *observation.axes)
        declined = dict(observation.declined)
        if observation.skip and observation.limited:
            return
        if observation.skip:
            declined = dict.fromkeys(check.obligations, observation.skip)
        ledger.look(check.name, dict.fromkeys(axes), [o for o in check.obligations if o not in declined])
        for obligation, reason in declined.items():
            ledger.decline(check.name, axes, (obligation,), reason)

    def finding(self) -> Finding:
        """Return the finding of the check from the observations of all its samples. Its verdict is ``fail``, ``skip``,
        ``incomplete`` or ``ok``, and its evidence is text.
        """
        check, subject, samples = self.check, self.subject, self.subject.samples
        if self.failed:
            return self._failure()
        # Nothing applied and nothing went wrong: the check has no bearing on this op.
        left_out = samples.times.describe_left_out()
        if not self.seen and not (self.missed or self.cut or self.limited or left_out):
            reason = self.skipped[0] if self.skipped else "the declaration admits no such sample"
            return Finding(check.name, "skip", subject.name, reason)
        if not self.seen:
            over = [OUT_OF_BUDGET_TEXT] if self.cut else [*self.skipped, *filter(None, [left_out])]
            reason = [*self.missed, *over][0]
            return Finding(check.name, "incomplete", subject.name, reason)
        evidence = [check.observes, *self.notes]
        if self.error:
            evidence.append(check.error.format(self.error))
        if self.skipped:
            evidence.append(f"{len(self.skipped)} samples set aside ({self.skipped[0]})")
        if self.missed:
            evidence.append(f"{len(self.missed)} samples not looked at ({self.missed[0]})")
        if unreached := self._unreached_sizes():
            evidence.append(f"no sample has {' or '.join(unreached)}")
        if left_out:
            evidence.append(left_out)
        if self.cut:
            evidence.append(f"stopped early: {OUT_OF_BUDGET_TEXT}")
        if unseen := self._unseen_dtypes():
            evidence.append(f"no sample has {', '.join(unseen)}: {UNSEEN_DTYPES_FIX}")
        ignored, hidden = self._arguments_without_effect()
        evidence += [ignored] if ignored else []
        count = f"{len(self.seen)} sample{'s' if len(self.seen) > 1 else ''}, seed {samples.seed}"
        # Samples that were not observed could have failed.
        whole = not (self.cut or self.missed or unseen or unreached or hidden)
        return Finding(check.name, "ok" if whole else "incomplete", subject.name, "; ".join(evidence), input=count)

    def _unseen_dtypes(self) -> list[str]:
        """Return the names of the admitted dtypes that no examined sample has. The list is empty for a check that need
        not look at every dtype. It is also empty if all samples have the dtypes of the base sample, since the ledger
        reports that.
        """
        varied = any("dtype" in self.subject.axes_of(case) for case in self.seen)
        looks = AUDIT["dtype", "value"] == self.check.name
        return unseen_dtypes(self.subject.op.spec, self.seen) if looks and varied else []

    def _arguments_without_effect(self) -> tuple[str, bool]:
        """Return a text that names the arguments that change no result of the reference on any examined sample, and
        whether the builder of samples hides one of them. The text is empty if there are none, and for a check that need
        not look at other scalars.
        """
        if AUDIT["scalar", "value"] != self.check.name or self.cut:
            return "", False
        samples, seen = self.subject.samples, self.seen
        found = arguments_without_effect(samples, seen)
        hidden = [a.name for a in found if is_never_varied(samples, seen, a)]
        builder = "let the builder of samples draw" if self.subject.op.sampler else "declare @op.samples, which draws"
        names, fix = (hidden, f": {builder} it, {SHOWN_FIX}") if hidden else ([a.name for a in found], "")
        return f"no sample shows that {' or '.join(names)} changes the results{fix}" if names else "", bool(hidden)

    def _unreached_sizes(self) -> list[str]:
        """Return texts that name the sizes that no examined sample has because samples were left out for their time.
        Only the check that has to look at tensors of more than 65,536 elements, and at each dim beyond one tile of a
        kernel, names any.

        If the declaration or a builder of samples admits no such tensor, the ledger gets this reason.
        """
        times, subject = self.subject.samples.times, self.subject
        if AUDIT["large size", "value"] != self.check.name:
            return []
        slow = {*times.stopped, *(dim for dims in times.left_out for dim in dims)}
        most = {dim: max(count_elements(dict(case.recipe.sizes).get(dim, 0)) for case in self.seen) for dim in slow}
        small = [dim for dim in sorted(slow) if most[dim] <= TILE and admits_beyond(subject.samples, dim, TILE)]
        unreached = [f"more than {TILE} of {dim}" for dim in small]
        if not any(is_large(tensors_among(case.args)) for case in self.seen):
            if times.left_out:
                unreached.append(f"more than {LARGE_ELEMENTS:,} elements in a tensor")
            elif not (self.cut or self.missed or self.limited):
                if subject.op.sampler is not None and admits_large(subject.samples):
                    return [*unreached, f"more than {LARGE_ELEMENTS:,} elements in a tensor: {NO_LARGE_SAMPLE}"]
                too_large = admits_large(subject.samples, affordable=False)
                reason = LARGE_RESULTS if too_large else "the declaration admits no such tensor"
                subject.ledger.decline(self.check.name, ("large size",), self.check.obligations, reason)
        return unreached

    def _rank_of_example(self, case: SampleCase | None) -> tuple[bool, bool, int]:
        """Return the sort key of a failing sample, by which the one to show comes first. It is that of the base sample,
        whose dims have distinct sizes above 1, and then of the smallest sample. Empty samples, which say least about
        the others, come last. ``case`` is None for a whole series of samples.
        """
        if case is None:
            return False, False, 0
        return case.numel == 0, bool(self.subject.axes_of(case)), case.numel

    def _failure(self) -> Finding:
        """Return the finding of a check that failed. It shows the simplest failing sample, with a fix and a script that
        reproduces the failure.
        """
        check, subject, samples = self.check, self.subject, self.subject.samples
        case, observation = min(self.failed, key=lambda failed: self._rank_of_example(failed[0]))
        varied: tuple[str, ...] = ()
        named: dict[str, tuple[str, ...]] = {}
        separation, example = None, ""
        if case is not None:
            cases = [c for c, _ in self.failed if c is not None]
            varied = varied_of([(c, subject.axes_of(c)) for c in cases])
            named = names_of_varied(cases, subject.first)
            failing = {c.label for c in cases}
            passed = [c for c in self.seen if c.label not in failing]
            separation = None if EMPTY in varied else separate(cases, passed, subject.first, subject.axes_of)
            case, observation = _shrink_failure(check, subject, case, observation)
            subject.failing = case.label
            again = partial(_look_at_another, check, subject)
            example = describe_example(subject.op, check.name, case, lambda tried: again(tried) is not None)
        total = len(self.seen)
        others = [f"{axis} ({', '.join(named[axis])})" if named.get(axis) else axis for axis in varied]
        all_of = f", all of them with another {' and '.join(others)}" if varied and EMPTY not in varied else ""
        all_of = f", {separation.text}" if separation is not None else all_of
        counted = f"{observation.problem} (in {len(self.failed)} of {total} samples{all_of})"
        evidence = counted if case else observation.problem
        usual = fix_of(subject.op, check.name, check.fix, case, varied, separation) if case else check.fix
        usual = WRAPPED_FIX if WRAPPED in observation.problem else usual
        where = (
            f"{describe_arguments(subject.op, case)}; {case.label}; seed {samples.seed}"
            if case
            else f"seed {samples.seed}"
        )
        return Finding(
            check.name,
            "fail",
            subject.name,
            evidence,
            input=where,
            fix=observation.fix or usual,
            varied=", ".join(varied),
            example=example,
            reproducer=write_reproducer(
                subject.op, check.name, case.label if case else None, samples.seed, str(samples.device), check.symbol
            ),
        )


def draws_otherwise(op: Op, case: SampleCase) -> bool:
    """Return whether a random op and its reference draw different random numbers for the same seed. If so, their values
    cannot be compared. Return False for an op that is not random.

    Besides the sizes of ``case``, larger sizes are compared, since a few numbers may be equal by chance. Larger samples
    that the reference refuses are left out.
    """
    if not op.spec.random:
        return False
    samples = Samples(op, case.seed, case.device)
    # Zeros and equal values hide which numbers were drawn.
    recipe = case.recipe.but(values="normal")
    if _differs_from_reference(op, samples.make(recipe) or case):
        return True
    # With the scalars of the case: by default an op may draw nothing, such as a dropout of probability 0.
    larger = (samples.make(recipe.but(sizes=dict(c.recipe.sizes))) or c for c in samples.grown(1))
    return any(reference_accepts(op, c.args) and _differs_from_reference(op, c) for c in larger)


def _differs_from_reference(op: Op, case: SampleCase) -> bool:
    """Return whether results of the op on ``case`` have other values or shapes than those of its reference."""
    pairs = zip(run_op(op, case), reference_effects(op, case.fresh()), strict=True)
    return not all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
