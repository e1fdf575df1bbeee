"""Select a candidate by measurement.

First each candidate is measured alone, then the best and the fallback together with fused neighbours. A kernel that is
slower alone may be faster with a fused epilogue, and the reverse. The last step therefore times graphs that are
compiled as they will run. The choice is stored under the op, the machine and the operations around the call.

With ``mode="max-autotune"``, Inductor would tune the fallback in the final graph, and its choice is not always faster
than the library. The fallback is then measured twice, as Inductor tunes it and with the library's own kernel. A
template must be faster than both. It must also be faster than every template that is PyTorch code, which Inductor tunes
too.

A race times kernels on the device. Unless the compile mode captures CUDA graphs, the host launches each kernel of a
call, and for small sizes that takes longer than the kernels run. The time of a launch is then added, and no candidate
is chosen that the device computes more slowly than the fallback.
"""

from __future__ import annotations

import atexit
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from shiplap.cached_property import cached_property
from shiplap.declare.config import NO_CONFIG, Config
from shiplap.dispatch import tuned_choices
from shiplap.dispatch.outputs import flatten_op_results
from shiplap.dispatch.tuned_choices import REFERENCE
from shiplap.inductor.bound_call import LoweredCall
from shiplap.inductor.fusion_choice import CandidateVerdict
from shiplap.inductor.prove_candidate import prove_template
from shiplap.inductor.pytorch_candidate import StandaloneFunction, TracedCandidate, run_graph
from shiplap.inductor.template_candidate import TemplateCandidate
from shiplap.sampling.finding import Finding
from shiplap.torch_private import compiles_to_cuda_graphs, in_backward, inductor_lowering
from shiplap.torch_private.graph_nodes import overload_of
from shiplap.tuning.bench import Bench, LocalBench
from shiplap.tuning.candidate import Candidate, candidate_label
from shiplap.tuning.choice import Choice, place_of_key, show_time
from shiplap.tuning.compiled_templates import ALONE
from shiplap.tuning.engine import tuning_progress
from shiplap.tuning.inputs import Inputs, draw_inputs
from shiplap.tuning.key import Key, key_for
from shiplap.tuning.measure import RacePlan, Timing, clock_for, launch_seconds, race_runs
from shiplap.tuning.search import TIE, Ranking, Report, search_candidates
from shiplap.tuning.selector import SelectionOptions, SelectionTask, choice_in_use, stored_choice
from shiplap.tuning.store import ChoiceStore
from shiplap.tuning.worker_process import WorkerProcess

FINALISTS = 6  # and within NEAR of the best alone: an epilogue of its own costs each kernel something else
NEAR = 1.3
TUNED = 3.0  # times the best alone: the limit for PyTorch code that Inductor has not tuned yet
SURE = 0.98  # of the time of the fallback as it would be tuned, below which it is better untuned: two trials differ
SECONDS = 60.0  # per call, with the compilation of its candidates
UNTUNED = Config.of({"tuned": False})  # the fallback as Inductor compiles it without tuning

_forced: ContextVar[dict[str, str]] = ContextVar("shiplap_forced_candidate")


def forced_candidate(op: str) -> str | None:
    """Return the label of the candidate that calls of the op named ``op`` must use in this context.
    :func:`force_candidate` sets it for a trial compilation. Return None if no label is set.
    """
    return _forced.get({}).get(op)


@contextmanager
def force_candidate(op: str, candidate: str) -> Iterator[None]:
    """Compile calls of the op named ``op`` within the ``with`` block with the candidate labelled ``candidate``. The
    candidate must have been proven.
    """
    token = _forced.set({**_forced.get({}), op: candidate})
    try:
        yield
    finally:
        _forced.reset(token)


@dataclass
class FallbackCandidate(Candidate):
    """A candidate for ``call`` that uses no template. It is the op's own kernel. If the op has none on this device, it
    is the code that Inductor generates from the op's reference.
    """

    call: LoweredCall
    config: Config = NO_CONFIG
    kernel: str = REFERENCE
    fixed: bool = True
    opaque: bool = True
    copies: bool = True
    _alone: StandaloneFunction | None = None

    def render(self) -> None:
        """Compile the op's reference as a graph of its own for this call, at the first request. Do nothing if the op
        has a kernel of its own. Inductor must be lowering the graph of the call at that time.
        """
        if self._alone is None and not self.call.op.native_kernels(self.call.device.type):
            self._alone = StandaloneFunction.compile_for_call(self.call, self.call.reference)

    def prepare(self, args: tuple[Any, ...]) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function without parameters that runs the fallback on ``args`` and returns the outputs as a tuple.
        If the op has a kernel of its own, it runs the op. Otherwise it runs the compiled reference on copies of the
        tensors.
        """
        self.render()
        if self._alone is None:
            return lambda: flatten_op_results(self.call.op.execute(*args))
        return self._alone.bind_copies(args)


@dataclass(frozen=True)
class CandidateSelection:
    """The data with which a candidate is chosen for one call of an op, and with which the choice is stored.

    ``surroundings`` holds the operations that may be fused with the call. ``inputs`` are sample inputs. ``key`` is the
    key of the call with these operations in the store of choices, and ``alone`` is its key without them.
    """

    call: LoweredCall
    surroundings: FusibleSurroundings
    inputs: Inputs
    key: Key
    alone: Key

    @staticmethod
    def of(call: LoweredCall) -> CandidateSelection:
        """Return the data with which a candidate is chosen for ``call``. Inductor must be lowering the call at that
        time.
        """
        around = FusibleSurroundings.around_call(call)
        drawn = draw_inputs(call.op, call.recipe, str(call.device))
        layouts = ";".join(",".join(inductor_lowering.layout_key(n)) for n in call.nodes)
        extra = {"epilogue": around.text, "layouts": layouts, "sizes": call.sizes.text, "static": str(call.static)}
        # The choice with CUDA graphs is another than that of kernels which the host launches one by one.
        if inductor_lowering.is_autotuning() and call.device.type == "cuda" and compiles_to_cuda_graphs():
            extra["launch"] = "graph"
        # What ``sl.tune`` stores, which knows no neighbours.
        alone = {**dict(ALONE), "layouts": layouts, "sizes": "", "static": "True"}
        return CandidateSelection(call, around, drawn, key_for(call.op, drawn, extra), key_for(call.op, drawn, alone))


def choice_for_selection(selection: CandidateSelection, key: Key | None = None) -> Choice | None:
    """Return the candidate that was chosen earlier for ``key``, by a tuning or in an installed table. Return None if
    there is none. The default key is that of the call with the operations around it. While choices are frozen, only the
    frozen table is read.
    """
    op, key = selection.call.op, key or selection.key
    drawn = selection.inputs
    blank = Choice(op.spec.name, key["device"], drawn.bucket, drawn.dtypes, drawn.layout, "", place=place_of_key(key))
    kept = None if tuned_choices.frozen else stored_choice(op, key, ChoiceStore())
    return choice_in_use(blank, op) if kept is None else kept


def preferred_candidate(selection: CandidateSelection, names: Sequence[str]) -> str:
    """Return the label of the candidate to try first for a call that was never measured together with the operations
    around it.

    It is the candidate chosen for the call without other operations. If there is none, it is the candidate chosen for
    eager calls, if ``names`` has its label. ``names`` are the labels that are possible in this graph. Otherwise return
    an empty string.
    """
    alone = choice_for_selection(selection, selection.alone)
    if alone is not None:
        return alone.label
    eager = choice_for_selection(selection, key_for(selection.call.op, selection.inputs))
    return eager.label if eager is not None and eager.label in names else ""


def why_not_measurable() -> str:
    """Return the reason why a measurement is not allowed at this moment, such as a running backward pass or the capture
    of a CUDA graph. Return an empty string if it is allowed.
    """
    if in_backward():
        return "a backward pass is waiting"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    return ""


def measure_candidates(
    selection: CandidateSelection,
    candidates: Sequence[TemplateCandidate],
    options: SelectionOptions | None = None,
    report: Report | None = None,
    within: WorkerProcess | None = None,
) -> tuple[Choice, list[CandidateVerdict]]:
    """Verify and time ``candidates`` and the fallback, which is the op without a template. Return the choice of the
    fastest, and a list with the result of each. If ``options.keep`` is true, store the choice.

    A tuning passes ``options``, ``report``, which is called with each step, and its worker process ``within``. If
    ``within`` is None, the candidates run in this process. A compilation passes none of the three. It then uses default
    options and a worker process that all compilations share.
    """
    # A compilation measures for itself, in a worker that all compilations share.
    call, own = selection.call, options is None
    options = options or SelectionOptions(seconds=SECONDS)
    listed = render_candidates(call, candidates)
    task = SelectionTask(call.op, selection.inputs, selection.key, listed, options)
    bench = _make_bench(task, call, _isolation if own else within)
    with torch.no_grad(), nullcontext(report) if report is not None else tuning_progress(None) as told:
        ranking = search_candidates(
            call.op, listed, bench, selection.inputs, options.seconds, told, RacePlan(seconds=4.0)
        )
        choice, raced = _choose_finalist(selection, listed, ranking, isinstance(bench, LocalBench))
        told("keep", 1, 1)  # raises if the caller has given up waiting
    if options.keep:
        ChoiceStore().put(selection.key, choice.value())
    return choice, _list_verdicts(selection, listed, ranking, raced)


def _list_verdicts(
    selection: CandidateSelection, listed: list[Any], ranking: Ranking, raced: Mapping[int, Timing]
) -> list[CandidateVerdict]:
    """Return the result of each measured candidate of ``listed``. The timed candidates come first, the fastest first,
    and the dropped ones follow with their reasons.

    ``ranking.order`` holds the indices of the timed candidates in ``listed``. ``raced`` maps indices to times together
    with the operations around the call, which become the details.
    """
    around = selection.surroundings.text
    together = {i: f"with {around}: {show_time(t.median)}" for i, t in raced.items()}
    timed = [(i, round(ranking.timings[i].median * 1e6, 3)) for i in ranking.order]
    parts = [f.evidence.partition(": ") for f in ranking.findings]
    return [
        *(CandidateVerdict(candidate_label(listed[i]), "ok", together.get(i, ""), us) for i, us in timed),
        *(CandidateVerdict(name, "dropped", why) for name, _, why in parts),
    ]


def render_candidates(call: LoweredCall, candidates: Sequence[TemplateCandidate]) -> list[Any]:
    """Return a list of the fallback, which is the op without a template, and ``candidates``. All are rendered to
    kernels in this thread, since rendering needs the graph that is being lowered. If rendering fails, the later
    verification reports the error.
    """
    listed: list[Any] = [FallbackCandidate(call), *candidates]
    for candidate in listed:  # needs the graph at hand, which is this thread's
        with suppress(Exception):
            candidate.render()
    return listed


_isolation = WorkerProcess()
# One worker serves all compilations of this process. Starting one for each graph would cost an import of torch each
# time.
atexit.register(_isolation.stop)


def _make_bench(task: SelectionTask, call: LoweredCall, isolation: WorkerProcess | None) -> Bench:
    """Return a ``Bench`` that verifies and times the candidates of ``task``.

    It works in the worker process ``isolation`` if the worker can draw an equal call. That needs fixed sizes, and
    memory layouts that have a name. Otherwise, and if ``isolation`` is None, it works in this process.
    """
    # A recipe names layouts, so the worker can draw only those that have a name.
    named = dict(task.inputs.recipe.layouts)
    known = all(name in named or t.is_contiguous() for name, t in call.tensors.items())
    if call.static and known and isolation is not None:
        bench: Bench = isolation.bench("shiplap.inductor.tune_templates:provide")(task)
        if not isinstance(bench, LocalBench):
            return bench
    return LocalBench(task.inputs, task.candidates)


def _choose_finalist(
    selection: CandidateSelection, listed: list[Any], ranking: Ranking, here: bool
) -> tuple[Choice, dict[int, Timing]]:
    """Return the choice among the candidates ``listed``, and a dict of times by index in ``listed``. The times are
    those of the best candidates, compiled together with the operations around the call. The dict is empty if none were
    compiled so.

    ``ranking`` holds the times of the candidates alone. If ``here`` is true, they were verified in this process and not
    in a worker.
    """
    order, alone, tried = ranking.order, ranking.timings, len(listed) - ranking.unseen
    # A compilation with the surroundings takes seconds for each finalist, so only the best few are tried.
    near = [i for i in order if alone[i].median <= NEAR * alone[order[0]].median][:FINALISTS]
    ambient = _tuned_in_final_graph(selection.call, listed, alone)
    # The fallback always takes part: a template has to beat it.
    near += [i for i in order if i not in near and (i == 0 or i in ambient)]
    if not here:  # proven in the other process, and again as rendered in this one
        check = LocalBench(selection.inputs, listed)
        check.compile(near)
        near = [i for i in near if i == 0 or check.verify(i).ok]
        order = [i for i in order if i in near or i == 0]
    if selection.call.sizes.symbols:  # what is right at the sizes at hand may be wrong at others of the graph
        near = [i for i in near if i == 0 or _proven_in_process(ranking, listed[i])]
        order = [i for i in order if i in near or i == 0]
    finalists = list(near)
    if 0 in ambient:
        # The untuned fallback gets the index behind all candidates, and takes part in this race only.
        finalists.append(len(listed))
        listed.append(FallbackCandidate(selection.call, UNTUNED))
    around: dict[int, Timing] = {}
    launches: dict[int, float] = {}
    how = f"with {selection.surroundings.text}" if selection.surroundings.nodes else "in compiled code"
    if (selection.surroundings.nodes or ambient) and len(finalists) > 1:
        around, launches = _race_with_surroundings(selection, listed, finalists, ambient)
    how += " and launched by the host" if launches else ""
    timings: dict[int, Timing] = _without_equal_fallback(listed, _add_launches(around, launches)) or alone
    ranked = sorted(timings, key=lambda i: _ranking_cost(listed[i], timings[i])) or [0]
    # No race took place, so that the order alone decides.
    if not around:
        ranked, how = order or [0], "alone"
    return _selection_choice(
        selection, listed, ranking, {i: timings[i].median for i in ranked if i in timings}, how, tried
    ), around


def _add_launches(device: Mapping[int, Timing], launches: Mapping[int, float]) -> dict[int, Timing]:
    """Return the times ``device`` of kernels, by index in the list of candidates, with the seconds ``launches`` that
    the host takes to launch them. If ``launches`` is empty, return a copy of ``device``.

    Candidates that the device computes more slowly than the fallback, index 0, are then left out. Where a model keeps
    the device busy, launches are hidden, and such a candidate would make the model slower.
    """
    if not launches:
        return dict(device)
    limit = device[0].median if 0 in device else math.inf
    kept = {i: t for i, t in device.items() if t.median <= limit}
    return {
        i: replace(t, median=t.median + launches[i], low=t.low + launches[i], high=t.high + launches[i])
        for i, t in kept.items()
    }


def _proven_in_process(ranking: Ranking, candidate: TemplateCandidate) -> bool:
    """Return whether ``candidate`` agrees with the reference at all tested sizes at which its graph may run. If it does
    not, append a finding with the reason to ``ranking.findings``.
    """
    verdict = prove_template(candidate)
    if verdict.status != "ok":
        op, evidence = candidate.call.op, f"{candidate_label(candidate)}: {verdict.detail}"
        recipe, fix = str(candidate.call.recipe), "correct the kernel, or leave this config out"
        ranking.findings.append(Finding("tune.verify", "fail", op.spec.name, evidence, recipe, fix))
    return verdict.status == "ok"


def _without_equal_fallback(listed: list[Any], around: Mapping[int, Timing]) -> dict[int, Timing]:
    """Return a copy of ``around``, times by index in ``listed``, without the untuned fallback, unless that is clearly
    faster than the tuned fallback.

    The untuned fallback is compiled without Inductor's tuning. The tuned fallback has index 0. If one of them has no
    time, nothing is left out.
    """
    untuned = next((i for i in around if listed[i].config == UNTUNED and listed[i].kernel == REFERENCE), None)
    if untuned is None or 0 not in around or around[untuned].median < SURE * around[0].median:
        return dict(around)
    return {i: t for i, t in around.items() if i != untuned}


def _ranking_cost(candidate: Candidate, timing: Timing) -> float:
    """Return the seconds by which ``candidate`` is ranked. They are its median time. For a fallback, this time is
    multiplied by ``TIE``, so that a template wins only if it is measurably faster.
    """
    return timing.median * (TIE if candidate.kernel == REFERENCE else 1.0)


def _tuned_in_final_graph(call: LoweredCall, listed: list[Any], alone: Mapping[int, Timing]) -> set[int]:
    """Return the indices in ``listed`` of the candidates that Inductor's own tuning may make faster in the final graph.
    ``alone`` holds the times of the candidates by index. The set is empty if Inductor does not tune.

    Such candidates are templates of PyTorch operations, and the fallback, which is the op without a template. A
    fallback that is the op's own kernel is called unchanged, so it is left out. If the reference calls a fast library,
    the fallback is always included, because Inductor's tuning starts from that call. All others are included if they
    take at most three times as long as the fastest.
    """
    if not inductor_lowering.is_autotuning() or not alone:
        return set()
    # Each finalist costs a compilation, and tuning is not expected to gain more than this factor.
    limit = TUNED * min(t.median for t in alone.values())
    traced = {i for i in alone if isinstance(listed[i], TracedCandidate) and alone[i].median <= limit}
    if 0 not in alone or call.op.native_kernels(call.device.type):
        return traced
    library = call.device.type in call.op.spec.reference_is_fast_on
    return traced | ({0} if library or alone[0].median <= limit else set())


def _inductor_tunes(candidate: Candidate) -> bool:
    """Return whether ``candidate`` consists of PyTorch operations that Inductor tunes if the compile mode requests it.
    Such candidates are templates of PyTorch operations and the tuned fallback.
    """
    return isinstance(candidate, TracedCandidate) or (candidate.kernel == REFERENCE and candidate.config != UNTUNED)


def _selection_choice(
    selection: CandidateSelection, listed: list[Any], ranking: Ranking, times: dict[int, float], how: str, tried: int
) -> Choice:
    """Return the record of the choice of the first candidate in ``times``. ``times`` holds median seconds by index in
    ``listed``, the best candidate first. ``how`` describes in words how they were measured. ``tried`` is the number of
    candidates that were tested.
    """
    ranked = list(times) or [0]
    best, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    return Choice(
        op=selection.call.op.spec.name,
        device=selection.key["device"],
        bucket=selection.inputs.bucket,
        dtypes=selection.inputs.dtypes,
        layout=selection.inputs.layout,
        kernel=listed[best].kernel,
        config=listed[best].config,
        time=times.get(best, 0.0),
        runner_up=candidate_label(listed[second]) if second is not None else "",
        runner_up_time=times[second] if second is not None else 0.0,
        default_time=times.get(0, 0.0),
        reason=_describe_choice(listed, ranked, times, how, ranking),
        findings=tuple(ranking.findings),
        tried=tried,
        sizes=str(selection.inputs.recipe),
        place=place_of_key(selection.key),
    )


def _describe_choice(listed: list[Any], ranked: list[int], times: dict[int, float], how: str, ranking: Ranking) -> str:
    """Return the reason of a choice as one line. It holds the best time, the times of the fallbacks and of the next
    candidate, and the number of dropped candidates.

    ``ranked`` holds indices in ``listed``, the best first. ``times`` holds seconds by index. ``how`` describes in words
    how they were measured.
    """
    if not times:
        return "the fallback: no template could be run"
    best, fallbacks = ranked[0], [i for i in ranked if listed[i].kernel == REFERENCE]
    reasons = [f"{_name_fallback(listed[i])} {show_time(times[i])}" for i in fallbacks if i != best]
    against = "".join(f", {text}" for text in reasons)
    other = next((i for i in ranked[1:] if i not in fallbacks), None)
    behind = f", next {candidate_label(listed[other])} {show_time(times[other])}" if other is not None else ""
    # Named, so that a wrong candidate does not go unnoticed.
    wrong = sum(f.verdict == "fail" for f in ranking.findings)
    return f"fastest {how}: {show_time(times[best])}{against}{behind}" + (f"; {wrong} dropped" if wrong else "")


def _name_fallback(candidate: Candidate) -> str:
    """Return ``fallback untuned`` if Inductor compiles the fallback ``candidate`` without tuning. Otherwise return
    ``fallback``.
    """
    return "fallback untuned" if candidate.config == UNTUNED else "fallback"


def _race_with_surroundings(
    selection: CandidateSelection, listed: list[Any], finalists: Sequence[int], ambient: Collection[int]
) -> tuple[dict[int, Timing], dict[int, float]]:
    """Return the times, by index in ``listed``, of the candidates ``finalists``, and the seconds in which the host
    launches each. Each is compiled together with the operations around the call, and all run in alternation. A
    candidate that cannot be compiled is left out. If fewer than two are left, the first dict is empty. The second is
    empty if the host launches no kernel of its own for each call, as on a CPU and with CUDA graphs.

    All are compiled in the compile mode of the user, so that the kernels around a template are those of the final
    graph. PyTorch operations that are not in ``ambient`` are compiled without tuning, because tuning would not make
    them fast enough.
    """
    around = selection.surroundings
    clock = clock_for(str(selection.call.device))
    # All finalists get the same arguments, so that values do not decide which of them is faster.
    args = around.arguments(selection.inputs.real[0].fresh())
    written: dict[int, Callable[[], Callable[..., Any]]] = {}
    for index in finalists:
        vain = index not in ambient and _inductor_tunes(listed[index])
        mode = inductor_lowering.no_autotuning() if vain else nullcontext()
        with suppress(Exception), mode, force_candidate(selection.call.op.spec.name, candidate_label(listed[index])):
            written[index] = inductor_lowering.write_graph(around.graph(), around.fakes())
    # Lowering needs this thread, but the compilers that load the written code are processes, which can run in parallel.
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        loading = {index: pool.submit(load) for index, load in written.items()}
    runs: dict[int, Any] = {}
    direct: dict[int, Any] = {}
    for index, future in loading.items():
        with suppress(Exception):
            direct[index] = partial(run_graph, future.result(), args)
            runs[index] = clock.ready(direct[index])
    # One runner cannot be compared.
    timings = race_runs(runs, clock, RacePlan(seconds=2.0)) if len(runs) > 1 else {}
    wait = _wait_for_launches(selection.call.device)
    return timings, {} if wait is None else launch_seconds({i: direct[i] for i in timings}, wait)


def _wait_for_launches(device: torch.device) -> Callable[[], Any] | None:
    """Return a function that waits until ``device`` has finished its work, if the compiled code launches each kernel
    from the host. Otherwise return None.
    """
    if device.type != "cuda" or compiles_to_cuda_graphs():
        return None
    return partial(torch.cuda.synchronize, device)


LIMIT = 24  # nodes
VIEWS = frozenset({"view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand"})
CASTS = frozenset({"convert_element_type", "_to_copy"})


@dataclass(frozen=True)
class FusibleSurroundings:
    """A call of an op and the operations that may be fused with it.

    ``call`` is the call, and ``node`` its FX node. ``nodes`` are pointwise operations, casts and views that depend on
    the call's result, in graph order.
    """

    call: LoweredCall
    node: fx.Node
    nodes: tuple[fx.Node, ...]

    @staticmethod
    def around_call(call: LoweredCall) -> FusibleSurroundings:
        """Return ``call`` with at most 24 pointwise operations, casts and views that depend on its result."""
        node = inductor_lowering.current_node()
        inside: dict[fx.Node, None] = {node: None}
        for other in node.graph.nodes:
            if (
                len(inside) <= LIMIT
                and other is not node
                and _can_fuse(other)
                # Nodes are in topological order, so one pass finds all that depend on the call through others.
                and inside.keys() & set(other.all_input_nodes)
            ):
                inside[other] = None
        return FusibleSurroundings(call, node, tuple(n for n in inside if n is not node))

    @property
    def text(self) -> str:
        """The names of the operations in ``nodes``, such as ``add, gelu``, or an empty string if there are none. This
        text is part of the key of a stored choice.
        """
        return ", ".join(_operator_base_name(n) for n in self.nodes)

    @cached_property
    def _inputs(self) -> tuple[fx.Node, ...]:
        """The FX nodes that the call and the operations in ``nodes`` read, without these themselves, in the order of
        their first use.
        """
        inside = {self.node, *self.nodes}
        read = [i for n in (self.node, *self.nodes) for i in n.all_input_nodes if i not in inside]
        return tuple(dict.fromkeys(read))

    def graph(self) -> fx.GraphModule:
        """Return a new FX graph of the call and the operations in ``nodes``, with fixed sizes. Its inputs stand for
        ``_inputs``. Its outputs are the results that no node or a node outside it reads.
        """
        graph, made = fx.Graph(), {}
        for node in self._inputs:
            made[node] = graph.placeholder(node.name)
        for node in (self.node, *self.nodes):
            made[node] = graph.node_copy(node, lambda n: made[n])
        inside = {self.node, *self.nodes}
        # A result that the rest of the graph reads has to be an output, or Inductor would remove its computation.
        leaves = [n for n in (self.node, *self.nodes) if not n.users or any(u not in inside for u in n.users)]
        graph.output(tuple(made[n] for n in leaves))
        return inductor_lowering.with_values(fx.GraphModule(torch.nn.Module(), graph), self.fakes())

    def fakes(self) -> list[Any]:
        """Return fake tensors of fixed sizes for the inputs of :meth:`graph`."""
        return [inductor_lowering.fixed_fake(n.meta["val"]) for n in self._inputs]

    def arguments(self, args: tuple[Any, ...]) -> list[Any]:
        """Return real tensors as inputs of :meth:`graph`. The inputs of the call come from ``args``, its arguments. The
        inputs of the other operations are filled with normally distributed numbers.
        """
        # Valid values for the op; for its neighbours any numbers will do.
        given = dict(zip(self.node.all_input_nodes, [a for a in args if isinstance(a, Tensor)], strict=False))
        return [inductor_lowering.real_tensor_like(n.meta["val"], given.get(n)) for n in self._inputs]


def _can_fuse(node: fx.Node) -> bool:
    """Return whether ``node`` is a pointwise operation, a cast or a view, and returns one tensor."""
    overload = overload_of(node)
    if overload is None:
        return False
    pointwise = torch.Tag.pointwise in overload.tags or _operator_base_name(node) in CASTS
    return isinstance(node.meta.get("val"), Tensor) and (pointwise or _operator_base_name(node) in VIEWS)


def _operator_base_name(node: fx.Node) -> str:
    """Return the name of the ATen operator that ``node`` calls, without namespace and overload, such as ``add``."""
    return str(node.target).split(".")[1]
