"""How much a reference would compute for arguments that nobody has tried: by its dims, or run on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from shiplap.declare import OpSpec
from shiplap.declare.binding import shape_of
from shiplap.dispatch import Op
from shiplap.sampling.boundary_sizes import HUGE
from shiplap.sampling.case import Case, tree_map
from shiplap.sampling.run import last_line, split
from shiplap.torch_private.dispatch_modes import TorchDispatchMode
from shiplap.torch_private.pytree import map_leaves

ELEMENTS, CALLS = 1 << 24, 2000


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Torch's operators on this thread alone, for references of a few million elements and for comparisons.

    Threads that wait for one that a busy machine does not run spend processor time: up to 90 times what a comparison of
    10^5 elements takes (two cores, load 12, 2026-11-27). Samples that seem slow are left out.
    """
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(kept)


def operations(spec: OpSpec, env: Mapping[str, Any]) -> int:
    """About how many operations the results of a call with these sizes take.

    Each element of a result is a sum over the dims that several arguments share, and no result has. A dim of one
    argument alone is rows that are picked from, or is summed once.
    """
    known = {**env, **dict.fromkeys(spec.dynamic, 0)}
    inputs = [{d.of or d.text for d in a.tensor.dims if d.kind == "name"} for a in spec.tensors if a.tensor]
    results = {d.text for out in spec.outputs for d in out.tensor.dims}
    shared = {d for dims in inputs for d in dims - results if d in env and sum(d in other for other in inputs) > 1}
    elements = int(sum(prod(shape_of(out, known)) for out in spec.outputs))
    return elements * prod(max(1, int(env[d])) for d in shared)


class _Counting(TorchDispatchMode):
    """Ends a run that makes a large tensor or a great many calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        result = func(*args, **(kwargs or {}))
        sizes: list[int] = []
        map_leaves(lambda t: sizes.append(t.numel()) if isinstance(t, Tensor) else None, result)
        if self.calls > CALLS or max(sizes, default=0) > ELEMENTS:
            raise OverflowError(f"{self.calls} calls, a tensor of {max(sizes, default=0)} elements")
        return result


def outsized(op: Op, case: Case) -> str:
    """Why a case with a scalar beyond 32 bits should not be run, empty if it may be: a size costs what it says."""
    huge = any(type(v) is int and v in HUGE for _, v in case.recipe.scalars)
    return _too_much(op, case) if huge else ""


def _too_much(op: Op, case: Case) -> str:
    """Why the reference should not be run on ``case``: its size, or that nobody can tell without values. Else empty."""
    args = tree_map(lambda t: t.detach().to("meta"), case.args)
    positional, named = split(op.spec, args)
    try:
        with torch.device("meta"), _Counting():
            op.reference(*positional, **named)
    except Exception as e:
        return last_line(e)
    return ""
