"""``sl.tune``: from samples of an op, or a recorded profile, to a choice for each bucket of the samples."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shiplap.declare.choices import to_value
from shiplap.dispatch import Op
from shiplap.errors import ShiplapError, error
from shiplap.render.console import make_console
from shiplap.sampling.finding import Finding
from shiplap.sampling.recipe import SampleRecipe
from shiplap.sampling.sizes import dim_environment, free_dims, scalar_candidates
from shiplap.sampling.work_estimate import parse_budget
from shiplap.tuning import compiled_templates
from shiplap.tuning.allowed import require_quiet
from shiplap.tuning.choice import LEFT_OUT, Choice, choice_from_json
from shiplap.tuning.deadline import Deadline, OutOfTime
from shiplap.tuning.distributed import rank_and_count, run_on_rank_zero
from shiplap.tuning.frozen_table import remember_choice
from shiplap.tuning.inputs import draw_inputs, recipe_of
from shiplap.tuning.key import key_for
from shiplap.tuning.result import TuneResult
from shiplap.tuning.search import Report
from shiplap.tuning.selector import SelectionOptions, install_choices, select
from shiplap.tuning.worker_process import TIMEOUT, WorkerProcess

TuningRequest = tuple[Op, SampleRecipe, str]
Measurement = tuple[
    Op, SampleRecipe, str, compiled_templates.TemplateTuner | None
]  # the tuner measures templates in compiled code; None: eager calls
EACH = 30.0  # seconds per bucket without a budget


def make_requests(op: Op, samples: Iterable[Any], device: str | None) -> list[TuningRequest]:
    """Return a tuning request (op, recipe, device) for each of ``samples``.

    A sample is a tuple of arguments, a mapping of sizes by name, a recipe or the label of a recipe. Raise ``SL613`` for
    anything else.
    """
    # The first three types are iterable, but iterating over one of them is a mistake: the user passed one sample, not a
    # list.
    if isinstance(samples, (str, Mapping, torch.Tensor)) or not isinstance(samples, Iterable):
        raise _no_sample_error(op, type(samples).__name__, "a list of samples, such as [(x, y)]")
    requests = [_make_request(op, sample, device) for sample in samples]
    if not requests:
        raise _no_sample_error(op, "no samples", "a list of at least one sample, such as [(x, y)]")
    return requests


def _no_sample_error(op: Op, got: str, expected: str) -> ShiplapError:
    """Return ``SL613`` for samples that are not arguments of ``op``."""
    return error(
        "SL613",
        where=f"{op.spec.name}: samples to tune on",
        got=got,
        expected=expected,
        fix="pass a list of argument tuples, sizes, recipes or labels",
    )


def tune_all(
    requests: Sequence[TuningRequest],
    budget: float | str | None = None,
    *,
    options: SelectionOptions,
    isolate: bool = True,
    timeout: float = TIMEOUT,
    progress: bool | None = None,
    compiled: bool | None = None,
) -> TuneResult:
    """Return a choice for each bucket (class of sizes) of ``requests``, in order, measured within ``budget``. Under
    ``torch.distributed``, rank 0 measures for all ranks. If ``budget`` is None, the time is not limited. If ``isolate``
    is true, candidates run in a worker process, and otherwise in this one.

    If templates of the op are measured in compiled code, a choice among them follows the choice for eager calls.
    ``compiled`` is the user's setting for that (see :func:`shiplap.tune`).
    """
    require_quiet("tune")
    wanted = _list_measurements(_first_of_each_bucket(requests), compiled)

    def work() -> list[Choice]:
        """Measure all calls that were requested, within the budget if there is one. Return the choices in order."""
        seconds = None if budget is None else parse_budget(budget)
        with tuning_progress(progress) as report, WorkerProcess(timeout) as isolation:
            rest = options, isolation if isolate else None, report
            if seconds is None:
                return _with_unmeasured_findings(wanted, _choose_each(wanted, None, *rest), compiled)
            with Deadline(seconds, isolation.close) as deadline:
                return _with_unmeasured_findings(wanted, _choose_each(wanted, deadline, *rest), compiled)

    rank, count = rank_and_count()
    if count == 1:
        return TuneResult(tuple(work()))
    mine: list[Choice] = []

    def tell() -> list[dict[str, Any]]:
        """Measure all calls that were requested, in the process of rank 0. Append the choices to the list for this
        rank's own result, and return them as plain data for the other ranks.
        """
        mine.extend(work())
        return [_choice_message(choice) for choice in mine]

    choices = run_on_rank_zero(tell)
    received = (
        mine if rank == 0 else [_install_received(work, told) for work, told in zip(wanted, choices, strict=True)]
    )
    return TuneResult(tuple(received))


def _choose_each(
    wanted: Sequence[Measurement],
    deadline: Deadline | None,
    options: SelectionOptions,
    isolation: WorkerProcess | None,
    report: Report,
) -> list[Choice]:
    """Return the choice for each of ``wanted``, read from the store or measured.

    ``wanted`` are tuples (op, recipe, device, tuner). Each gets an equal share of the time until ``deadline``. If the
    time is over before one is measured, its choice names no kernel. ``isolation`` runs candidates in other processes,
    and ``report`` is called with the progress.
    """
    choices: list[Choice] = []
    for number, (op, recipe, device, tuner) in enumerate(wanted):
        place = f"{number + 1}/{len(wanted)} {op.spec.name}" + (" in compiled code" if tuner else "")
        share = EACH if deadline is None else deadline.seconds_left / (len(wanted) - number)

        # Progress reports are frequent, so they are also the places where work that was abandoned ends.
        def report_here(what: str, done: int, total: int, place: str = place) -> None:
            """Report progress for this measurement. Raise ``OutOfTime`` if the measurement was abandoned."""
            if deadline is not None:
                deadline.check()
            report(f"{place}: {what}", done, total)

        mine = replace(options, seconds=share)
        if tuner is not None:
            work = partial(tuner, op, recipe, device, mine, report_here, isolation)
        else:
            bench = isolation.bench() if isolation else None
            work = partial(select, op, recipe, device=device, options=mine, report=report_here, bench=bench)
        try:
            choices.append(work() if deadline is None else deadline.run(work))
        except OutOfTime:
            choices.append(_unreached_choice(op, recipe, device, compiled=tuner is not None))
    return choices


def _unreached_choice(op: Op, recipe: SampleRecipe, device: str, *, compiled: bool) -> Choice:
    """Return a choice that names no kernel and stands for a bucket (class of sizes) which the budget did not reach.
    Such a choice is not stored.
    """
    env = dim_environment(op.spec, dict(recipe.sizes), {**dict(recipe.scalars), **dict(recipe.sizes)}) or {}
    dtypes = ", ".join(f"{c}={d}" for c, d in recipe.dtypes)
    return Choice(
        op.spec.name,
        device.partition(":")[0],
        op.rule.bucket(env),
        dtypes,
        "",
        "",
        reason="the budget was spent",
        origin=LEFT_OUT,
        sizes=str(recipe),
        place=compiled_templates.ALONE if compiled else (),
    )


def _choice_message(choice: Choice) -> dict[str, Any]:
    """Return a choice of rank 0 as plain data, from which other ranks rebuild it. The keys are ``value`` (kernel,
    config, times and reason) and ``place`` (the code around the call).

    Return an empty dict for a choice without a kernel, which stands for a call that the budget did not reach.
    """
    return {"value": choice.value(), "place": dict(choice.place)} if choice.origin != LEFT_OUT else {}


def _install_received(work: Measurement, told: Mapping[str, Any]) -> Choice:
    """Install the choice that rank 0 has made for the call ``work`` in this process, and return it.

    ``told`` is the choice as ``_choice_message`` returns it. If it is empty, the budget did not reach the call. Then
    install nothing and return a choice that names no kernel.
    """
    op, recipe, device, tuner = work
    if not told:
        return _unreached_choice(op, recipe, device, compiled=tuner is not None)
    key = key_for(op, draw_inputs(op, recipe, device), told["place"])
    choice = choice_from_json(key, told["value"], "received")
    install_choices(op, [choice])
    remember_choice(key, choice)
    return choice


def _first_of_each_bucket(requests: Iterable[TuningRequest]) -> list[TuningRequest]:
    """Return, in order, the first request of each group that would share one choice. Such requests have the same op,
    dtypes, layouts, device and bucket (class of sizes).
    """
    by_bucket: dict[tuple[Any, ...], TuningRequest] = {}
    for op, recipe, device in requests:
        env = dim_environment(op.spec, dict(recipe.sizes), {**dict(recipe.scalars), **dict(recipe.sizes)}) or {}
        key = (op.spec.name, device, op.rule.values(env), recipe.dtypes, recipe.layouts, recipe.absent)
        by_bucket.setdefault(key, (op, recipe, device))
    return list(by_bucket.values())


def _list_measurements(requests: Iterable[TuningRequest], compiled: bool | None) -> list[Measurement]:
    """Return what has to be measured for each request, as (op, recipe, device, tuner) tuples.

    The first tuple of a request has None as tuner, and is measured in eager calls. If ``compiled`` requires it, a tuple
    for each template tuner follows. A template tuner measures templates in compiled code.
    """
    works: list[Measurement] = []
    for op, recipe, device in requests:
        works.append((op, recipe, device, None))
        works += [
            (op, recipe, device, tuner)
            for tuner in compiled_templates.template_tuners
            if compiled_templates.measured_when_compiled(op, device, compiled)
        ]
    return works


def _with_unmeasured_findings(
    works: Sequence[Measurement], made: Sequence[Choice], compiled: bool | None
) -> list[Choice]:
    """Return the choices ``made`` for ``works``, in order. A choice for eager calls gets an additional finding if
    templates of the op are not measured in compiled code.
    """
    told = []
    for (op, recipe, device, tuner), choice in zip(works, made, strict=True):
        why = "" if tuner is not None else compiled_templates.describe_unmeasured(op, device, compiled)
        skipped = (Finding("tune.candidates", "skip", op.spec.name, why, str(recipe), ""),) if why else ()
        told.append(choice.but(findings=(*choice.findings, *skipped)) if skipped else choice)
    return told


def _make_request(op: Op, sample: Any, device: str | None) -> TuningRequest:
    """Return the op, recipe and device of one sample, which is a recipe, its label, sizes by name, or arguments. Raise
    ``SL613`` for another value.
    """
    if isinstance(sample, SampleRecipe):
        return op, sample, device or "cpu"
    if isinstance(sample, str):
        return op, SampleRecipe.parse(sample), device or "cpu"
    if isinstance(sample, Mapping):
        sizes = dict(sample)
        return (
            op,
            recipe_of_sizes(op, sizes, str(sizes.pop("dtype", "float32")).removeprefix("torch.")),
            device or "cpu",
        )
    if not isinstance(sample, (tuple, list)):
        raise _no_sample_error(op, type(sample).__name__, "the arguments of a call, sizes by name, or a recipe")
    if len(sample) > len(op.spec.args) or any(a.default is ... for a in op.spec.args[len(sample) :]):
        raise _no_sample_error(op, type(sample).__name__, f"the {len(op.spec.args)} arguments of a call")
    args = tuple(sample)
    # `bind` raises an error of its own that names the argument that does not fit.
    bound = op.bind(args)  # raises the error of bad arguments
    return op, recipe_of(op, args), str(bound.device)


def recipe_of_sizes(op: Op, values: Mapping[str, Any], dtype: str = "float32") -> SampleRecipe:
    """Return the recipe of a call with these sizes and scalars by name. Other scalars have their defaults. Raise
    ``SL502`` if a size is missing, or if a name or dtype does not fit.

    ``dtype`` applies to the tensors whose declaration admits it. The others have float32, or the first admitted dtype.
    """
    dims = free_dims(op.spec)
    scalars = {a.name: a for a in op.spec.scalars}
    repeated = {n: values[n] for n in op.spec.broadcasts if n in values}
    # All three kinds of errors are collected, so that one message names everything that has to be corrected.
    unknown = [n for n in values if n not in dims and n not in scalars and n not in repeated]
    missing = [n for n in dims if n not in values]
    strange = [n for n, kind in dims.items() if n in values and not _is_dim_size(values[n], kind)]
    if unknown or missing or strange:
        got = ", ".join(
            [
                *(f"unknown {n}" for n in unknown),
                *(f"no {n}" for n in missing),
                *(f"{n}={values[n]!r}" for n in strange),
            ]
        )
        raise error(
            "SL502",
            where=op.spec.name,
            what="the sizes do not fit the declaration",
            got=got,
            expected=f"sizes of {', '.join(dims)}",
            fix="give each free dim a whole number, and a variadic one a list of them",
        )
    given = {
        n: to_value(a, values[n]) if n in values else scalar_candidates(a)[0]
        for n, a in scalars.items()
        if n not in dims
    }
    admitted = {c: t.dtypes or (dtype,) for c, t in op.spec.dtype_classes.items()}
    if dtype != "float32" and not any(dtype in names for names in admitted.values()):
        raise error(
            "SL502",
            where=op.spec.name,
            what="the dtype does not fit the declaration",
            got=dtype,
            expected="; ".join(f"{c}: {', '.join(names)}" for c, names in admitted.items()) or "none to choose",
            fix="pass a dtype that the declaration admits",
        )
    dtypes = {c: next((d for d in (dtype, "float32") if d in names), names[0]) for c, names in admitted.items()}
    return SampleRecipe().but(sizes={n: values[n] for n in dims} | repeated, scalars=given, dtypes=dtypes)


def _is_dim_size(value: Any, kind: str) -> bool:
    """Return whether ``value`` can be the size of a dim of the kind ``kind``. It must be a list of numbers for
    ``"variadic"``, and a number for other kinds.
    """
    sizes = value if kind == "variadic" else [value]
    return isinstance(sizes, (list, tuple)) and all(type(n) is int and n >= 0 for n in sizes)


@contextlib.contextmanager
def tuning_progress(wanted: bool | None) -> Iterator[Report]:
    """Return a context that yields a function to report progress. A bar on stderr shows the progress if ``wanted`` is
    true. If it is None, the bar is shown if stderr is a terminal. If it is false, nothing is shown.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda what, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=make_console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
