"""``cuda_graph``: captured once, the op is right on every replay, whatever happens to memory in between.

Each step detects one class of fault, the harmless ones first. A step that could take the CUDA context down (a replay
over released memory) only runs when all freed memory was held, poisoned and found untouched before.

The calls of the CUDA runtime in a call are counted with torch's profiler: launches, allocations, synchronisations,
loads. The caching allocator makes none of these in a warm process, so a raw allocation is the op's own.
"""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiplap.audit.capture import (
    Canaries,
    CaptureError,
    GraphRecording,
    copy_into_buffers,
    delay_stream,
    no_synchronisation,
    on_stream,
    record_cuda_graph,
)
from shiplap.audit.check import NO_CAPTURE, Check, Observation
from shiplap.dispatch import Op
from shiplap.errors import error_line
from shiplap.safe_io.work_folders import work_folder
from shiplap.sampling.case import SampleCase, tensors_among
from shiplap.sampling.compare import Reduction, bitwise_difference, compare_within_tolerance
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.run import reference_effects, run_on
from shiplap.sampling.samples import Samples

# Calls before a capture, replays of a step, and rounds of calls on two streams.
WARM, REPLAYS, ROUNDS = 3, 3, 12
LARGER, COLD = 10, 12  # how often a sample has grown: beyond what the other checks have shown to the op

STREAM_FIX = "launch on torch.cuda.current_stream(tensor.device), and allocate nothing under another stream"
UNSAFE_FIX = "define the op with tags=(torch.Tag.cudagraph_unsafe,), which keeps it out of graphs"
SYNC_FIX = (
    "compute it on the device, or on the host before the op: no .item(), .cpu(), .nonzero() or stream.synchronize(). "
    f"Where the op has to wait, {UNSAFE_FIX}"
)
ALLOCATE_FIX = "take scratch memory as workspace=, or from torch.empty: the graph's own pool then owns it"
BAKED_FIX = (
    "read every value on the device at each launch: no host copy of a value, no result cached by address or shape"
)
LIFETIME_FIX = "allocate scratch in each call (workspace=): a graph keeps the address of a buffer that a cache replaces"
PREPARE_FIX = "make plans, handles and tuned choices when the model is loaded; during capture look them up only"
# A text of its own, since this problem has another fix than wrong results.
WRITES_PROBLEM = "writes to an input that the schema does not declare mutated"
CALLBACK_FIX = "do it on the device, or after the replay: host code in a graph stops the stream until it has run"
CAPACITY_FIX = f"use the capacity form: pad the output to its bound and return the count as a tensor; or {UNSAFE_FIX}"


def cuda_graph_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``cuda_graph`` calls the op. They are the base sample and samples without
    optional arguments.
    """
    yield from samples.plain()
    yield from samples.optionals()


@dataclass
class _GraphTrial:
    """The trial of an op on one sample of arguments, with the two CUDA streams on which calls are captured and
    replayed. ``drawn`` counts how often new values were drawn for the sample.
    """

    op: Op
    case: SampleCase
    stream: torch.cuda.Stream
    second: torch.cuda.Stream
    drawn: int = 0

    @classmethod
    def of(cls, op: Op, case: SampleCase) -> _GraphTrial:
        """Return a trial of the op on the sample ``case``, with two new CUDA streams."""
        return cls(op, case, torch.cuda.Stream(case.device), torch.cuda.Stream(case.device))

    def run(self, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Call the op with ``args``. Return its results, followed by the arguments that it mutates."""
        return run_on(self.op, args)

    def warm_up(self, case: SampleCase) -> None:
        """Call the op on ``case`` a few times on the trial's stream. This fills the op's caches before a capture."""
        with on_stream(self.stream):
            for _ in range(WARM):
                self.run(case.fresh())

    def with_new_values(self, case: SampleCase | None = None) -> SampleCase:
        """Return a sample with the sizes of ``case`` (by default the trial's sample) and with values that no earlier
        call had. Return ``case`` itself if the op's builder of samples never returns these sizes.
        """
        case, self.drawn = case or self.case, self.drawn + 1
        for attempt in range(8):  # a builder may deviate from the sizes it is asked for
            fresh = Samples(self.op, case.seed + 100 * self.drawn + attempt, case.device).build(case.recipe)
            if [t.shape for t in tensors_among(fresh.args)] == [t.shape for t in tensors_among(case.args)]:
                return fresh
        return case

    def grown(self, steps: int) -> SampleCase | None:
        """Return the last of up to ``steps`` ever larger versions of the trial's sample. Return None if the declaration
        admits no larger sample, or none that one graph could serve.
        """
        *_, sample = [None, *Samples(self.op, self.case.seed, self.case.device).grown(steps)]
        return sample if sample is not None and sample.graph_key == self.case.graph_key else None

    def difference_from_reference(self, got: tuple[Tensor, ...], case: SampleCase) -> str:
        """Return a message that says how the results ``got`` differ from the reference's on ``case``, or an empty
        string if they agree.
        """
        return against_reference(self.op, case, got, measured=False).problem

    def fault_of_replay(self, recording: GraphRecording, case: SampleCase) -> str:
        """Replay ``recording`` with the values of ``case``. Return a message that describes a wrong result, or
        ``WRITES_PROBLEM`` if the replay changes an input that the op does not mutate. Return an empty string if nothing
        is wrong.
        """
        got = recording.replay(case.args)
        pairs = zip(self.op.spec.args, recording.args, case.args, strict=True)
        kept = [(b, v) for a, b, v in pairs if not a.mutated]
        for buffer, value in zip(tensors_among(b for b, _ in kept), tensors_among(v for _, v in kept), strict=True):
            if bitwise_difference([buffer], [value]):
                return WRITES_PROBLEM
        return self.difference_from_reference(got, case)


def observe_cuda_graph(op: Op, case: SampleCase) -> Observation:
    """Capture the op in a CUDA graph and replay it under different conditions of memory and streams. The returned
    observation has the first problem that is found. An op that a tag keeps out of graphs is not captured.
    """
    if not case.device.startswith("cuda"):
        return Observation(skip=NO_CAPTURE)
    uncapturable = observe_uncapturable(op)
    if uncapturable is not None and op.spec.dynamic:  # its sizes change with its values
        return uncapturable
    torch.cuda.empty_cache()  # what lies free from now on is of this trial
    trial, notes = _GraphTrial.of(op, case), []
    eager = _observe_eager, _observe_side_stream, _observe_two_streams, _observe_other_device
    # The order matters: eager steps find faults that would make a later capture crash.
    for step in (
        _observe_eager,
        _observe_side_stream,
        _observe_synchronisation,
        _observe_two_streams,
        _observe_replays,
        _observe_cold_capture,
        _observe_cuda_calls,
        _observe_other_device,
    ):
        if uncapturable is not None and step not in eager:
            continue
        observation = step(trial)
        if observation.problem:
            return observation
        notes += [observation.note] if observation.note else []
    return uncapturable or Observation(note="; ".join(notes))


def observe_uncapturable(op: Op) -> Observation | None:
    """Return the observation of an op that cannot be captured in a graph, or None for an op that can.

    The observation is a ``skip`` if the op has a tag by which torch.compile keeps it out of graphs. Otherwise it has a
    problem.
    """
    tagged = torch.Tag.cudagraph_unsafe in op.overload.tags
    if op.spec.dynamic:
        reason = f"cannot be captured: its size {', '.join(op.spec.dynamic)} depends on data; use the capacity form"
        if tagged or torch.Tag.dynamic_output_shape in op.overload.tags:
            return Observation(skip=f"{reason} (tagged, so that torch.compile keeps it out of graphs)")
        return Observation(f"{reason}; and it is not tagged cudagraph_unsafe", fix=CAPACITY_FIX)
    return Observation(skip="tagged cudagraph_unsafe: torch.compile keeps it out of graphs") if tagged else None


def _observe_eager(trial: _GraphTrial) -> Observation:
    """Call the op, without a graph, repeatedly on the same tensors with new values in them. The returned observation
    has a problem if results are wrong, which shows that values were kept from an earlier call.
    """
    trial.warm_up(trial.case)
    args = trial.case.fresh()
    for _ in range(REPLAYS):
        changed = trial.with_new_values()
        with on_stream(trial.stream):
            copy_into_buffers(args, changed.args)
            got = trial.run(args)
        if problem := trial.difference_from_reference(got, changed):
            return Observation(f"without any graph, with new values in the same buffers: {problem}", fix=BAKED_FIX)
    return Observation()


def _observe_side_stream(trial: _GraphTrial) -> Observation:
    """Call the op on a CUDA stream on which its inputs are written only after a delay. The returned observation has a
    problem if the results are wrong. A part of the op's work then ran on another stream, before the inputs were
    written.
    """
    trial.warm_up(trial.case)
    changed, args = trial.with_new_values(), trial.case.fresh()
    torch.cuda.synchronize(trial.stream.device)
    # The op's own stream waits for the gate, so that work on any other stream runs ahead of the writes to the inputs.
    gate = delay_stream(trial.second)
    with torch.cuda.stream(trial.stream):
        trial.stream.wait_event(gate)
        copy_into_buffers(args, changed.args)
        got = trial.run(args)
    torch.cuda.synchronize(trial.stream.device)
    if problem := trial.difference_from_reference(got, changed):
        return Observation(
            f"on a side stream, after writes to the inputs that are still under way on it: {problem}; so part of the "
            "work is launched on another stream",
            fix=STREAM_FIX,
        )
    return Observation()


def _observe_synchronisation(trial: _GraphTrial) -> Observation:
    """Call the op while torch forbids synchronisation. The returned observation has a problem if the op waits for the
    device, since a capture forbids that.
    """
    args = trial.case.fresh()
    try:
        with on_stream(trial.stream), no_synchronisation():
            trial.run(args)
    except RuntimeError as e:
        if "synchronizing" not in str(e):
            raise
        return Observation(f"waits for the device, which a capture forbids: {error_line(e)}", fix=SYNC_FIX)
    return Observation()


def _observe_two_streams(trial: _GraphTrial) -> Observation:
    """Call the op with different values alternately on two CUDA streams that start together. The returned observation
    has a problem if results are wrong, as they are if the streams share scratch memory.
    """
    streams = trial.stream, trial.second
    pair = [trial.with_new_values(), trial.with_new_values()]
    args = [[c.fresh() for _ in range(ROUNDS)] for c in pair]
    trial.warm_up(trial.case)
    # Both streams start at the same event, so that their calls overlap.
    gate, got = delay_stream(torch.cuda.Stream(trial.stream.device)), []
    for stream in streams:
        stream.wait_event(gate)
    for turn in range(ROUNDS):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got.append((which, trial.run(args[which][turn])))
    torch.cuda.synchronize(trial.stream.device)
    problems = [p for which, outs in got if (p := trial.difference_from_reference(outs, pair[which]))]
    if problems:
        return Observation(
            f"two streams at once: {len(problems)} of {len(got)} calls are wrong, first {problems[0]}",
            fix="share no scratch memory between streams: take it as workspace=",
        )
    return Observation()


def _observe_replays(trial: _GraphTrial) -> Observation:
    """Capture the op after a warm-up, then replay the graph with new values under different conditions of memory. The
    returned observation has the first problem that is found.
    """
    trial.warm_up(trial.case)
    try:
        recording = record_cuda_graph(trial.run, trial.case.args, trial.stream)
    except CaptureError as e:
        return _explain_failed_capture(trial, str(e))
    if recording.nodes["host callback"]:
        return Observation(f"every replay runs {recording.nodes['host callback']} host callbacks", fix=CALLBACK_FIX)
    old = reference_effects(trial.op, trial.case.args)
    for step in (_observe_new_values, _observe_after_larger, _observe_shared_pool, _observe_after_release):
        if observation := step(trial, recording, old):
            return observation
    first = [t.clone() for t in recording.replay(trial.case.args)]
    nodes = ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in sorted(recording.nodes.items()))
    note = f"graph of {nodes or 'unknown nodes'}, {recording.allocations} allocations from its pool"
    if bitwise_difference(recording.replay(trial.case.args), first):
        note += ", two replays with the same values differ in bits (see determinism)"
    return Observation(note=note)


def _explain_failed_capture(trial: _GraphTrial, failure: str) -> Observation:
    """Return the observation of a failed capture, whose error is ``failure``. Its problem says whether CUDA's relaxed
    mode of capture accepts the call.
    """
    try:
        record_cuda_graph(trial.run, trial.case.args, trial.stream, mode="relaxed")
    except CaptureError:
        return Observation(f"capture fails, in relaxed mode too: {failure}", fix=SYNC_FIX)
    return Observation(
        f"allocates or releases device memory by itself (cudaMalloc, cudaFree), which only "
        f"capture_error_mode='relaxed' lets pass: {failure}",
        fix=ALLOCATE_FIX,
    )


def _observe_new_values(trial: _GraphTrial, recording: GraphRecording, old: tuple[Tensor, ...]) -> Observation | None:
    """Replay the graph with new values. Return an observation with a problem, or None if nothing is wrong.

    The problem is a wrong result, a changed input or a write to freed memory. ``old`` has the reference's results for
    the values at capture.
    """
    for turn in range(REPLAYS):
        changed, canaries = trial.with_new_values(), Canaries(trial.stream.device)
        problem = trial.fault_of_replay(recording, changed)
        if damaged := canaries.damaged():
            return Observation(_describe_trespass(damaged, f"replay {turn}"), fix=LIFETIME_FIX)
        if problem == WRITES_PROBLEM:
            return Observation(f"replay {turn} {problem}", fix="work on a copy, or declare mutates=(...)")
        if problem:
            # Results of the values at capture point to a value that was read on the host.
            stale = not compare_within_tolerance(recording.outs, old, old, Reduction(1)).problem
            nothing = recording.nodes and not set(recording.nodes) - {"empty node"}
            why = "; the graph is empty" if nothing else "; these are the results of the values at capture" * stale
            return Observation(f"replay {turn} with new values: {problem}{why}", fix=BAKED_FIX)
    return None


def _observe_after_larger(trial: _GraphTrial, recording: GraphRecording, _: Any) -> Observation | None:
    """Replay the graph after an eager call with larger sizes, which may have replaced memory that the graph uses.
    Return an observation with a problem if the replay is wrong, and otherwise None. The last argument is not used.
    """
    before = [t.clone() for t in recording.replay(trial.with_new_values().args)]
    larger = trial.grown(LARGER)
    with on_stream(trial.stream):
        # A buffer kept from a call shows at the second one, a buffer that grows at the larger one.
        for case in [trial.with_new_values(), trial.with_new_values(), *([larger] if larger else [])]:
            trial.run(case.fresh())
    if problem := bitwise_difference(recording.outs, before, "before"):
        return Observation(
            f"an eager call overwrites the results of the graph: {problem}",
            fix="allocate the output in every call: keep no output buffer",
        )
    # A cached buffer that was replaced is only free once its tensor is gone.
    gc.collect()
    changed, canaries = trial.with_new_values(), Canaries(trial.stream.device)
    problem = trial.fault_of_replay(recording, changed)
    if damaged := canaries.damaged():
        return Observation(_describe_trespass(damaged, "a replay after a larger call"), fix=LIFETIME_FIX)
    if problem:
        return Observation(
            f"a replay after a larger call, freed memory poisoned: {problem}",
            fix=f"{LIFETIME_FIX}; the same holds for host memory that a captured copy reads",
        )
    return None


def _describe_trespass(damaged: int, when: str) -> str:
    """Return a sentence that says how many bytes of freed memory were written, and ``when``."""
    return f"{when} writes {damaged} bytes of memory that was freed: another tensor would have lived there"


def _observe_shared_pool(trial: _GraphTrial, recording: GraphRecording, _: Any) -> Observation | None:
    """Capture a second graph in the memory pool of the first, and replay both alternately. Return an observation with a
    problem if a replay is wrong, and otherwise None. The last argument is not used.
    """
    case = trial.grown(LARGER) or trial.case
    trial.warm_up(case)
    try:
        second = record_cuda_graph(trial.run, case.args, trial.stream, recording.graph.pool())
    except CaptureError as e:
        return Observation(f"a second graph in the same pool cannot be captured: {e}", fix=LIFETIME_FIX)
    for turn in range(REPLAYS):
        for which, each in (("first", trial.with_new_values()), ("second", trial.with_new_values(case))):
            if problem := trial.fault_of_replay(recording if which == "first" else second, each):
                return Observation(
                    f"two graphs share a pool: the {which} is wrong in round {turn}: {problem}", fix=LIFETIME_FIX
                )
    return None


def _observe_after_release(trial: _GraphTrial, recording: GraphRecording, _: Any) -> Observation | None:
    """Replay the graph after a second graph was destroyed and torch's cached memory was released. Return an observation
    with a problem if the replay is wrong, and otherwise None. The last argument is not used.
    """
    gc.collect()
    torch.cuda.empty_cache()
    if problem := trial.fault_of_replay(recording, trial.with_new_values()):
        return Observation(
            f"a replay after another graph was destroyed and caches were emptied: {problem}", fix=LIFETIME_FIX
        )
    return None


def _observe_cold_capture(trial: _GraphTrial) -> Observation:
    """Capture the first call with new sizes. The returned observation has a problem if the capture fails or if a later
    result is wrong.

    A later result is wrong if the op keeps state that the capture recorded but did not compute.
    """
    case = trial.grown(COLD)
    if case is None:
        return Observation()
    how = "the first call with new sizes, made while capturing"
    try:
        recording = record_cuda_graph(trial.run, case.args, trial.stream)
    except CaptureError as e:
        return Observation(f"{how}, fails: {e}", fix=PREPARE_FIX)
    with on_stream(trial.stream):
        # A capture computes nothing, so that state which it has left behind is empty.
        eager = trial.run(case.fresh())
    if problem := trial.difference_from_reference(eager, case):
        return Observation(
            f"{how}, leaves state behind that is recorded but not computed: an eager call is then wrong: {problem}",
            fix=PREPARE_FIX,
        )
    if problem := trial.fault_of_replay(recording, trial.with_new_values(case)):
        return Observation(f"{how}, is wrong on replay: {problem}", fix=PREPARE_FIX)
    return Observation()


def _observe_cuda_calls(trial: _GraphTrial) -> Observation:
    """Return an observation that notes the CUDA runtime calls of a warm call and of a first call with new sizes. It
    never has a problem.
    """
    trial.warm_up(trial.case)
    args, new = trial.case.fresh(), trial.grown(COLD + 1)
    with on_stream(trial.stream):
        notes = [f"a warm call: {count_cuda_calls(lambda: trial.run(args))}"]
        if new is not None:
            fresh = new.fresh()
            notes.append(f"a first call with new sizes: {count_cuda_calls(lambda: trial.run(fresh))}")
    return Observation(note="; ".join(notes))


def _observe_other_device(trial: _GraphTrial) -> Observation:
    """Call the op while another CUDA device than that of the tensors is the current one. The returned observation has a
    problem if the call raises an exception or if results are wrong. With one device, nothing is called.
    """
    count = torch.cuda.device_count()
    if count < 2:
        return Observation(note="one device: not tried with another one current")
    current = (torch.device(trial.case.device).index or 0) + 1
    with torch.cuda.device(current % count):
        try:
            problem = trial.difference_from_reference(trial.run(trial.case.fresh()), trial.case)
        except RuntimeError as e:
            problem = error_line(e)
    fix = "guard with torch.cuda.device(tensor.device); keep handles by device"
    return Observation(f"with cuda:{current % count} current, tensors elsewhere: {problem}" if problem else "", fix=fix)


CHECK = Check(
    "cuda_graph",
    order=270,
    observes="on side streams, captured and replayed with new values, freed memory poisoned, equals the reference",
    observe=observe_cuda_graph,
    cases=cuda_graph_cases,
    obligations=("capture",),
    varies=("order of calls",),
    needs=("numerics",),
    patience=120.0,
    fix=PREPARE_FIX,
)


# The range in the trace that has the calls, without those of the profiler.
PROFILER_MARK = "shiplap::traced"
PATTERNS_BY_KIND = {  # what a call is counted as → names of the runtime's and the driver's functions
    "raw allocation": r"cu(da)?(Malloc|MemAlloc|MemCreate|HostAlloc|MemHostAlloc|HostRegister|MemHostRegister)",
    "raw release": r"cu(da)?(Free|MemFree|MemRelease)",
    "synchronisation": r"cu(da)?\w*Synchronize|cudaMemcpy(_v\d+)?$|cuMemcpy(DtoH|HtoD)(_v2)?$",
    "host callback": r"cu(da)?(LaunchHostFunc|StreamAddCallback)",
    "module load": r"cu(da)?(ModuleLoad|LibraryLoad)",
    "launch": r"cu(da)?Launch(Cooperative)?Kernel",
}
# Kinds that a captured graph or an overlapping stream cannot afford.
REPORTED_KINDS = ("raw allocation", "synchronisation", "host callback", "module load")


@dataclass(frozen=True)
class CudaCallCounts:
    """The number of CUDA calls by kind (see ``PATTERNS_BY_KIND``) and the ids of the streams on which kernels ran.
    ``reason`` says why nothing was counted, and is empty if the calls were counted.
    """

    calls: Counter[str]
    streams: frozenset[int] = frozenset()
    reason: str = ""

    def __str__(self) -> str:
        """Return a message with the numbers of launches, streams and other CUDA calls, or with the reason why nothing
        was counted.
        """
        if self.reason:
            return f"not counted ({self.reason})"
        counts = [f"{self.calls['launch']} launches on {len(self.streams)} streams"]
        return ", ".join(counts + [f"{self.calls[kind]} {kind}s" for kind in REPORTED_KINDS])


def count_cuda_calls(run: Callable[[], Any]) -> CudaCallCounts:
    """Run ``run()`` under torch's profiler, and return the numbers of CUDA calls that it makes. The calls of the
    profiler itself are left out. If they cannot be counted, the result has a ``reason``.
    """
    activity = torch.profiler.ProfilerActivity
    if activity.CUDA not in torch.profiler.supported_activities():
        return CudaCallCounts(Counter(), reason="this torch has no CUPTI")
    try:
        with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profile:
            with torch.profiler.record_function(PROFILER_MARK):
                run()
            # Kernels that still run when the profile ends would be missing in it.
            torch.cuda.synchronize()
        with work_folder("audit") as folder:
            file = folder / "trace.json"
            profile.export_chrome_trace(str(file))
            return parse_chrome_trace(json.loads(file.read_text()))
    except (RuntimeError, OSError, ValueError) as e:
        return CudaCallCounts(Counter(), reason=error_line(e))


def parse_chrome_trace(trace: dict[str, Any]) -> CudaCallCounts:
    """Return the numbers of CUDA calls, and the streams of the kernels that they launched, in a profiler's Chrome
    trace. Only calls in the range that :func:`count_cuda_calls` marks are counted. If they cannot be counted, the
    result has a ``reason``.
    """
    events = [e for e in trace.get("traceEvents", ()) if e.get("ph") == "X"]
    mark = next((e for e in events if e.get("name") == PROFILER_MARK and "gpu" not in e.get("cat", "")), None)
    if mark is None:
        return CudaCallCounts(Counter(), reason="the profiler lost its mark")
    calls: Counter[str] = Counter()
    launched = set()
    for e in events:
        inside = mark["ts"] <= e["ts"] <= mark["ts"] + mark["dur"]
        if inside and e.get("cat") in ("cuda_runtime", "cuda_driver"):
            # The correlation id joins a launch and its kernel, which runs later and outside of the marked range.
            launched.add(e.get("args", {}).get("correlation"))
            calls.update(kind for kind, pattern in PATTERNS_BY_KIND.items() if re.match(pattern, e["name"]))
    if not launched:
        return CudaCallCounts(Counter(), reason="the profiler saw no call of the CUDA runtime")
    kernels = [e.get("args", {}) for e in events if e.get("cat") == "kernel"]
    streams = frozenset(k["stream"] for k in kernels if k.get("correlation") in launched and "stream" in k)
    return CudaCallCounts(calls, streams)
