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

from shiplap.audit.check import Check, Observation
from shiplap.declare.binding import Binding, shape_of
from shiplap.declare.kernel import Kernel
from shiplap.dispatch import Op
from shiplap.sampling.case import Case
from shiplap.sampling.compare import bitwise
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.run import effects, is_adopted, last_line, outputs, reference, split, tensors
from shiplap.sampling.samples import Samples
from shiplap.sampling.work_estimate import outsized

CONFIGS = 8  # of one kernel
GUARD = 64  # elements of another value on both sides of an output
# Values that reveal the accumulator and the order of operations, in which kernels of one op differ.
SOME = ("nan", "overflowing", "saturating", "cancelling", "positive", "skewed", "negative zero")


def skips(op: Op) -> str:
    """Return the reason why the check does not apply to an op, empty where it does."""
    return "adopted: its kernels are another library's" if is_adopted(op) else ""


def cases(samples: Samples) -> Iterable[Case]:
    """Yield samples of all kinds, fewer where a plain call always reaches the only kernel."""
    if _plainly_served(samples.op, str(samples.device)):  # every other check calls it: only op.out is new
        yield from chain(samples.values(), samples.dtypes(), samples.edges(), samples.wide())
        return
    special = (c for c in samples.special() if c.recipe.values in SOME)
    yield from chain(samples.values(), samples.dtypes(), samples.optionals(), samples.scalars(), samples.edges())
    odd = (c for c in samples.odd_scalars() if not outsized(samples.op, c))
    yield from chain(odd, samples.layouts(), samples.long(), samples.tiles(), special)


def _plainly_served(op: Op, device: str) -> bool:
    """Whether every plain call runs the only kernel in its only config."""
    kernels = kernels_of(op, device)
    plain = all(k.supports is None and not k.dtypes and k.space is None and k.template is None for k in kernels)
    return len(kernels) < 2 and plain and op.native is None


def kernels_of(op: Op, device: str) -> list[Kernel]:
    """Return all kernels that a call on this device could run."""
    return list(op.kernels.get(torch.device(device).type, ()))


def variants(kernel: Kernel, call: Binding) -> Iterator[Kernel]:
    """Yield the kernel with each of its configs that takes the call."""
    # A template chooses its own variant for a call.
    if kernel.template is not None:
        serving = kernel.serving(call)
        if isinstance(serving, Kernel):
            yield serving
        return
    if kernel.refuses(call):
        return
    if kernel.space is None:
        yield kernel
        return
    yield from (kernel.variant(config) for config in islice(kernel.space.configs(call.env), CONFIGS))


def observe(op: Op, case: Case) -> Observation:
    """Run each variant of each kernel, and ``op.out``, and compare with the reference."""
    try:
        own = reference(op, case.args)
    except Exception as e:
        return Observation(skip=f"the reference refuses it: {last_line(e)}")
    if not tensors(case.args):
        return Observation(skip="a call without a tensor has no device")
    worst = 0.0
    bound = op.bind(case.args)
    for kernel in () if _plainly_served(op, case.device) else kernels_of(op, case.device):
        for variant in variants(kernel, bound):
            name = f"kernel {kernel.name}" + (f" with {variant.config}" if variant.config.items else "")
            try:
                got = _forced(op, case, variant)
            except Exception as e:
                return Observation(f"{name}: raised {last_line(e)}")
            difference = against_reference(op, case, got, own)
            if difference.problem:
                return Observation(f"{name}: {difference.problem}")
            worst = max(worst, difference.error)
            if problem := bitwise(_forced(op, case, variant), got, "the first time"):
                return Observation(f"{name}, the same call again: {problem}")
    problem = _out(op, case, own) if op.variant is not None and not op.spec.mutated else ""
    return Observation(problem, error=worst)


def _forced(op: Op, case: Case, kernel: Kernel) -> tuple[Tensor, ...]:
    """Return the effects of this kernel on fresh arguments."""
    args = case.fresh()
    return effects(op, args, outputs(op.serve(op.bind(args), kernel)))


def _out(op: Op, case: Case, own: tuple[Tensor, ...]) -> str:
    """Return the fault of ``op.out`` into the middle of a larger buffer: a wrong result, or a write around it."""
    args = case.fresh()
    bound = op.bind(args)
    rooms, outs = [], []
    for output in op.spec.outputs:
        shape, dtype = shape_of(output, bound.env), bound.dtype_of(output.tensor)
        count = math.prod(int(size) for size in shape)
        room = _filled(count + 2 * GUARD, dtype, args)
        rooms.append(room)
        outs.append(room[GUARD : GUARD + count].view(shape))
    before = [room.clone() for room in rooms]
    positional, named = split(op.spec, args)
    with torch.no_grad():
        op.out(*positional, out=outs[0] if len(outs) == 1 else tuple(outs), **named)
    for output, room, was in zip(op.spec.outputs, rooms, before, strict=True):
        for side in (slice(0, GUARD), slice(room.numel() - GUARD, None)):
            if problem := bitwise([room[side]], [was[side]], "before the call"):
                return f"op.out into a slice: memory beside {output.name} was written: {problem}"
    difference = against_reference(op, case, tuple(o.clone() for o in outs), own)
    return f"op.out into a slice: {difference.problem}" if difference.problem else ""


def _filled(count: int, dtype: torch.dtype, args: tuple[Any, ...]) -> Tensor:
    """Return memory with a pattern in it, and NaN where the dtype has it, so that unwritten elements show."""
    room = torch.zeros(count, dtype=dtype, device=tensors(args)[0].device)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return room.fill_(float("nan"))
    return room.view(torch.uint8).fill_(0x5A).view(dtype) if dtype != torch.bool else room.fill_(True)


def sequence(op: Op, cases: list[Case]) -> Observation:
    """Check that each kernel has taken a sample."""
    device = cases[0].device
    untouched = []
    for kernel in kernels_of(op, device):
        bound = (op.bind(case.args) for case in cases)
        if not any(next(variants(kernel, call), None) is not None for call in bound):
            untouched.append(kernel.name)
    if untouched:
        return Observation(missed=f"no sample reaches kernel {', '.join(untouched)}: see its supports= and dtypes=")
    return Observation(note=f"{len(kernels_of(op, device))} kernels, each forced")


CHECK = Check(
    "kernels",
    order=60,
    observes="every kernel in every config, and op.out between guards, equals the reference wherever it takes the call",
    observe=observe,
    cases=cases,
    sequence=sequence,
    skips=skips,
    fix="correct that kernel, or narrow its supports=",
    patience=30.0,
)
