"""The outputs of a call: allocated for a kernel to fill, or checked after a function has returned them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shiplap.declare.binding import Binding, declared_output_shape
from shiplap.declare.spec import Dim, OpSpec
from shiplap.declare.values import EnvValue, Outputs, Returned, Value
from shiplap.dispatch.check_results import check_results, fresh_results
from shiplap.errors import error
from shiplap.plan.expression import VariableNames
from shiplap.plan.outputs import OutputPlan
from shiplap.plan.rules.outputs import WithinBound


def result_of_outputs(outs: Outputs) -> Tensor | Outputs | None:
    """Return the result of an op with these outputs: the only one, a tuple of several, or None."""
    return outs[0] if len(outs) == 1 else outs or None


_output_plans: dict[str, OutputPlan] = {}  # by the digest of the declaration


def empty_outputs(spec: OpSpec, call: Binding) -> Outputs:
    """Allocate the outputs in declared order. ``call.env`` must have all their sizes."""
    plan = _output_plans.get(spec.digest)
    if plan is None:
        plan = _output_plans.setdefault(spec.digest, OutputPlan(spec, VariableNames(spec)))
    return plan.allocate(call.env, call.dtypes, call.device)


def check_outputs(spec: OpSpec, call: Binding, result: Returned) -> Outputs:
    """Return the outputs in ``result``, contiguous and fresh. Raise SL301 for a wrong shape, dtype or device."""
    if spec.traced:
        return check_results(spec, call, result)
    result = fresh_results(spec, call.args, result)
    values = () if result is None else tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if len(values) != len(spec.outputs):
        raise error("SL301", where=spec.name, got=f"{len(values)} outputs", expected=f"{len(spec.outputs)} outputs")
    env = dict(call.env)
    owned = {t.untyped_storage().data_ptr() for t in tensors_in_arguments(call.args)}
    for out, value in zip(spec.outputs, values, strict=True):
        where = f"{spec.name}, output {out.name!r}"
        dtype = call.dtype_of(out.tensor)
        if not isinstance(value, Tensor) or value.dtype != dtype or value.device != call.device:
            got = f"{value.dtype} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
            raise error("SL301", where=where, got=got, expected=f"{dtype} on {call.device}")
        _measure_dynamic_dims(spec, where, env, out.tensor.dims, value)
    outs = []
    for out, value in zip(spec.outputs, values, strict=True):
        where = f"{spec.name}, output {out.name!r}"
        if list(value.shape) != (shape := declared_output_shape(out, env)):
            raise error(
                "SL301", where=where, got=f"shape {tuple(value.shape)}", expected=f"{out.tensor} = {tuple(shape)}"
            )
        value = value.resolve_conj().resolve_neg()
        storage = value.untyped_storage().data_ptr()
        fresh = value.contiguous() if storage not in owned else value.clone(memory_format=torch.contiguous_format)
        owned.add(fresh.untyped_storage().data_ptr())
        outs.append(fresh)
    return tuple(outs)


def with_own_memory(result: Any) -> Any:
    """Return clones of the results of a reference. ``clone`` keeps gradients and tangents."""
    if isinstance(result, Tensor):
        return result.clone(memory_format=torch.contiguous_format)
    return type(result)(with_own_memory(value) for value in result) if isinstance(result, (list, tuple)) else result


def _measure_dynamic_dims(
    spec: OpSpec, where: str, env: dict[str, EnvValue], dims: Sequence[Dim], value: Tensor
) -> None:
    """Bind the data-dependent sizes that ``value`` is the first output to have, and check their bounds."""
    if not spec.dynamic or value.dim() < len(dims) - 1:
        return
    spread = next((i for i, d in enumerate(dims) if d.kind == "variadic"), len(dims))
    for i, dim in enumerate(dims):
        axis = i if i < spread else i - len(dims)
        if dim.text in spec.dynamic and dim.text not in env and -value.dim() <= axis < value.dim():
            env[dim.text] = size = value.shape[axis]
            check_bound(spec, where, dim.text, size, env)


def check_bound(spec: OpSpec, where: str, dim: str, size: int, env: Mapping[str, EnvValue]) -> None:
    """Raise SL302 unless the data-dependent ``size`` of ``dim`` respects the declared bound."""
    bound = spec.dynamic[dim]
    most = bound(env)
    # The same condition as the rule's. Plain ints are compared here, since the rule evaluates an expression.
    if type(size) is int and type(most) is int and 0 <= size <= most:
        return
    rule = WithinBound(where, dim, bound.source)
    rule.hold({rule.size.python: size, rule.bound.python: most})


def tensors_in_arguments(args: Sequence[Value]) -> Iterator[Tensor]:
    """Yield all tensors among the arguments, also those in lists."""
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, Tensor))
