"""Checks of the results of one call, for ops whose results are not all fresh tensors of declared sizes.

A declaration does not determine the sizes in a list of tensors, the presence of an optional result or the value of a
scalar. The reference determines them; a fake call runs it without data. The results of a kernel are checked against
the declared types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import SymBool, Tensor

from shiplap import torch_private
from shiplap.declare.binding import Binding
from shiplap.declare.spec import Dim, OpSpec, Return
from shiplap.declare.value_kinds import kind_mismatch
from shiplap.declare.values import Args, EnvValue, Outputs, Result, Returned, Value
from shiplap.errors import ShiplapError, error
from shiplap.torch_private import symbolic_sizes


def result_values(result: Returned, count: int) -> list[Value]:
    """Return the values in the result of a function with ``count`` results. A single result may be a list."""
    if count == 1 and not (isinstance(result, tuple) and len(result) == 1):
        return [cast("Value", result)]
    return (
        list(cast("Sequence[Value]", result))
        if isinstance(result, (tuple, list))
        else []
        if result is None
        else [result]
    )


def fresh_results(spec: OpSpec, args: Sequence[Value], result: Returned) -> Returned:
    """Return the results that are not arguments. Raise SL301 where another tensor stands in place of an argument."""
    if not spec.returned:
        return result
    values = result_values(result, len(spec.returns))
    made = len(spec.made)
    if len(values) != len(spec.returns) or values == [None] or _is_only_list(spec, values):
        return result if made else None
    given = dict(zip((a.name for a in spec.args), args, strict=True))
    for declared, value in zip(spec.returns, values, strict=True):
        if declared.alias and not _is_same_argument(value, given[declared.alias]):
            expected = f"argument {declared.alias!r} itself, written to in place"
            raise error("SL301", where=f"{spec.name}, return", got="another tensor", expected=expected)
    rest = [v for r, v in zip(spec.returns, values, strict=True) if not r.alias]
    return None if not rest else cast("Returned", rest[0] if made == 1 else tuple(rest))


def _is_only_list(spec: OpSpec, values: Sequence[Value]) -> bool:
    """Whether ``values`` are the members of the one list that the op makes, which has as many as the op has results."""
    places = [i for i, r in enumerate(spec.returns) if not r.alias and r.many]
    return len(places) == len(spec.made) == 1 and isinstance(values[places[0]], Tensor)


def _is_same_argument(value: Value, argument: Value) -> bool:
    if isinstance(value, (list, tuple)) and isinstance(argument, (list, tuple)):
        return len(value) == len(argument) and all(v is a for v, a in zip(value, argument, strict=True))
    return value is argument


def all_results(spec: OpSpec, args: Args, made: Result) -> Result:
    """Return all results of an op that returns arguments, in order. ``made`` has the results that are not arguments."""
    rest = iter(result_values(cast("Returned", made), len(spec.made)) if spec.made else ())
    given = dict(zip((a.name for a in spec.args), args, strict=True))
    values = tuple([given[r.alias] if r.alias else next(rest) for r in spec.returns])
    return cast("Result", values[0] if len(values) == 1 else values)


def check_results(spec: OpSpec, call: Binding, result: Returned) -> Outputs:
    """Return the results of a reference or kernel as the declaration promises them: contiguous, in their own memory.

    Raise SL301 for results of another kind, dtype or shape.
    """
    values = result_values(fresh_results(spec, call.args, result), len(spec.made))
    if len(values) != len(spec.made):
        raise error("SL301", where=spec.name, got=f"{len(values)} results", expected=f"{len(spec.made)} results")
    env, owned = dict(call.env), [t for v in call.args for t in _tensors_of_value(v)]
    fitted = []
    for declared, value in zip(spec.made, values, strict=True):
        where = f"{spec.name}, result {declared.name!r}"
        _check_result_kind(where, declared, value)
        for tensor in _tensors_of_value(value):
            _check_result_tensor(
                where, declared, tensor, dict(env) if declared.many else env
            )  # members differ in new dims
        fitted.append(_with_own_memory(value, owned))
    return cast("Outputs", tuple(fitted))


def check_view_results(spec: OpSpec, call: Binding, result: Returned) -> Result:
    """Return the results of an op with views unchanged. Raise SL301 for results of another kind, dtype or shape."""
    values, env = result_values(result, len(spec.returns)), dict(call.env)
    if len(values) != len(spec.returns):
        raise error("SL301", where=spec.name, got=f"{len(values)} results", expected=f"{len(spec.returns)} results")
    for declared, value in zip(spec.returns, values, strict=True):
        where = f"{spec.name}, result {declared.name!r}"
        _check_result_kind(where, declared, value)
        for tensor in _tensors_of_value(value):
            _check_result_tensor(
                where, declared, tensor, dict(env) if declared.many else env
            )  # members differ in new dims
    return cast("Result", values[0] if len(values) == 1 else tuple(values))


def flatten_op_results(result: Returned) -> tuple[Tensor, ...]:
    """Return all results as a flat tuple of tensors, for comparison. A number becomes a tensor without dims."""
    values = result if isinstance(result, (tuple, list)) else () if result is None else (result,)
    flat: list[Tensor] = []
    for value in cast("Sequence[Value]", values):
        if isinstance(value, Tensor):
            flat.append(value)
        elif isinstance(value, (list, tuple)):
            flat += flatten_op_results(cast("Returned", value))
        elif isinstance(value, (bool, int, float, complex)):
            flat.append(torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None))
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            dtypes = {torch.SymInt: torch.int64, torch.SymFloat: torch.float64, torch.SymBool: torch.bool}
            flat.append(torch.empty((), dtype=dtypes[type(value)]))
    return tuple(flat)


def _tensors_of_value(value: Value) -> list[Tensor]:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [v for v in values if isinstance(v, Tensor)]


def _check_result_kind(where: str, declared: Return, value: Value) -> None:
    if got := kind_mismatch(declared.arg, value):
        kind = str(declared.tensor or declared.scalar)
        expected = f"list of {kind}" if declared.many else kind
        raise error("SL301", where=where, got=got, expected=expected + " or None" * declared.optional)


def _check_result_tensor(where: str, declared: Return, tensor: Tensor, env: dict[str, EnvValue]) -> None:
    """Raise SL301 unless the tensor has the declared dtype, number of dims and sizes, as far as ``env`` has these."""
    kind = declared.tensor
    assert kind is not None
    name = str(tensor.dtype).removeprefix("torch.")
    if kind.dtypes and name not in kind.dtypes:
        raise error(
            "SL301", where=where, got=str(tensor.dtype), expected=f"{kind.dtype_class}: {', '.join(kind.dtypes)}"
        )
    refused = error("SL301", where=where, got=f"shape {tuple(tensor.shape)}", expected=str(kind))
    count = len(kind.dims)
    if tensor.dim() < count - 1 if kind.variadic else tensor.dim() != count:
        raise refused
    spread = next((i for i, d in enumerate(kind.dims) if d.kind == "variadic"), count)
    for axis, dim in enumerate(kind.dims):
        if axis != spread:
            _check_result_size(refused, dim, tensor.shape[axis if axis < spread else axis - count], env)


def _check_result_size(refused: ShiplapError, dim: Dim, size: int, env: dict[str, EnvValue]) -> None:
    """Raise ``refused`` unless ``size`` is the declared one. A name that no argument has is bound in ``env``."""
    if dim.kind == "name":
        wanted: EnvValue = env.setdefault(dim.text, size)
    elif dim.kind == "fixed":
        wanted = dim.size
    elif dim.expr is not None and dim.expr.names <= env.keys():
        wanted = dim.expr(env)
    else:
        return
    holds = cast("bool | SymBool", wanted == size)
    if isinstance(holds, SymBool):
        symbolic_sizes.check_condition(holds, lambda: str(refused))
    elif not holds:
        raise refused


def _with_own_memory(value: Value, owned: list[Tensor]) -> Value:
    """Return ``value`` with contiguous tensors that share no memory with ``owned``, and add them to ``owned``."""
    if isinstance(value, (list, tuple)):
        return cast("Value", [_with_own_memory(v, owned) for v in value])
    if not isinstance(value, Tensor):
        return value
    value = value.resolve_conj().resolve_neg()
    shared = any(torch_private.same_storage(value, t) for t in owned)
    fresh = value.clone(memory_format=torch.contiguous_format) if shared else value.contiguous()
    owned.append(fresh)
    return fresh
