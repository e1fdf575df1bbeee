"""The work of a reference on untried arguments, estimated from its dims or by a run on the meta
device, without memory; and budgets of time, as users write them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isnan, prod
from typing import Any

import torch
from torch import Tensor

from shiplap.declare import OpSpec
from shiplap.declare.binding import declared_output_shape
from shiplap.dispatch import Op
from shiplap.errors import error, error_line
from shiplap.sampling.boundary_sizes import HUGE_INTEGERS
from shiplap.sampling.case import SampleCase, tree_map
from shiplap.torch_private.dispatcher_calls import TorchDispatchMode
from shiplap.torch_private.graph_objects import map_leaves

# Limits of a run on the meta device: elements of a tensor, and calls of operators.
ELEMENTS, CALLS = 1 << 24, 2000


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Return a context in which torch's operators use one thread. It is meant for references of at most a few million
    elements.

    On a busy machine, several threads use much more processor time than one. An audit would then take a sample to be
    slow and leave it out.
    """
    # Threads that wait for a thread which a busy machine does not run use up to 90 times the processor time of a
    # comparison of 10^5 elements (two cores, load 12, 2026-11-27).
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(kept)


def estimate_operations(spec: OpSpec, env: Mapping[str, Any], absent: Collection[str] = ()) -> int:
    """Return an estimate of the number of operations of a call whose dims and scalars are ``env``.

    It is the number of result elements times the sizes of the dims that are summed over. These are the dims that
    several arguments have and no result has. A dim that only one argument has adds nothing, since it is indexed or
    summed only once. ``absent`` holds the names of arguments that are None in the call, whose dims do not count.
    """
    known = {**env, **dict.fromkeys(spec.dynamic, 0)}
    inputs = [
        {d.of or d.text for d in a.tensor.dims if d.kind == "name"}
        for a in spec.tensors
        if a.tensor and a.name not in absent
    ]
    results = {d.text for out in spec.outputs for d in out.tensor.dims}
    shared = {d for dims in inputs for d in dims - results if d in env and sum(d in other for other in inputs) > 1}
    elements = int(sum(prod(declared_output_shape(out, known)) for out in spec.outputs))
    return elements * prod(max(1, int(env[d])) for d in shared)


class _WorkLimit(TorchDispatchMode):
    """A torch mode that raises ``OverflowError`` when an operator returns a large tensor or very many operators were
    called.
    """

    def __init__(self) -> None:
        """Make a mode that has counted no calls yet."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator ``func`` and return its result. Raise ``OverflowError`` after ``CALLS`` operators, or if the
        result has more than ``ELEMENTS`` elements.
        """
        self.calls += 1
        result = func(*args, **(kwargs or {}))
        sizes: list[int] = []
        map_leaves(lambda t: sizes.append(t.numel()) if isinstance(t, Tensor) else None, result)
        if self.calls > CALLS or max(sizes, default=0) > ELEMENTS:
            raise OverflowError(f"{self.calls} calls, a tensor of {max(sizes, default=0)} elements")
        return result


def why_too_large(op: Op, case: SampleCase) -> str:
    """Return the reason why the op should not be run on ``case``, or an empty string if there is none.

    The only reason is that a scalar beyond 32 bits makes the work too large. Such a scalar may be a size, for which
    that much memory would be allocated.
    """
    huge = any(type(v) is int and v in HUGE_INTEGERS for _, v in case.recipe.scalars)
    return _why_too_much_work(op, case) if huge else ""


def _why_too_much_work(op: Op, case: SampleCase) -> str:
    """Return the reason why the reference should not run on ``case``, or an empty string if there is none. A run on the
    meta device determines this.

    The reason is that the run exceeds a limit of work, or that it raises an error, which leaves the work unknown.
    """
    try:
        _run_on_meta(op, case)
    except Exception as e:
        # An operator without a meta kernel, or one that reads values, may raise anything.
        return error_line(e)
    return ""


def exceeds_work_limit(op: Op, case: SampleCase) -> bool:
    """Return whether the reference on ``case`` makes a tensor of more than ``ELEMENTS`` elements or calls more than
    ``CALLS`` operators. Return False if this is unknown because the reference does not run on the meta device.
    """
    try:
        _run_on_meta(op, case)
    except OverflowError:
        return True
    except Exception:
        # The reference may raise anything there.
        return False
    return False


def _run_on_meta(op: Op, case: SampleCase) -> None:
    """Run the reference on ``case`` on the meta device, without memory. Raise ``OverflowError`` if it exceeds a limit
    of work, and the reference's own errors.
    """
    args = tree_map(lambda t: t.detach().to("meta"), case.args)
    positional, named = op.spec.split(args)
    with torch.device("meta"), _WorkLimit():
        op.reference(*positional, **named)


def parse_budget(budget: float | str) -> float:
    """Return ``budget`` in seconds. A number is a number of seconds and is returned unchanged. A string is a number
    with a unit, such as ``"5m"``, ``"90s"`` or ``"1h"``, or a number of seconds. Raise ``SL612`` for NaN, for any other
    string, and for one whose number is not positive.
    """
    if isinstance(budget, (int, float)) and not isnan(budget):
        return budget
    text = str(budget).strip()
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:], 0.0)
    with suppress(ValueError):
        seconds = float(text[:-1]) * unit if unit else float(text)
        if seconds > 0:
            return seconds
    raise error("SL612", where="budget", got=repr(budget), expected="a time such as 90s, 5m or 1h")
