"""The outputs of a call, which are allocated for a kernel to fill, or checked after a function has returned them.

A declaration does not determine the sizes in a list of tensors, the presence of an optional result or the value of a
scalar. The reference determines them, and a fake call runs it without data. The results of a kernel are checked against
the declared types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from torch import SymBool, Tensor

from shiplap import dtypes, torch_private
from shiplap.declare.binding import Binding, declared_output_shape
from shiplap.declare.spec import Dim, OpSpec, Return, TensorType
from shiplap.declare.value_kinds import kind_mismatch
from shiplap.declare.values import Args, EnvValue, Outputs, Result, Returned, Value
from shiplap.errors import ShiplapError, error
from shiplap.plan.expression import VariableNames
from shiplap.plan.outputs import OutputPlan
from shiplap.plan.rules import size_is_within_bound
from shiplap.torch_private import symbolic_sizes

# --- results that are not all fresh tensors of declared sizes ---------------------------------------------------------


def result_values(result: Returned, count: int) -> list[Value]:
    """Return the values in the result of a function that has ``count`` results, as a list. A single result may itself
    be a list.
    """
    # A single result may be a list itself, which must not be split.
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
    """Return the results in ``result`` that are new tensors, without those that are arguments or views of them. A
    single one is returned itself, and several as a tuple. Return None if there are none.

    Raise ``SL301`` if another tensor is returned in place of an argument that is written to.
    """
    if not spec.returned and not spec.view:
        return result
    values = result_values(result, len(spec.returns))
    made = len(spec.made)
    # A comparison of lists would compare tensors with None, which torch 2.11 does not trace.
    nothing = len(values) == 1 and values[0] is None
    if len(values) != len(spec.returns) or nothing or _are_list_members(spec, values):
        return result if made else None
    given = dict(zip((a.name for a in spec.args), args, strict=True))
    for declared, value in zip(spec.returns, values, strict=True):
        # torch relies on the alias of the schema: another tensor would lose the writes.
        if declared.alias and not spec.view and not _is_same_argument(value, given[declared.alias]):
            expected = f"argument {declared.alias!r} itself, written to in place"
            raise error("SL301", where=f"{spec.name}, return", got="another tensor", expected=expected)
    rest = [v for r, v in zip(spec.returns, values, strict=True) if not r.alias]
    return None if not rest else cast("Returned", rest[0] if made == 1 else tuple(rest))


def _are_list_members(spec: OpSpec, values: Sequence[Value]) -> bool:
    """Return whether ``values`` are the members of the only list that the op returns, rather than one value for each
    result.
    """
    places = [i for i, r in enumerate(spec.returns) if not r.alias and r.many]
    return len(places) == len(spec.made) == 1 and isinstance(values[places[0]], Tensor)


def _is_same_argument(value: Value, argument: Value) -> bool:
    """Return whether a result is the argument object itself, or a list of the same objects as the argument."""
    if isinstance(value, (list, tuple)) and isinstance(argument, (list, tuple)):
        return len(value) == len(argument) and all(v is a for v, a in zip(value, argument, strict=True))
    return value is argument


def all_results(spec: OpSpec, args: Args, made: Result) -> Result:
    """Return all results in declared order. Those that are arguments are taken from ``args``. ``made`` holds the other
    results, which the kernel returned.
    """
    rest = iter(result_values(cast("Returned", made), len(spec.made)) if spec.made else ())
    given = dict(zip((a.name for a in spec.args), args, strict=True))
    values = tuple([given[r.alias] if r.alias else next(rest) for r in spec.returns])
    return cast("Result", values[0] if len(values) == 1 else values)


def check_results(spec: OpSpec, call: Binding, result: Returned) -> Outputs:
    """Return the results of a reference or kernel as a tuple of values whose tensors are contiguous and have memory of
    their own. Results that are arguments are left out.

    Raise ``SL301`` for results of another kind, dtype or shape than declared.
    """
    values = _check_values(spec, call, spec.made, fresh_results(spec, call.args, result))
    owned = list(tensors_in_arguments(call.args))
    return cast("Outputs", tuple([_with_own_memory(value, owned) for value in values]))


def check_view_results(spec: OpSpec, call: Binding, result: Returned) -> Result:
    """Return, unchanged, the results of an op whose results may be views of arguments. Raise ``SL301`` for results of
    another kind, dtype or shape than declared.
    """
    values = _check_values(spec, call, spec.returns, result)
    return cast("Result", values[0] if len(values) == 1 else tuple(values))


def _check_values(spec: OpSpec, call: Binding, wanted: Sequence[Return], result: Returned) -> list[Value]:
    """Return the values in ``result`` as a list. Raise ``SL301`` unless there are as many as ``wanted``, and of the
    declared kinds, dtypes and sizes.
    """
    # A copy: sizes that only the results have are bound in it.
    values, env = result_values(result, len(wanted)), dict(call.env)
    if len(values) != len(wanted):
        raise error("SL301", where=spec.name, got=f"{len(values)} results", expected=f"{len(wanted)} results")
    for declared, value in zip(wanted, values, strict=True):
        where, kind = f"{spec.name}, result {declared.name!r}", str(declared.tensor or declared.scalar)
        if got := kind_mismatch(declared.arg, value):
            expected = (f"list of {kind}" if declared.many else kind) + " or None" * declared.optional
            raise error("SL301", where=where, got=got, expected=expected)
        for tensor in tensors_in_arguments((value,)):
            # The members of a list may differ in the dims that no argument has.
            _check_result_tensor(where, declared, tensor, dict(env) if declared.many else env)
    return values


def flatten_op_results(result: Returned) -> tuple[Tensor, ...]:
    """Return all results as a flat tuple of tensors that can be compared. A number becomes a zero-dimensional tensor. A
    result of any other type, such as None, is left out.
    """
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
            # A symbolic number has a dtype, but no value to compare.
            flat.append(torch.empty((), dtype=dtypes[type(value)]))
    return tuple(flat)


def _check_result_tensor(where: str, declared: Return, tensor: Tensor, env: dict[str, EnvValue]) -> None:
    """Raise ``SL301`` unless the tensor has the declared dtype, rank and sizes. ``env`` holds the sizes known so far by
    dim name. Sizes of dims that it lacks are added to it.
    """
    kind = declared.tensor
    assert kind is not None
    if kind.dtypes and str(tensor.dtype).removeprefix("torch.") not in kind.dtypes:
        expected = f"{kind.dtype_class}: {', '.join(kind.dtypes)}"
        raise error("SL301", where=where, got=str(tensor.dtype), expected=expected)
    refused = error("SL301", where=where, got=f"shape {tuple(tensor.shape)}", expected=str(kind))
    count = len(kind.dims)
    if tensor.dim() < count - 1 if kind.variadic else tensor.dim() != count:
        raise refused
    for axis, dim in kind.axes:
        _check_result_size(refused, dim, tensor.shape[axis], env)


def _check_result_size(refused: ShiplapError, dim: Dim, size: int, env: dict[str, EnvValue]) -> None:
    """Raise ``refused`` unless ``size`` equals the declared size of ``dim``. ``env`` holds the sizes known so far by
    dim name. If it lacks the name, ``size`` is added to it.
    """
    if dim.kind == "name":
        wanted: EnvValue = env.setdefault(dim.text, size)
    elif dim.kind == "fixed":
        wanted = dim.size
    elif dim.expr is not None and dim.expr.names <= env.keys():
        wanted = dim.expr(env)
    else:
        return
    # A symbolic comparison becomes an assertion of the graph, where bool() would fix the size.
    holds = cast("bool | SymBool", wanted == size)
    if isinstance(holds, SymBool):
        symbolic_sizes.check_condition(holds, lambda: str(refused))
    elif not holds:
        raise refused


def _with_own_memory(value: Value, owned: list[Tensor]) -> Value:
    """Return ``value`` with its tensors contiguous and in memory that no tensor of ``owned`` shares. Tensors are copied
    if necessary. The returned tensors are appended to ``owned``.
    """
    if isinstance(value, (list, tuple)):
        return cast("Value", [_with_own_memory(v, owned) for v in value])
    if not isinstance(value, Tensor):
        return value
    value = value.resolve_conj().resolve_neg()
    shared = any(torch_private.same_storage(value, t) for t in owned)
    # contiguous() returns a contiguous tensor itself, which would still share its memory.
    fresh = value.clone(memory_format=torch.contiguous_format) if shared else value.contiguous()
    owned.append(fresh)
    return fresh


# --- outputs of declared sizes ----------------------------------------------------------------------------------------


def result_of_outputs(outs: Outputs) -> Tensor | Outputs | None:
    """Return the result of an op as callers get it. A single output is returned itself, and several outputs as a tuple.
    Without outputs, return None.
    """
    return outs[0] if len(outs) == 1 else outs or None


_output_plans: dict[str, OutputPlan] = {}  # by the digest of the declaration


def empty_outputs(spec: OpSpec, call: Binding) -> Outputs:
    """Return new uninitialised tensors for the outputs of a call, in declared order. All sizes must be known. If the op
    has data-dependent ones, ``call.env``, the values of its dims by name, must hold them.
    """
    # Plans are cached by digest, as specs with equal digests allocate the same outputs.
    plan = _output_plans.get(spec.digest)
    if plan is None:
        plan = _output_plans.setdefault(spec.digest, OutputPlan(spec, VariableNames(spec)))
    return plan.allocate(call.env, call.dtypes, call.device)


def check_outputs(spec: OpSpec, call: Binding, result: Returned) -> Outputs:
    """Return the outputs in ``result`` as a tuple of contiguous tensors in memory of their own. Raise ``SL301`` for a
    wrong number, shape, dtype or device.
    """
    if spec.traced:
        return check_results(spec, call, result)
    result = fresh_results(spec, call.args, result)
    values = () if result is None else tuple(result) if isinstance(result, (tuple, list)) else (result,)
    if len(values) != len(spec.outputs):
        got, named = f"{len(values)} outputs", ", ".join(o.name for o in spec.outputs)
        fix = ""
        if result is None and named:
            got += ": the function returned None"
            fix = f"return the result, or let the kernel take {named} (*, {named}) and fill it in place"
        raise error("SL301", where=spec.name, got=got, expected=f"{len(spec.outputs)} outputs", fix=fix)
    env = dict(call.env)
    owned = {t.untyped_storage().data_ptr() for t in tensors_in_arguments(call.args)}
    for out, value in zip(spec.outputs, values, strict=True):
        where = f"{spec.name}, output {out.name!r}"
        dtype = call.dtype_of(out.tensor)
        if not isinstance(value, Tensor) or value.dtype != dtype or value.device != call.device:
            got = f"{value.dtype} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
            raise error("SL301", where=where, got=got, expected=f"{dtype} on {call.device}")
        # A shape may have a data-dependent dim of a later output, so all of these are measured before shapes are
        # compared.
        _measure_dynamic_dims(spec, where, env, out.tensor, value)
    outs = []
    for out, value in zip(spec.outputs, values, strict=True):
        where = f"{spec.name}, output {out.name!r}"
        if list(value.shape) != (shape := declared_output_shape(out, env)):
            raise error(
                "SL301", where=where, got=f"shape {tuple(value.shape)}", expected=f"{out.tensor} = {tuple(shape)}"
            )
        # A kernel that reads the memory does not notice the lazy mark of a conjugate.
        value = value.resolve_conj().resolve_neg()
        storage = value.untyped_storage().data_ptr()
        # An output shares memory neither with an argument nor with an earlier output.
        fresh = value.contiguous() if storage not in owned else value.clone(memory_format=torch.contiguous_format)
        owned.add(fresh.untyped_storage().data_ptr())
        outs.append(fresh)
    return tuple(outs)


def with_own_memory(result: Any) -> Any:
    """Return ``result`` with its tensors cloned into contiguous memory of their own. Gradients and tangents stay
    attached.
    """
    if isinstance(result, Tensor):
        return result.clone(memory_format=torch.contiguous_format)
    return type(result)(with_own_memory(value) for value in result) if isinstance(result, (list, tuple)) else result


def _measure_dynamic_dims(spec: OpSpec, where: str, env: dict[str, EnvValue], kind: TensorType, value: Tensor) -> None:
    """Add to ``env``, the sizes known by dim name, those data-dependent sizes of the output ``value`` that no earlier
    output had. Raise ``SL302`` if a size exceeds its bound.
    """
    if not spec.dynamic or value.dim() < len(kind.dims) - 1:
        return
    for axis, dim in kind.axes:
        if dim.text in spec.dynamic and dim.text not in env and -value.dim() <= axis < value.dim():
            env[dim.text] = size = value.shape[axis]
            check_bound(spec, where, dim.text, size, env)


def check_bound(spec: OpSpec, where: str, dim: str, size: int, env: Mapping[str, EnvValue]) -> None:
    """Raise ``SL302`` unless ``size``, the data-dependent size of ``dim``, is at most its declared bound. The bound is
    computed from ``env``, the other sizes by name.
    """
    bound = spec.dynamic[dim]
    most = bound(env)
    # The same condition as the rule's. Plain ints are compared here, since the rule evaluates an expression.
    if type(size) is int and type(most) is int and 0 <= size <= most:
        return
    size_is_within_bound(where, dim, bound.source).check_call({f"extent_{dim}": size, f"d_{dim}": most})


def tensors_in_arguments(args: Sequence[Value]) -> Iterator[Tensor]:
    """Yield all tensors among the arguments, in order, including those in lists."""
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, Tensor))


# --- outputs of calls like one that has been checked ------------------------------------------------------------------


FitOutputs: TypeAlias = Callable[[Args, Returned], Result]


@dataclass(frozen=True)
class _ExpectedAxis:
    """The size that one axis of an output is expected to have. If the size depends on data, ``size`` is its upper
    bound, and ``dim`` is the name of the declared dim. Otherwise ``size`` is exact, and ``dim`` is an empty string.
    """

    size: int
    dim: str = ""


@dataclass(frozen=True)
class _ExpectedOutput:
    """The dtype of an output and the size of each of its axes, as found in the first call of an op. Later calls with
    arguments of the same layouts are expected to return an output like it.
    """

    dtype: torch.dtype
    axes: tuple[_ExpectedAxis, ...]


def can_refit_outputs(spec: OpSpec) -> bool:
    """Return whether the results of repeated calls with equal layouts can be compared with those of the first instead
    of the full declaration. Ops with floating-point arguments are excluded, because each of their calls would have to
    be checked for gradients.
    """
    if spec.traced or spec.returned or not spec.outputs or any(a.many for a in spec.args):
        return False
    if any(row.floating for a in spec.tensors if a.tensor is not None for row in dtypes.rows(a.tensor.dtypes)):
        return False
    dims = [dim for out in spec.outputs for dim in out.tensor.dims]
    return not any(d.kind == "variadic" or (d.expr is not None and d.expr.names & {*spec.dynamic}) for d in dims)


def make_output_refit(spec: OpSpec, call: Binding, outs: Outputs) -> FitOutputs:
    """Return ``fit(args, result)``, which returns the result of a repeated call. If the result differs from ``outs``,
    the outputs of the first ``call``, in dtype, size or device, ``fit`` checks it against the declaration and raises
    ``SL301`` if it does not fit. ``fit`` keeps no tensor of the first call alive.
    """
    bounds = {dim: int(bound(call.env)) for dim, bound in spec.dynamic.items()}
    expected = []
    for out, value in zip(spec.outputs, outs, strict=True):
        axes = [
            _ExpectedAxis(bounds[dim.text], dim.text) if dim.text in bounds else _ExpectedAxis(size)
            for dim, size in zip(out.tensor.dims, value.shape, strict=True)
        ]
        expected.append(_ExpectedOutput(value.dtype, tuple(axes)))
    # Without its arguments, so that no tensor of the first call is kept alive.
    alike, device = replace(call, args=()), call.device

    def fit(args: Args, result: Returned) -> Result:
        """Return the result of a repeated call. If it does not have the dtypes, sizes, device and memory expected from
        the first call, check it against the declaration. Raise ``SL301`` if the declaration does not admit it.
        Otherwise copy it to contiguous memory of its own.
        """
        values = (result,) if isinstance(result, Tensor) else tuple(result or ())
        if outputs_as_expected(args, values, expected, device):
            return result_of_outputs(values)
        return result_of_outputs(check_outputs(spec, replace(alike, args=args), result))

    return fit


def outputs_as_expected(args: Args, values: Outputs, expected: list[_ExpectedOutput], device: torch.device) -> bool:
    """Return whether ``values`` are contiguous tensors of the expected dtypes, sizes and device. They must share no
    memory with ``args`` or each other.
    """
    if len(values) != len(expected):
        return False
    owned, sizes = {t.untyped_storage().data_ptr() for t in tensors_in_arguments(args)}, dict[str, int]()
    for value, want in zip(values, expected, strict=True):
        plain = type(value) is Tensor and value.dtype is want.dtype and value.device == device
        if not plain or value.dim() != len(want.axes) or not value.is_contiguous() or value.is_neg():
            return False
        for size, axis in zip(value.shape, want.axes, strict=True):
            # A data-dependent dim has one size in all outputs of a call.
            same = sizes.setdefault(axis.dim, size) if axis.dim else axis.size
            if size != same or size > axis.size:
                return False
        storage = value.untyped_storage().data_ptr()
        if storage in owned:
            return False
        owned.add(storage)
    return True
