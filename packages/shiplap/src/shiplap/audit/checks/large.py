"""``large``: sizes and strides beyond 2^31 elements are not cut to 32 bits.

Fakes need no memory. A real input is a view whose rows lie more than 2^31 bytes apart in address space that is
reserved but never touched between them; an op that first makes its input contiguous passes trivially.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shiplap import compat
from shiplap.audit.check import Check, Observation
from shiplap.op import Arg, Op
from shiplap.op.check import shape_of
from shiplap.referee.compare import close, reduction
from shiplap.referee.run import call, effects, outputs, reference, split
from shiplap.referee.samples import Case, Samples
from shiplap.referee.sizes import environment

BEYOND = 2**31
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; in Python's mmap since 3.13


def cases(samples: Samples) -> Iterable[Case]:
    yield from samples.plain()


def observe(op: Op, case: Case) -> Observation:
    fake_problem, fake_note = _fake(op, case)
    if fake_problem:
        return Observation(fake_problem)
    real_problem, real_note = _real(op, case)
    if real_problem:
        return Observation(real_problem)
    if not fake_note and not real_note:
        return Observation(skip="no dim can grow beyond 2^31 elements and no argument has two dims and free strides")
    return Observation(note="; ".join(filter(None, [fake_note, real_note])))


def _fake(op: Op, case: Case) -> tuple[str, str]:
    """Each free dim alone so large that some argument exceeds 2^31 elements."""
    grown = []
    scalars = dict(case.recipe.scalars)
    for name, size in case.recipe.sizes:
        if type(size) is not int or name in {a.name for a in op.spec.scalars}:
            continue
        env = environment(op.spec, {**dict(case.recipe.sizes), name: BEYOND + 16 * max(1, size), "...": (2,)}, scalars)
        if env is None:
            continue
        if problem := _fake_shapes(op, case, env):
            return f"fake with {name} = {env[name]}: {problem}", ""
        grown.append(name)
    return "", f"fakes with {', '.join(grown)} beyond 2^31" if grown else ""


def _fake_shapes(op: Op, case: Case, env: dict[str, Any]) -> str:
    from shiplap.op import Output

    def grow(arg: Arg, value: Any) -> Any:
        if not isinstance(value, Tensor) or arg.tensor is None:
            return value
        return torch.empty(shape_of(Output(arg.name, arg.tensor), env), dtype=value.dtype, device=value.device)

    with torch.no_grad(), compat.fake_mode(symbolic=bool(op.spec.bounds)):
        if any(a.many for a in op.spec.args):
            return ""
        args = tuple(grow(a, v) for a, v in zip(op.spec.args, case.args, strict=True))
        positional, named = split(op.spec, args)
        outs = outputs(op.overload(*positional, **named))
        for out, declared in zip(outs, op.spec.outputs, strict=True):
            if not any(d.text in op.spec.dynamic for d in declared.tensor.dims):
                expected = shape_of(declared, env)
                if list(out.shape) != expected:
                    return f"shape {tuple(out.shape)}, declared {tuple(expected)}"
    return ""


def _real(op: Op, case: Case) -> tuple[str, str]:
    """Each argument alone as a view with a stride beyond 2^31 bytes, and beyond 2^31 elements where it fits."""
    if not case.device.startswith("cpu"):
        return "", ""
    spread = []
    for position, arg in enumerate(op.spec.args):
        value = case.args[position]
        if not isinstance(value, Tensor) or arg.contiguous or value.dim() < 1 or value.shape[0] < 2:
            continue
        args = list(case.fresh())
        args[position] = _far_apart(value)
        got = effects(op, tuple(args), call(op, tuple(args)))
        expected = reference(op, case.args)
        found = close(got, expected, expected, reduction(op.spec, case.env))
        if found.problem:
            return f"{arg.name} with strides {args[position].stride()}: {found.problem}", ""
        spread.append(arg.name)
    return "", f"rows of {', '.join(spread)} more than 2^31 elements apart" if spread else ""


def _far_apart(t: Tensor) -> Tensor:
    """``t`` with its rows spread over more than 2^31 elements of reserved, untouched address space."""
    row = BEYOND // (t.shape[0] - 1) + t[0].numel() + 64
    size = (row * t.shape[0]) * t.itemsize
    space = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    flat = torch.frombuffer(space, dtype=t.dtype)
    inner = torch.empty(t.shape[1:]).stride()
    return flat.as_strided(t.shape, (row, *inner)).copy_(t)


CHECK = Check(
    "large",
    observes="64-bit sizes, strides and offsets",
    observe=observe,
    cases=cases,
    needs=("schema", "edges"),  # an op that leaves its view would touch all of the reserved memory
    patience=60.0,
    fix="compute offsets in int64 (in Triton: cast the index, not the product)",
)
