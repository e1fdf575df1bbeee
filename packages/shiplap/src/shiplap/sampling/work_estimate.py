"""The work of a reference on untried arguments, estimated from its dims or by a run on the meta
device, without memory; and budgets of time, as users write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

import torch
from torch import Tensor

from shiplap.declare import OpSpec
from shiplap.declare.binding import declared_output_shape
from shiplap.dispatch import Op
from shiplap.errors import error
from shiplap.sampling.boundary_sizes import HUGE_INTEGERS
from shiplap.sampling.case import SampleCase, tree_map
from shiplap.sampling.run import error_line
from shiplap.torch_private.dispatcher_calls import TorchDispatchMode
from shiplap.torch_private.graph_objects import map_leaves

# Limits of a run on the meta device: elements of a tensor, and calls of operators.
ELEMENTS, CALLS = 1 << 24, 2000


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Return a context in which torch's operators use one thread, for references of at most a few million elements.

    Threads that wait for one which a busy machine does not run use processor time: up to 90 times that of a comparison
    of 10^5 elements (two cores, load 12, 2026-11-27). Samples that seem slow are left out.
    """
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(kept)


def estimate_operations(spec: OpSpec, env: Mapping[str, Any]) -> int:
    """Return an estimate of the operations of a call whose dims and scalars are ``env``: the number of result elements
    times the sizes of the dims that several arguments have and no result has, which are summed over. A dim of a single
    argument adds nothing, since it is indexed or summed only once.
    """
    known = {**env, **dict.fromkeys(spec.dynamic, 0)}
    inputs = [{d.of or d.text for d in a.tensor.dims if d.kind == "name"} for a in spec.tensors if a.tensor]
    results = {d.text for out in spec.outputs for d in out.tensor.dims}
    shared = {d for dims in inputs for d in dims - results if d in env and sum(d in other for other in inputs) > 1}
    elements = int(sum(prod(declared_output_shape(out, known)) for out in spec.outputs))
    return elements * prod(max(1, int(env[d])) for d in shared)


class _WorkLimit(TorchDispatchMode):
    """A mode that ends a run which makes a large tensor or very many calls."""

    def __init__(self) -> None:
        """Make a mode that has counted no calls yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator ``func``. Raises OverflowError after ``CALLS`` operators or for a result of more than
        ``ELEMENTS`` elements.
        """
        self.calls += 1
        result = func(*args, **(kwargs or {}))
        sizes: list[int] = []
        map_leaves(lambda t: sizes.append(t.numel()) if isinstance(t, Tensor) else None, result)
        if self.calls > CALLS or max(sizes, default=0) > ELEMENTS:
            raise OverflowError(f"{self.calls} calls, a tensor of {max(sizes, default=0)} elements")
        return result


def why_too_large(op: Op, case: SampleCase) -> str:
    """Return a text that says why ``case`` should not run because one of its scalars is beyond 32 bits and makes the
    work too large, or an empty text. Such a scalar may be a size, which takes that much memory.
    """
    huge = any(type(v) is int and v in HUGE_INTEGERS for _, v in case.recipe.scalars)
    return _why_too_much_work(op, case) if huge else ""


def _why_too_much_work(op: Op, case: SampleCase) -> str:
    """Return a text that says why the reference should not run on ``case``, or an empty text, determined by a run on
    the meta device.

    The reasons are its size, and an error without values, which leaves the size unknown.
    """
    args = tree_map(lambda t: t.detach().to("meta"), case.args)
    positional, named = op.spec.split(args)
    try:
        with torch.device("meta"), _WorkLimit():
            op.reference(*positional, **named)
    except Exception as e:
        # An operator without a meta kernel, or one that reads values, may raise anything.
        return error_line(e)
    return ""


def parse_budget(budget: float | str) -> float:
    """Return a budget in seconds. A budget is ``"5m"``, ``"90s"``, ``"1h"`` or a number of seconds."""
    if isinstance(budget, (int, float)):
        return budget
    text = budget.strip()
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:], 0.0)
    with suppress(ValueError):
        seconds = float(text[:-1]) * unit if unit else float(text)
        if seconds > 0:
            return seconds
    raise error("SL612", where="budget", got=repr(budget), expected="a time such as 90s, 5m or 1h")
