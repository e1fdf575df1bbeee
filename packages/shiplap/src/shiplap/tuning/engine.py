"""``sl.tune``: from samples of an op, or a recorded profile, to a choice for each bucket of the samples.

Work that is unfinished at the end of the time budget is abandoned and reported as left out. Under ``torch.distributed``
one rank tunes, and the others receive its choices as JSON in a tensor. Nothing is pickled, so a received message cannot
run code.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Any, TypeVar, cast

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
    """Return a list with a tuple (op, recipe, device) for each of ``samples``.

    A sample is a tuple of arguments, a mapping from names of dims and scalars to values, a recipe or the label of a
    recipe. ``device`` is not used for arguments, and None stands for the CPU. Raise ``SL613`` for anything else, and
    for no samples.
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
    """Return the error ``SL613``, not raised, for samples of ``op`` that are ``got`` where ``expected`` is required."""
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
    """Return a choice for each bucket (class of sizes) of ``requests``, in order.

    ``budget`` is the time for all of them, in seconds or as text such as ``"5m"``. If it is None, each bucket gets
    about 30 s. If ``isolate`` is true, candidates run in other processes, and otherwise in this one. One run in another
    process, with its compilation, may take ``timeout`` seconds. Under ``torch.distributed``, rank 0 measures for all
    ranks. A bar on stderr shows the progress if ``progress`` is true, or if it is None and stderr is a terminal.

    ``compiled`` says whether templates are measured in compiled code (see :func:`shiplap.tune`). If they are, a choice
    among them follows the choice for eager calls.
    """
    require_quiet("tune")
    wanted = _list_measurements(_first_of_each_bucket(requests), compiled)

    def work() -> list[Choice]:
        """Measure all that ``wanted`` lists, within the budget if there is one. Return the choices in order."""
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
        """Measure all that ``wanted`` lists, in the process of rank 0. Append the choices to ``mine``, and return them
        as dicts that JSON can represent.
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

    Each of ``wanted`` is a tuple (op, recipe, device, tuner) and gets an equal share of the time until ``deadline``. If
    the time is over before one is measured, its choice names no kernel. If ``deadline`` is None, each gets 30 s.
    ``isolation`` runs candidates in other processes. If it is None, they run in this one. ``report`` is called with the
    progress.
    """
    choices: list[Choice] = []
    for number, (op, recipe, device, tuner) in enumerate(wanted):
        place = f"{number + 1}/{len(wanted)} {op.spec.name}" + (" in compiled code" if tuner else "")
        share = EACH if deadline is None else deadline.seconds_left / (len(wanted) - number)

        # Progress reports are frequent, so they are also the places where work that was abandoned ends.
        def report_here(what: str, done: int, total: int, place: str = place) -> None:
            """Report the progress of one measurement, whose number and op are in ``place``. Raise ``OutOfTime`` if the
            measurement was abandoned.
            """
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
    """Return a choice without a kernel, for a bucket (class of sizes) that was not measured before the budget was
    spent. ``compiled`` says whether the choice is for compiled code.
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
    """Return a choice of rank 0 as a dict that JSON can represent, from which other ranks rebuild it. The keys are
    ``value`` (kernel, config, times and reason) and ``place`` (the code around the call).

    Return an empty dict for a choice without a kernel, which stands for a call that was not measured in time.
    """
    return {"value": choice.value(), "place": dict(choice.place)} if choice.origin != LEFT_OUT else {}


def _install_received(work: Measurement, told: Mapping[str, Any]) -> Choice:
    """Install the choice that rank 0 made for ``work`` in this process, and return it.

    ``work`` is a tuple (op, recipe, device, tuner), and ``told`` the dict that ``_choice_message`` returned on rank 0.
    If ``told`` is empty, install nothing and return a choice without a kernel.
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
    """Return, in order, the first request of each group of requests that share one choice. Requests share a choice if
    they have the same op, device, bucket (class of sizes), dtypes, layouts and absent arguments.
    """
    by_bucket: dict[tuple[Any, ...], TuningRequest] = {}
    for op, recipe, device in requests:
        env = dim_environment(op.spec, dict(recipe.sizes), {**dict(recipe.scalars), **dict(recipe.sizes)}) or {}
        key = (op.spec.name, device, op.rule.values(env), recipe.dtypes, recipe.layouts, recipe.absent)
        by_bucket.setdefault(key, (op, recipe, device))
    return list(by_bucket.values())


def _list_measurements(requests: Iterable[TuningRequest], compiled: bool | None) -> list[Measurement]:
    """Return what has to be measured for each request (op, recipe, device), as a list of tuples (op, recipe, device,
    tuner).

    In the first tuple of a request, ``tuner`` is None, which stands for eager calls. If ``compiled`` requires it, a
    tuple for each function that measures templates in compiled code follows.
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
    templates of its op are not measured in compiled code.
    """
    told = []
    for (op, recipe, device, tuner), choice in zip(works, made, strict=True):
        why = "" if tuner is not None else compiled_templates.describe_unmeasured(op, device, compiled)
        skipped = (Finding("tune.candidates", "skip", op.spec.name, why, str(recipe), ""),) if why else ()
        told.append(choice.but(findings=(*choice.findings, *skipped)) if skipped else choice)
    return told


def _make_request(op: Op, sample: Any, device: str | None) -> TuningRequest:
    """Return the op, the recipe and the device of one sample. The sample is a recipe, the label of one, a mapping from
    names of dims and scalars to values, or a sequence of arguments. ``device`` is not used for arguments, and None
    stands for the CPU. Raise ``SL613`` for another value.
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
    """Return the recipe of a call whose dims and scalars have the given ``values``, by name. Other scalars have their
    defaults.

    Tensors whose declaration admits ``dtype`` get it. The others get float32, or the first admitted dtype. Raise
    ``SL502`` if a size is missing, or if a name, a size or the dtype does not fit the declaration.
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
            fix="give each free dim a whole number from 0 on, and a variadic one a list of them",
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
    """Return whether ``value`` can be the size of a dim. It must be a list or tuple of ints for the kind
    ``"variadic"``, and an int for other kinds. No int may be negative or a bool.
    """
    sizes = value if kind == "variadic" else [value]
    return isinstance(sizes, (list, tuple)) and all(type(n) is int and n >= 0 for n in sizes)


@contextlib.contextmanager
def tuning_progress(wanted: bool | None) -> Iterator[Report]:
    """Return a context manager whose value is a function that shows progress, called with the text, the number done and
    the total. If ``wanted`` is true, a bar on stderr shows it. If it is None, the bar is shown if stderr is a terminal.
    If it is false, nothing is shown.
    """
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda what, done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=make_console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


ABANDONED = 10.0  # seconds that the end of a program waits for work that was abandoned
T = TypeVar("T")


class OutOfTime(Exception):
    """The error that the time budget is spent."""


class Deadline:
    """A time budget, as a context manager that runs work in one thread of its own until the budget ends. If it ends
    while work runs, ``on_end`` is called to stop that work.

    All work runs in the same thread, because a worker process ends with the thread that started it.
    """

    def __init__(self, seconds: float, on_end: Callable[[], None] = lambda: None) -> None:
        """Start the time budget of ``seconds`` and the thread in which work runs. ``on_end`` is called if the budget
        ends while work runs.
        """
        self.ends, self.on_end, self.over = monotonic() + seconds, on_end, False
        self._work: SimpleQueue[tuple[Context, Callable[[], Any], SimpleQueue[Any]] | None] = SimpleQueue()
        # The current device and torch's number of threads belong to a thread. The working thread has to take over the
        # caller's. A choice is stored under that number.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._threads = torch.get_num_threads()
        # A daemon thread, so that a kernel that hangs does not keep the interpreter from ending.
        self._thread = Thread(target=self._serve, name="shiplap tune", daemon=True)
        self._thread.start()

    def __enter__(self) -> Deadline:
        """Return the deadline."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the thread end after its present work, which then counts as abandoned. Do not wait for it."""
        self.over = True
        self._work.put(None)

    @property
    def seconds_left(self) -> float:
        """The seconds until the time budget ends. The number is negative after its end."""
        return self.ends - monotonic()

    def check(self) -> None:
        """Raise ``OutOfTime`` if the work of this deadline was abandoned. Long work calls this method now and then, so
        that it neither stores nor starts anything after the end of the budget.
        """
        if self.over:
            raise OutOfTime

    def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the thread of this deadline, wait for it, and return its result. An exception of ``work`` is
        raised again.

        Raise ``OutOfTime`` when the budget ends, even if ``work`` hangs. The thread itself continues until ``work``
        calls ``check`` or returns.
        """
        if self.seconds_left <= 0:
            raise OutOfTime
        told: SimpleQueue[Any] = SimpleQueue()
        self._work.put((copy_context(), work, told))
        try:
            # The budget may have ended since it was read above, and a queue refuses a negative timeout.
            result, failure = told.get(timeout=max(0.0, self.seconds_left))
        except Empty:
            self.over = True
            # An interpreter that ends while a thread is inside of torch ends the process with an abort.
            atexit.register(self._thread.join, ABANDONED)
            self.on_end()
            raise OutOfTime from None
        if failure is not None:
            raise failure
        return cast(T, result)

    def _serve(self) -> None:
        """Run each work in the queue of this thread, in the context variables of its caller. Put the result or the
        exception into the caller's queue. None in the queue ends the thread.
        """
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        if self._device is not None:
            torch.cuda.set_device(self._device)  # of this thread
        while (asked := self._work.get()) is not None:
            context, work, told = asked
            try:
                told.put((context.run(work), None))
            except BaseException as e:
                # Raised in the thread that waits, while this one goes on to serve.
                told.put((None, e))


def rank_and_count() -> tuple[int, int]:
    """Return this process's rank and the number of ranks. They are ``(0, 1)`` in a program that is not distributed."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def run_on_rank_zero(work: Callable[[], Any]) -> Any:
    """Run ``work`` on rank 0 and return its result on every rank. JSON must be able to represent the result.

    If ``work`` raises an exception, rank 0 raises it again, and the other ranks raise ``SL611``.
    """
    rank, _ = rank_and_count()
    failure: BaseException | None = None
    content: dict[str, Any] = {}
    if rank == 0:
        try:
            content = {"result": work()}
        except Exception as e:  # the others must not wait for ever
            failure, content = e, {"error": f"{type(e).__name__}: {e}"}
    content = _broadcast_json(content)
    if failure is not None:
        raise failure
    if "error" in content:
        raise error(
            "SL611",
            where=f"rank {rank}",
            what="rank 0 could not tune",
            got=content["error"],
            expected="choices from rank 0",
            fix="correct the error that rank 0 printed",
        )
    return content["result"]


def broadcast_device() -> torch.device:
    """Return a device on which the default process group can send a tensor. It is the CPU if the group serves the CPU.
    Otherwise it is the current device of the first device type that the group serves.

    The configuration of a group names the backend of each device type, as in ``"cpu:gloo,cuda:nccl"``. A group of NCCL
    alone serves GPUs only.
    """
    served = [pair.partition(":")[0] for pair in torch.distributed.get_backend_config().split(",")]
    if "cpu" in served:
        return torch.device("cpu")
    return torch.device(served[0], torch.get_device_module(served[0]).current_device())


def _broadcast_json(content: dict[str, Any]) -> dict[str, Any]:
    """Return the ``content`` of rank 0 on every rank. Its length is broadcast first, then its JSON in a tensor of
    bytes.

    Rank 0 decodes its own bytes as well, so that all ranks use the same value.
    """
    dist, device = torch.distributed, broadcast_device()
    data = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8).to(device)
    # A receiver has to allocate the tensor before it can receive, so the length is sent first.
    size = torch.tensor([data.numel()], device=device)
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0)
    received: dict[str, Any] = json.loads(bytes(data.cpu().tolist()))
    return received
