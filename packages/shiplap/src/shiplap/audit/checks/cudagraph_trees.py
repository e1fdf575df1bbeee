"""``cudagraph_trees``: under ``torch.compile(mode="reduce-overhead")`` the op stays in the graph and copies nothing.

Torch keeps parameters and buffers where they are and copies other inputs before each replay. An op can undo both. A
result on the host keeps the whole region out of graphs. A staging buffer of the op copies the weights at every replay,
which no comparison of values detects.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shiplap import torch_private
from shiplap.audit.capture import CaptureError, GraphRecording, on_stream, record_cuda_graph
from shiplap.audit.check import NO_CAPTURE, Check, Observation
from shiplap.audit.checks.cuda_graph import UNSAFE_FIX, WARM, observe_uncapturable
from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.run import call_op, run_on
from shiplap.sampling.samples import Samples, with_other_values
from shiplap.torch_private.dynamo import cudagraph_inputs, cudagraph_skips

COMPILED_CALLS = 5  # torch warms up, records, then replays
STAGED_FIX = "read the input where it is: no staging buffer, no copy into memory that the op keeps"
HOST_FIX = f"return tensors on the device of the inputs only; or {UNSAFE_FIX}"


class _ArgumentHolder(torch.nn.Module):
    """A module that owns all tensor arguments of an op but one, like the weights of a model. They are buffers of the
    module, so torch takes their addresses to be constant.
    """

    def __init__(self, op: Op, case: SampleCase) -> None:
        """Make a module that holds copies of the sample's tensor arguments as buffers. The first argument that the op
        does not mutate is left out, since it varies and is passed to ``forward``.
        """
        super().__init__()
        self.op, self.args = op, list(case.fresh())
        self.moving = _position_of_varying(op, case)
        for i, value in enumerate(self.args):
            if isinstance(value, Tensor) and i != self.moving:
                self.register_buffer(f"held{i}", value)
                self.args[i] = None
        self.held = [i for i, v in enumerate(case.args) if isinstance(v, Tensor) and i != self.moving]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Call the op with ``x`` as the argument that varies and with the other arguments that the module holds. Return
        its results, followed by the arguments that it mutates.
        """
        args = list(self.args)
        args[self.moving] = x
        for i in self.held:
            args[i] = getattr(self, f"held{i}")
        return run_on(self.op, tuple(args))


def _position_of_varying(op: Op, case: SampleCase) -> int:
    """Return the position of the first tensor argument that the op does not mutate, or -1 if there is none. The check
    passes new values for this argument in each call.
    """
    pairs = zip(op.spec.args, case.args, strict=True)
    return next((i for i, (a, v) in enumerate(pairs) if isinstance(v, Tensor) and not a.mutated), -1)


def observe_cudagraph_trees(op: Op, case: SampleCase) -> Observation:
    """Search a captured graph for copies of inputs into memory of the op, then compile the op in a module with CUDA
    graphs. The returned observation has a problem if inputs are copied, if values are wrong or if torch uses no graph.
    """
    if not case.device.startswith("cuda"):
        return Observation(skip=NO_CAPTURE)
    if observation := observe_uncapturable(op):
        return Observation(skip=observation.skip or "cannot be captured, see cuda_graph")
    if op.spec.mutated or _position_of_varying(op, case) < 0:
        return Observation(skip="mutates its arguments: whether they are static is the model's affair")
    observation = _observe_copies(op, case)
    return observation if observation.problem else _observe_compiled_module(op, case, observation.note)


def _observe_compiled_module(op: Op, case: SampleCase, note: str) -> Observation:
    """Call the op in a module that is compiled with ``mode="reduce-overhead"``. The returned observation has a problem
    if values are wrong or if torch uses no CUDA graph. Otherwise its note ends with ``note``.
    """
    torch_private.prepare_thread_for_cuda_graphs()
    torch_private.reset_compiler()
    changed = with_other_values(op, case)
    moving = _position_of_varying(op, case)
    values = case.args[moving], changed.args[moving]
    if values[0].shape != values[1].shape or not values[0].is_floating_point():
        values = values[0], values[0]  # integers may have to fit the other arguments
    holder = _ArgumentHolder(op, case)
    compiled = torch.compile(holder, mode="reduce-overhead", fullgraph=True, dynamic=False)
    try:
        with torch.no_grad():
            for turn in range(COMPILED_CALLS):
                # Alternating values show whether a replay reads the new input.
                x = values[turn % 2].clone()
                # Results of the step before are overwritten from here on, which is why they are cloned below.
                torch.compiler.cudagraph_mark_step_begin()
                got = tuple(t.clone() for t in compiled(x))
                if problem := _difference_with_input(op, case, moving, x, got):
                    return Observation(f"mode='reduce-overhead', call {turn}: {problem}")
        skips, inputs = cudagraph_skips(), cudagraph_inputs()
    finally:
        torch_private.reset_compiler()
    if skips or not inputs:  # torch may also cut the graph around the op, and count nothing
        return Observation(
            f"torch.compile(mode='reduce-overhead') does without a CUDA graph wherever this op is "
            f"({skips} skips, {inputs} inputs recorded)",
            fix=HOST_FIX,
        )
    return Observation(
        note=f"{COMPILED_CALLS} calls under mode='reduce-overhead', 0 skips, {inputs} inputs copied; {note}"
    )


def _difference_with_input(op: Op, case: SampleCase, moving: int, x: Tensor, got: tuple[Tensor, ...]) -> str:
    """Return a message that says how the results ``got`` differ from the reference's with ``x`` as the argument at
    position ``moving``, or an empty string if they agree.
    """
    args = (*case.args[:moving], x, *case.args[moving + 1 :])
    return against_reference(op, case.with_args(args), got, measured=False).problem


def _observe_copies(op: Op, case: SampleCase) -> Observation:
    """Capture the op in a CUDA graph. The returned observation has a problem if the graph copies an input into memory
    that the op keeps. Otherwise it notes how many bytes the graph copies.
    """
    stream = torch.cuda.Stream(case.device)

    def run(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """Return the results of the op on ``args``."""
        return call_op(op, args)

    with on_stream(stream):
        for _ in range(WARM):
            run(case.fresh())
    try:
        recording = record_cuda_graph(run, case.args, stream)
    # A failed capture is a finding of the check cuda_graph.
    except CaptureError:
        return Observation(note="not captured, see cuda_graph")
    if problem := find_staged_input(op, recording, _addresses_of_pools()):
        return Observation(problem, fix=STAGED_FIX)
    size = sum(copy.size for copy in recording.copies)
    return Observation(note=f"{len(recording.copies)} copies of {size} bytes in the graph")


def _addresses_of_pools() -> list[tuple[int, int]]:
    """Return the address ranges ``(begin, end)`` of the memory pools of CUDA graphs. Allocations that are made during a
    capture lie in them.
    """
    return [
        (s["address"], s["address"] + s["total_size"])
        for s in torch.cuda.memory_snapshot()
        if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)
    ]


def find_staged_input(op: Op, recording: GraphRecording, private: list[tuple[int, int]]) -> str:
    """Return a message that names the first input that the graph copies into memory that the op keeps, or an empty
    string if there is none. Copies into an output, or into the address ranges ``private`` of graph pools, are ignored.
    """
    owned = [*private, *(_storage_range(t) for t in recording.outs)]
    for copy in recording.copies:
        if any(low <= copy.target < high for low, high in owned):
            continue  # a result, or a temporary, that starts as a copy of an input
        for arg, value in zip(op.spec.args, recording.args, strict=True):
            if isinstance(value, Tensor):
                low, high = _storage_range(value)
                if low <= copy.source < high:
                    return f"every replay copies {copy.size} bytes of {arg.name} into a buffer that the op keeps"
    return ""


def _storage_range(t: Tensor) -> tuple[int, int]:
    """Return the first address of a tensor's storage and the first address after it."""
    start = t.untyped_storage().data_ptr()
    return start, start + t.untyped_storage().nbytes()


CHECK = Check(
    "cudagraph_trees",
    order=280,
    observes="with its tensors held by a module, torch.compile(mode='reduce-overhead') captures and replays it; "
    "its graph copies no input into a buffer that the op keeps",
    observe=observe_cudagraph_trees,
    cases=Samples.plain,
    obligations=("capture",),
    varies=("order of calls",),
    needs=("numerics", "cuda_graph"),
    patience=300.0,
    quiet=120.0,
    fix=STAGED_FIX,
)
