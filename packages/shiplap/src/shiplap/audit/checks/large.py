"""``large``: sizes and strides beyond 2^31 elements are not cut to 32 bits.

Fakes need no memory. A real input is a view whose rows lie more than 2^31 elements apart, in address space that is
reserved but never touched between them. An op that first makes its input contiguous passes trivially.
"""

from __future__ import annotations

import mmap
from math import prod
from typing import Any

import torch
from torch import Tensor

from shiplap import torch_private
from shiplap.audit.check import Check, Observation, why_random
from shiplap.declare import Arg, Output
from shiplap.declare.binding import declared_output_shape
from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.run import reference_effects, results_of, run_on
from shiplap.sampling.samples import Samples
from shiplap.sampling.sizes import dim_environment

# The first number of elements that a signed index of 32 bits cannot hold.
BEYOND_32_BITS = 2**31
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; in Python's mmap since 3.13


def observe_large(op: Op, case: SampleCase) -> Observation:
    """Run the fake implementation with sizes beyond 2^31, then the op on tensors with strides beyond 2^31. The returned
    observation has a problem if a shape or a value is wrong.
    """
    fake_problem, fake_note = _observe_large_fakes(op, case)
    if fake_problem:
        return Observation(fake_problem)
    real_problem, real_note = _observe_large_strides(op, case)
    if real_problem:
        return Observation(real_problem)
    if not fake_note and not real_note:
        return Observation(skip="no dim can grow beyond 2^31 elements and no argument has two dims and free strides")
    return Observation(note="; ".join(filter(None, [fake_note, real_note])))


def _observe_large_fakes(op: Op, case: SampleCase) -> tuple[str, str]:
    """Run the fake implementation with sizes so large that an argument has more than 2^31 elements. Each dim of free
    size is enlarged in turn.

    Return ``(problem, note)``. The problem describes the first wrong shape, and is empty if there is none. The note
    names the dims that were enlarged.
    """
    grown = []
    scalars = dict(case.recipe.scalars)
    for name, size in case.recipe.sizes:
        if type(size) is not int or name in {a.name for a in op.spec.scalars}:
            continue
        # 2^31 plus a multiple of 16, since a precondition may require a multiple of a tile.
        env = dim_environment(
            op.spec, {**dict(case.recipe.sizes), name: BEYOND_32_BITS + 16 * max(1, size), "...": (2,)}, scalars
        )
        if env is None or _overflows_address_space(op, env):
            continue
        try:
            problem = _fake_shapes(op, case, env)
        except RuntimeError as e:
            if "Storage size calculation overflowed" not in str(e):
                raise
            continue  # what it computes on the way does not fit an address, so that no call has this size
        if problem:
            return f"fake with {name} = {env[name]}: {problem}", ""
        grown.append(name)
    return "", f"fakes with {', '.join(grown)} beyond 2^31" if grown else ""


def _overflows_address_space(op: Op, env: dict[str, Any]) -> bool:
    """Return whether an argument or a result with the sizes ``env`` (by dim name) may have 2^62 bytes or more. Such a
    tensor cannot exist.
    """
    tensors = [(a.name, a.tensor) for a in op.spec.tensors if a.tensor] + [(o.name, o.tensor) for o in op.spec.outputs]
    known = {**env, **{d: e(env) for d, e in op.spec.bounds}}
    # An element has at most 16 bytes, those of complex128.
    return any(prod(declared_output_shape(Output(name, kind), known)) * 16 >= 2**62 for name, kind in tensors)


def _fake_shapes(op: Op, case: SampleCase, env: dict[str, Any]) -> str:
    """Return a message that describes the first output of the fake implementation whose shape is not the declared one.
    Return an empty string if there is none. ``env`` has the sizes by dim name.
    """

    def grow(arg: Arg, value: Any) -> Any:
        """Return a tensor without values that has the dtype of ``value`` and the sizes that ``env`` gives the argument.
        A value that is not a tensor is returned unchanged.
        """
        if not isinstance(value, Tensor) or arg.tensor is None:
            return value
        return torch.empty(
            declared_output_shape(Output(arg.name, arg.tensor), env), dtype=value.dtype, device=value.device
        )

    with torch.no_grad(), torch_private.fake_mode(symbolic=bool(op.spec.bounds)):
        if op.spec.returns or any(a.many for a in op.spec.args):
            return ""
        args = tuple(grow(a, v) for a, v in zip(op.spec.args, case.args, strict=True))
        outs = results_of(op, op.overload, args)
        for out, declared in zip(outs, op.spec.outputs, strict=True):
            # A size that depends on data is not known without data.
            if not any(d.text in op.spec.dynamic for d in declared.tensor.dims):
                expected = declared_output_shape(declared, env)
                if list(out.shape) != expected:
                    return f"shape {tuple(out.shape)}, declared {tuple(expected)}"
    return ""


def _observe_large_strides(op: Op, case: SampleCase) -> tuple[str, str]:
    """Run the op on the CPU with arguments whose strides exceed 2^31 elements. Each dim of each argument is stretched
    in turn. Return ``(problem, note)``. The problem describes the first wrong result, and is empty if there is none.
    The note names the arguments that were stretched.
    """
    # Only the CPU can reserve so much address space without memory behind it.
    if not case.device.startswith("cpu"):
        return "", ""
    spread = []
    for position, arg in enumerate(op.spec.args):
        value = case.args[position]
        if not isinstance(value, Tensor) or arg.contiguous:
            continue
        for dim in (d for d in range(value.dim()) if value.shape[d] > 1):
            args = list(case.fresh())
            args[position] = _spread_out(value, dim)
            got = run_on(op, tuple(args))
            expected = reference_effects(op, case.args)
            difference = against_reference(op, case, got, expected, measured=False)
            if difference.problem:
                return f"{arg.name} with strides {args[position].stride()}: {difference.problem}", ""
            spread.append(arg.name)
    names = ", ".join(dict.fromkeys(spread))
    return "", f"every dim of {names} in turn more than 2^31 elements apart" if spread else ""


def _spread_out(t: Tensor, dim: int) -> Tensor:
    """Return a copy of ``t`` whose elements along ``dim`` are spread over more than 2^31 elements of reserved address
    space. The memory between them is never touched.
    """
    inner = t.contiguous()
    # The last row starts beyond 2^31 elements, and rows do not overlap.
    step = BEYOND_32_BITS // (t.shape[dim] - 1) + t.numel() + 64
    size = (step * t.shape[dim] + t.numel()) * t.itemsize
    # NORESERVE: pages that are never written to take no memory and no swap.
    space = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    strides = [step if d == dim else s for d, s in enumerate(inner.stride())]
    return torch.frombuffer(space, dtype=t.dtype).as_strided(t.shape, strides).copy_(t)


CHECK = Check(
    "large",
    order=220,
    observes="64-bit sizes, strides and offsets",
    observe=observe_large,
    cases=Samples.plain,
    skips=why_random,
    needs=("schema", "edges"),  # an op that leaves its view would touch all of the reserved memory
    patience=60.0,
    fix="compute offsets in int64 (in Triton: cast the index, not the product)",
)
