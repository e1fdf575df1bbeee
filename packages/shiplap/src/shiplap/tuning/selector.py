"""``select``: the verified, fastest candidate for the bucket of a call, from the table, the store or a measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shiplap.declare.config import Config
from shiplap.dispatch import Op, tuned_choices
from shiplap.errors import error, notice
from shiplap.sampling.builder import why_values_repeat
from shiplap.sampling.ledger import TUNE, Ledger
from shiplap.sampling.recipe import SampleRecipe
from shiplap.settings import settings
from shiplap.tuning.allowed import require_quiet
from shiplap.tuning.bench import Bench, LocalBench
from shiplap.tuning.candidate import Candidate, ReferenceCandidate, candidate_label, declared_default, kernel_candidates
from shiplap.tuning.choice import Choice, choice_from_json, choice_table_entry, place_of_key, show_time
from shiplap.tuning.frozen_table import remember_choice
from shiplap.tuning.inputs import Inputs, draw_inputs
from shiplap.tuning.key import Key, key_for
from shiplap.tuning.measure import RacePlan
from shiplap.tuning.search import Ranking, Report, search_candidates
from shiplap.tuning.store import ChoiceStore

BenchMaker = Callable[["SelectionTask"], Bench]


def _report_nothing(what: str, done: int, total: int) -> None:
    """Ignore a report of progress."""
    pass


@dataclass(frozen=True)
class SelectionOptions:
    """The options of a selection.

    ``seconds`` is the budget of one bucket. ``capture`` is ``"auto"``, ``"always"`` or ``"never"``, and says whether
    CUDA calls are timed in graphs (see ``CudaClock``). If ``remeasure`` is true, a stored choice is ignored. If it is
    false, a stored choice is returned without a measurement. If ``keep`` is true, the choice is written to the store.
    If ``install`` is true, calls in this process use it. ``plan`` holds the limits of a race.
    """

    seconds: float = 30.0
    capture: str = "auto"
    remeasure: bool = False
    keep: bool = True
    install: bool = True
    plan: RacePlan = field(default_factory=RacePlan)


@dataclass(frozen=True)
class SelectionTask:
    """The task of selecting one of ``candidates`` for a bucket (class of sizes). ``inputs`` are the arguments on which
    they run, and the choice is stored under ``key``.
    """

    op: Op
    inputs: Inputs
    key: Key
    candidates: Sequence[Candidate]
    options: SelectionOptions


def select(
    op: Op,
    recipe: SampleRecipe,
    *,
    device: str = "cpu",
    candidates_of: Callable[[Op, Inputs], Sequence[Candidate]] | None = None,
    extra: Mapping[str, str] | None = None,
    options: SelectionOptions = SelectionOptions(),
    bench: BenchMaker | None = None,
    report: Report = _report_nothing,
    store: ChoiceStore | None = None,
) -> Choice:
    """Return the choice for calls like ``recipe``, which describes sizes, scalars, dtypes and layouts (see
    ``inputs.recipe_of``).

    If a frozen table (a file of fixed choices) is installed, only this table is read. Otherwise the store is read,
    unless ``options.remeasure`` is true. If it has no choice, candidates are verified and timed. They are the op's
    kernels with their configs, or what ``candidates_of`` returns, with the declared default first. The reference is
    always added. ``extra`` holds further key fields, which mark a choice for compiled code. ``bench`` makes the object
    that runs candidates. By default they run in this process.

    Raise ``SL502``, ``SL606`` or ``SL610`` if there are no valid inputs. Raise ``SL607`` in strict mode if the frozen
    table has no choice. Raise ``SL608`` for a measurement inside an op, a backward, a capture or a trace.
    """
    drawn = draw_inputs(op, recipe, device)
    key = key_for(op, drawn, extra)
    tuned_choices.ensure_choices_loaded()
    if tuned_choices.frozen:
        return _frozen_choice(op, drawn, key)
    store = store or ChoiceStore()
    choice = None if options.remeasure else stored_choice(op, key, store)
    if choice is None:
        require_quiet(f"{op.spec.name} {drawn.bucket}")
        listed = list(candidates_of(op, drawn)) if candidates_of else kernel_candidates(op, device, drawn.call.env)
        # Index 0 is the reference to the search and to the bench.
        if not listed or listed[0].kernel != tuned_choices.REFERENCE:
            listed.insert(0, ReferenceCandidate(op))
        task = SelectionTask(op, drawn, key, listed, options)
        made = (bench or _make_local_bench)(task)
        ranking = _rank_task(task, made, report)
        choice = _make_choice(task, ranking, made.confirms)
        report("keep", 1, 1)  # raises if the caller has given up waiting
        if not ranking.order:  # not even the reference runs: too large for now, perhaps; that is no answer for later
            return choice
        if options.keep:
            store.put(key, choice.value())
    remember_choice(key, choice)
    # A choice with further key fields is for compiled code, where eager calls must not find it.
    if options.install and not extra:
        install_choices(op, [choice])
    return choice


def install_choices(op: Op, chosen: Sequence[Choice]) -> None:
    """Install choices in this process, so that calls of ``op`` use them. Graphs that were compiled with earlier choices
    are compiled again.
    """
    tuned_choices.install_choice_entries([choice_table_entry(c, op.identity) for c in chosen])


def stored_choice(op: Op, key: Key, store: ChoiceStore) -> Choice | None:
    """Return the choice that the store has for ``key``, or None if it has none. A stored value that is not a choice
    counts as absent, and a notice reports it.
    """
    value = store.get(key)
    if value is None:
        return None
    try:
        return choice_from_json(key, value, "stored")
    except (ValueError, TypeError) as e:
        notice(f"entry {key.digest}", f"{op.spec.name}: an entry of {store.root} is not used: {e}")
        return None


def _make_local_bench(task: SelectionTask) -> Bench:
    """Return a bench that verifies and times the candidates of ``task`` in this process."""
    return LocalBench(task.inputs, task.candidates, task.options.capture)


def _frozen_choice(op: Op, drawn: Inputs, key: Key) -> Choice:
    """Return the choice of the installed frozen table (a file of fixed choices) for calls like those of ``drawn``.

    If the table has none, return the declared default. In strict mode, raise ``SL607`` instead.
    """
    blank = Choice(
        op.spec.name,
        key["device"],
        drawn.bucket,
        drawn.dtypes,
        drawn.layout,
        "",
        sizes=str(drawn.recipe),
        place=place_of_key(key),
    )
    if (fixed := choice_in_use(blank, op)) is not None:
        return fixed
    if settings().strict:
        raise error(
            "SL607",
            where=f"{op.spec.name} {drawn.bucket}",
            got=f"no entry in {tuned_choices.frozen}",
            expected="a frozen choice",
        )
    kernel, config = declared_default(op, drawn.call, drawn.device)
    return blank.but(
        kernel=kernel, config=config, reason=f"declared default: not in {tuned_choices.frozen}", origin="default"
    )


def choice_in_use(blank: Choice, op: Op) -> Choice | None:
    """Return a copy of ``blank`` with the kernel and config that this process uses for the same calls. Return None if
    it uses none that was tuned.

    ``blank`` is a choice that describes calls and names no kernel.
    """
    wanted = choice_table_entry(blank, op.identity)
    for entry in tuned_choices.choice_entries():
        if (entry.op, entry.key, entry.place, entry.source) == (wanted.op, wanted.key, wanted.place, wanted.source):
            reason, origin = (
                (f"frozen in {tuned_choices.frozen}", "frozen")
                if tuned_choices.frozen
                else ("received or packaged", "in force")
            )
            return blank.but(kernel=entry.kernel, config=entry.config, reason=reason, origin=origin)
    return None


def _rank_task(task: SelectionTask, bench: Bench, report: Report) -> Ranking:
    """Verify and time the candidates of ``task`` (kernels with configs) on the bench within ``options.seconds`` of the
    task. Return their ranking.
    """
    with torch.no_grad():
        return search_candidates(
            task.op, task.candidates, bench, task.inputs, task.options.seconds, report, task.options.plan
        )


def _unverified(best: Candidate, drawn: Inputs, confirms: tuple[str, str]) -> str:
    """Return a message that names the checks that the candidate ``best`` still lacks for a verified choice, with the
    reason. Return an empty string if it lacks none or is the reference.

    ``drawn`` are the arguments on which it was verified. ``confirms`` is a pair of the bench's verdict on whether it
    can confirm times (``"ok"``, ``"skip"`` or ``"incomplete"``) and the reason.
    """
    if best.kernel == tuned_choices.REFERENCE:
        return ""
    ledger = Ledger()
    repeated = why_values_repeat(drawn.op, *drawn.real) if drawn.op.sampler is not None else ""
    ledger.look("tune.verify", () if repeated else ("value", "order of calls"), ("value",))
    if confirms[0] == "ok":
        ledger.look("tune.confirm", ("order of calls",), ("determinism",))
    cells = ledger.cells(TUNE, {"tune.verify": ("ok", ""), "tune.confirm": confirms})
    untouched = [str(c) for c in cells if c.required and c.state == "untouched"]
    reasons = "; ".join(filter(None, [repeated, confirms[1] if confirms[0] == "incomplete" else ""]))
    return f"{reasons} ({', '.join(untouched)} is untouched)" if untouched else ""


def _make_choice(task: SelectionTask, ranking: Ranking, confirms: tuple[str, str]) -> Choice:
    """Return the choice that follows from a ranking, with times and a reason. It is the first candidate of the ranking,
    or the reference if nothing was ranked.

    ``confirms`` is a pair of the bench's verdict on whether it can confirm times and the reason.
    """
    order, listed, drawn = ranking.order, task.candidates, task.inputs
    best = listed[order[0]] if order else listed[0]
    second = order[1] if len(order) > 1 else None
    # The declared default is always among the candidates, so its time shows the gain of the choice.
    default = _index_of_candidate(listed, declared_default(task.op, drawn.call, drawn.device))
    times = {i: t.median for i, t in ranking.timings.items()}
    unverified = _unverified(best, drawn, confirms)
    return Choice(
        op=task.op.spec.name,
        device=task.key["device"],
        bucket=drawn.bucket,
        dtypes=drawn.dtypes,
        layout=drawn.layout,
        kernel=best.kernel,
        config=best.config,
        time=times.get(order[0], 0.0) if order else 0.0,
        runner_up=candidate_label(listed[second]) if second is not None else "",
        runner_up_time=times[second] if second is not None else 0.0,
        default_time=times.get(default, 0.0),
        reason=_describe_ranking(ranking, listed, default, "unverified" if unverified else "verified"),
        findings=tuple(ranking.findings),
        tried=len(listed) - ranking.unseen,
        sizes=str(drawn.recipe),
        unverified=unverified,
        place=place_of_key(task.key),
    )


def _index_of_candidate(listed: Sequence[Candidate], wanted: tuple[str, Config]) -> int:
    """Return the index in ``listed`` of the candidate whose kernel and config are ``wanted``. If there is none, return
    0, the index of the reference.
    """
    return next((i for i, c in enumerate(listed) if (c.kernel, c.config) == wanted), 0)


def _describe_ranking(ranking: Ranking, listed: Sequence[Candidate], default: int, word: str) -> str:
    """Return the reason of a choice in one line. It says how many candidates were timed, the times of the two fastest,
    and the speedup over the candidate at ``default``. ``word`` describes the candidates, such as ``verified``.
    """
    order = ranking.order
    wrong = sum(f.verdict == "fail" for f in ranking.findings)
    dropped = f"; {wrong} dropped, see findings" if wrong else ""
    dropped += f"; {ranking.unseen} not looked at" if ranking.unseen else ""
    if not order:
        return f"no candidate could be run, nor the reference; nothing is kept{dropped}"
    if len(order) == 1:
        return f"the only candidate that is right{dropped}"
    times = ranking.timings
    gain = times[default].median / times[order[0]].median if default in times and times[order[0]].median else 0.0
    against = f", {gain:.2f}x the declared default" if gain and default != order[0] else ", the declared default"
    return (
        f"fastest of {len(order)} {word}: {show_time(times[order[0]].median)}, "
        f"next {candidate_label(listed[order[1]])} {show_time(times[order[1]].median)}"
        f"{against if default in times else ''}{dropped}"
    )
