"""``kernels``: every kernel and every config of the device, not only the one that a plain call reaches, and ``op.out``.

Each kernel is run on each sample that it takes, without the choice among kernels. A kernel that takes no sample is not
proven.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from shiplap.audit.check import Check, Observation, fix_of_refusal
from shiplap.declare.binding import Binding, declared_output_shape
from shiplap.declare.kernel import Kernel
from shiplap.dispatch import Op
from shiplap.dispatch.outputs import flatten_op_results
from shiplap.errors import error_line
from shiplap.sampling.case import SampleCase, tensors_among
from shiplap.sampling.compare import bitwise_difference
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.run import is_adopted, needs_builder, op_effects, reference_effects
from shiplap.sampling.samples import Samples
from shiplap.sampling.work_estimate import why_too_large

MOST_CONFIGS = 8  # of one kernel
GUARD_ELEMENTS = 64  # elements of another value on both sides of an output
# Values that reveal the accumulator and the order of operations, in which kernels of one op differ.
SPECIAL_VALUES = ("nan", "overflowing", "saturating", "cancelling", "positive", "skewed", "negative zero")


def why_skip_kernels(op: Op) -> str:
    """Return why the check ``kernels`` does not apply to the op, or an empty string if it does. It does not apply if
    the op's kernels belong to another library.
    """
    return "adopted: its kernels are another library's" if is_adopted(op) else ""


def kernels_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``kernels`` runs the op's kernels. They are samples of all kinds.

    If every call of the op runs one kernel without configs, fewer samples suffice, since all other checks call that
    kernel.
    """
    if _plainly_served(samples.op, str(samples.device)):  # every other check calls it: only op.out is new
        yield from chain(samples.values(), samples.dtypes(), samples.edges(), samples.wide())
        return
    special = (c for c in samples.special() if c.recipe.values in SPECIAL_VALUES)
    yield from chain(samples.values(), samples.dtypes(), samples.optionals(), samples.scalars(), samples.edges())
    odd = (c for c in samples.odd_scalars() if not why_too_large(samples.op, c))
    yield from chain(odd, samples.layouts(), samples.long(), samples.tiles(), special)


def _plainly_served(op: Op, device: str) -> bool:
    """Return whether every call on the device runs the same kernel, without conditions and without configs (values of
    tuning parameters).

    Other checks have then called that kernel already.
    """
    kernels = kernels_for_device(op, device)
    plain = all(k.supports is None and not k.dtypes and k.space is None and k.template is None for k in kernels)
    return len(kernels) < 2 and plain and op.native is None


def kernels_for_device(op: Op, device: str) -> list[Kernel]:
    """Return all kernels of the op for the type of this device, such as ``cuda``."""
    return list(op.kernels.get(torch.device(device).type, ()))


def kernel_variants(kernel: Kernel, call: Binding) -> Iterator[Kernel]:
    """Yield the kernel with each of its configs (values of tuning parameters), at most ``MOST_CONFIGS`` of them. Yield
    nothing if the kernel refuses the call.

    A template chooses one config for a call by itself, so it is yielded with this config only.
    """
    # A template chooses its own variant for a call.
    if kernel.template is not None:
        serving = kernel.variant_for_call(call)
        if isinstance(serving, Kernel):
            yield serving
        return
    if kernel.why_refused(call):
        return
    if kernel.space is None:
        yield kernel
        return
    yield from (kernel.with_config(config) for config in islice(kernel.space.configs(call.env), MOST_CONFIGS))


def observe_kernels(op: Op, case: SampleCase) -> Observation:
    """Run each kernel with each of its configs (values of tuning parameters), and ``op.out``, the variant that writes
    to given outputs.

    The returned observation has a problem if a result differs from the reference's or from that of a repeated call.
    """
    try:
        own = reference_effects(op, case.args)
    except Exception as e:
        return Observation(skip=f"the reference refuses it: {error_line(e)}", limited=needs_builder(op))
    if not tensors_among(case.args):
        return Observation(skip="a call without a tensor has no device")
    worst = 0.0
    # Kernels are called below the op, so the arguments are checked first.
    bound = op.bind(case.args)
    for kernel in () if _plainly_served(op, case.device) else kernels_for_device(op, case.device):
        for variant in kernel_variants(kernel, bound):
            name = f"kernel {kernel.name}" + (f" with {variant.config}" if variant.config.items else "")
            try:
                got = _effects_of_kernel(op, case, variant)
            except Exception as e:
                return Observation(f"{name}: raised {error_line(e)}", fix=fix_of_refusal(op, e))
            difference = against_reference(op, case, got, own)
            if difference.problem:
                return Observation(f"{name}: {difference.problem}")
            worst = max(worst, difference.error)
            if problem := bitwise_difference(_effects_of_kernel(op, case, variant), got, "the first time"):
                return Observation(f"{name}, the same call again: {problem}")
    problem = _why_out_differs(op, case, own) if op.variant is not None and not op.spec.mutated else ""
    return Observation(problem, error=worst)


def _effects_of_kernel(op: Op, case: SampleCase, kernel: Kernel) -> tuple[Tensor, ...]:
    """Run this kernel on copies of the sample's arguments. Return its results, followed by the arguments that the op
    mutates.
    """
    args = case.fresh()
    return op_effects(op, args, flatten_op_results(op.run_bound_call(op.bind(args), kernel)))


def _why_out_differs(op: Op, case: SampleCase, own: tuple[Tensor, ...]) -> str:
    """Call ``op.out`` with views into the middle of larger tensors as outputs. Return a message that says what is
    wrong, or an empty string if nothing is wrong.

    It is wrong if a result differs from ``own``, the reference's results, or if the call writes to memory outside a
    view.
    """
    args = case.fresh()
    bound = op.bind(args)
    rooms, outs = [], []
    for output in op.spec.outputs:
        shape, dtype = declared_output_shape(output, bound.env), bound.dtype_of(output.tensor)
        count = math.prod(int(size) for size in shape)
        # The result lies in the middle of a larger room, so that a write beside it shows.
        room = _make_patterned_memory(count + 2 * GUARD_ELEMENTS, dtype, args)
        rooms.append(room)
        outs.append(room[GUARD_ELEMENTS : GUARD_ELEMENTS + count].view(shape))
    before = [room.clone() for room in rooms]
    write: Any = op.out
    positional, named = op.spec.split(args)
    with torch.no_grad():
        write(*positional, out=outs[0] if len(outs) == 1 else tuple(outs), **named)
    for output, room, was in zip(op.spec.outputs, rooms, before, strict=True):
        for side in (slice(0, GUARD_ELEMENTS), slice(room.numel() - GUARD_ELEMENTS, None)):
            if problem := bitwise_difference([room[side]], [was[side]], "before the call"):
                return f"op.out into a slice: memory beside {output.name} was written: {problem}"
    difference = against_reference(op, case, tuple(o.clone() for o in outs), own)
    return f"op.out into a slice: {difference.problem}" if difference.problem else ""


def _make_patterned_memory(count: int, dtype: torch.dtype, args: tuple[Any, ...]) -> Tensor:
    """Return a tensor of ``count`` elements of ``dtype`` on the device of ``args``. It is filled with NaN or another
    unusual value, so that elements that are not written show.
    """
    room = torch.zeros(count, dtype=dtype, device=tensors_among(args)[0].device)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return room.fill_(float("nan"))
    return room.view(torch.uint8).fill_(0x5A).view(dtype) if dtype != torch.bool else room.fill_(True)


def observe_untouched_kernels(op: Op, cases: list[SampleCase]) -> Observation:
    """Return an observation that is ``missed`` if a kernel accepts none of the samples ``cases``, or if all kernels of
    the op are for other devices. The check is then incomplete. Otherwise the observation notes how many kernels ran.
    """
    device = cases[0].device
    kernels, untouched = kernels_for_device(op, device), []
    if not kernels and (others := [other for other, theirs in op.kernels.items() if theirs]):
        there = " or ".join(f"--device {other}" for other in others)
        return Observation(missed=f"no kernel of the op has run: none is for {device}, audit it with {there}")
    for kernel in kernels:
        bound = (op.bind(case.args) for case in cases)
        if not any(next(kernel_variants(kernel, call), None) is not None for call in bound):
            untouched.append(kernel.name)
    if untouched:
        return Observation(missed=f"no sample reaches kernel {', '.join(untouched)}: see its supports= and dtypes=")
    return Observation(
        note=f"{len(kernels)} kernels, each forced" if kernels else "the op has no kernel but its reference"
    )


CHECK = Check(
    "kernels",
    order=60,
    observes="every kernel in every config, and op.out between guards, equals the reference wherever it takes the call",
    observe=observe_kernels,
    cases=kernels_cases,
    sequence=observe_untouched_kernels,
    skips=why_skip_kernels,
    fix="correct that kernel, or narrow its supports=",
    patience=30.0,
)
