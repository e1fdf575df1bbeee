"""Argument checks derived from the declaration: a call that passes them is a ``Binding``.

The same code runs on real tensors before a kernel is launched and on fake tensors while a graph is traced, so a call
that would fail fails with the same error in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiplap.compat.sizes import check
from shiplap.errors import ShiplapError, error
from shiplap.op.binding import UNPLACED, Binding
from shiplap.op.expr import Expr
from shiplap.op.spec import Arg, Dim, OpSpec, TensorType

__all__ = ["Checker"]


class Checker:
    """Binds calls of one declared op. Built once; holds nothing of any call."""

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        self._accepted = {
            a.name: frozenset(getattr(torch, n) for n in a.tensor.dtypes) for a in spec.args if a.tensor is not None
        }
        # What outputs and expressions need from the arguments: an empty tensor list may fail to give it.
        self._classes = {o.tensor.dtype_class for o in spec.outputs if not o.tensor.concrete}
        exprs = [e for _, e in (*spec.dims, *spec.bounds)] + list(spec.requires)
        sizes = [d for o in spec.outputs for d in o.tensor.dims]
        names = {d.text for d in sizes if d.kind in ("name", "variadic")}
        names = names.union(*(e.names for e in exprs), *(d.expr.names for d in sizes if d.expr))
        self._names = names - {k for k, _ in (*spec.dims, *spec.bounds)}

    def bind(self, args: Sequence[Any]) -> Binding:
        """Check ``args`` (in schema order; trailing defaults may be missing) and bind names; raises SL2xx."""
        spec = self.spec
        full = (*args, *(a.default for a in spec.args[len(args) :]))
        call = Binding(full)
        for arg, value in zip(spec.args, full, strict=True):
            if arg.scalar is not None:
                call.env[arg.name] = value
        for arg, value in zip(spec.args, full, strict=True):
            if arg.tensor is not None and not (value is None and arg.optional):
                for label, tensor in _each(arg, value):
                    self._tensor(call, arg, label, tensor)
        self._relate(call)
        return call

    def _relate(self, call: Binding) -> None:
        """What no argument can tell alone: that lists were not empty, computed dims, preconditions."""
        spec = self.spec
        if call.device is UNPLACED or not (self._names <= call.env.keys() and self._classes <= call.dtypes.keys()):
            raise self._error("SL209", "", "an empty list of tensors", "at least one tensor")
        for name, expr in spec.dims:
            self._agree(call, "", name, self._value(call, expr), f"declared as {expr}")
        for label, axis, size, expr in call.late:
            self._computed(call, label, axis, size, expr)
        for expr in spec.requires:
            self._require(call, expr, self._value(call, expr))

    def _value(self, call: Binding, expr: Expr) -> Any:
        try:
            return expr(call.env)
        except (ArithmeticError, LookupError, TypeError, ValueError) as e:  # n // 0, stride[2] of two, min of nothing
            raise self._error("SL208", "", f"{_show(call, expr)}: {e}", f"a value of {expr}") from None

    def _tensor(self, call: Binding, arg: Arg, label: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            got = "None" if value is None else type(value).__name__  # the dispatcher takes None for any tensor
            raise self._error("SL209", label, got, str(arg.tensor))
        assert arg.tensor is not None
        if value.layout is not torch.strided:
            raise self._error("SL207", label, value.layout, "a dense tensor", fix="call .to_dense() first")
        self._dtype(call, arg, label, value)
        if call.device is UNPLACED:
            call.device, call.origin["device"] = value.device, label
        elif value.device != call.device:
            raise self._error("SL206", label, value.device, f"{call.device}, as {call.origin['device']!r}")
        self._shape(call, arg.tensor, label, value)
        if arg.contiguous and not value.is_contiguous():
            raise self._error("SL207", label, f"strides {tuple(value.stride())}", "a contiguous tensor")
        if arg.mutated:
            self._mutated(label, value)

    def _mutated(self, label: str, value: Tensor) -> None:
        if _overlaps_itself(value):
            got = f"shape {_plain(value.shape)}, strides {value.stride()}"
            raise self._error("SL210", label, got, "distinct memory")
        if value.requires_grad and torch.is_grad_enabled():
            raise self._error(
                "SL304",
                label,
                "a tensor that requires grad",
                "a mutated tensor outside autograd",
                fix="call the op under torch.no_grad(), or pass .detach()",
            )

    def _dtype(self, call: Binding, arg: Arg, label: str, value: Tensor) -> None:
        accepted, kind = self._accepted[arg.name], arg.tensor
        assert kind is not None
        if accepted and value.dtype not in accepted:
            names = ", ".join(sorted(str(d).removeprefix("torch.") for d in accepted))
            raise self._error("SL204", label, value.dtype, f"{kind.dtype_class}: {names}")
        if not kind.concrete:
            first = call.dtypes.setdefault(kind.dtype_class, value.dtype)
            origin = call.origin.setdefault(f"dtype {kind.dtype_class}", label)
            if value.dtype != first:
                raise self._error("SL205", label, value.dtype, f"{first}, as {origin!r} ({kind.dtype_class})")

    def _shape(self, call: Binding, kind: TensorType, label: str, value: Tensor) -> None:
        shape, dims = value.shape, kind.dims
        if (len(shape) < len(dims) - 1) if kind.variadic else (len(shape) != len(dims)):
            raise self._error("SL201", label, f"{len(shape)} dims, shape {_plain(shape)}", str(kind))
        position = 0
        for dim in dims:
            if dim.kind == "variadic":
                rest = len(shape) - (len(dims) - 1)
                self._bind_variadic(call, dim, label, tuple(shape[position : position + rest]))
                position += rest
                continue
            self._dim(call, dim, label, position, shape[position])
            position += 1

    def _dim(self, call: Binding, dim: Dim, label: str, axis: int, size: Any) -> None:
        if dim.kind == "name":
            self._agree(call, f"{label!r}, dim {dim.text!r} (axis {axis})", dim.text, size, f"in {label!r}")
        elif dim.kind == "fixed":
            _equal(size, dim.size, lambda: self._error("SL203", label, f"size {size} in axis {axis}", dim.size))
        elif dim.expr is not None:
            if dim.expr.names <= call.env.keys():
                self._computed(call, label, axis, size, dim.expr)
            else:
                call.late.append((label, axis, size, dim.expr))

    def _computed(self, call: Binding, label: str, axis: int, size: Any, expr: Expr) -> None:
        wanted = self._value(call, expr)
        _equal(size, wanted, lambda: self._error("SL202", label, f"size {size} in axis {axis}", f"{expr} = {wanted}"))

    def _bind_variadic(self, call: Binding, dim: Dim, label: str, sizes: tuple[Any, ...]) -> None:
        if dim.text == "...":
            return
        bound = call.env.setdefault(dim.text, sizes)
        assert isinstance(bound, (tuple, list))  # another variadic dim, or a list of ints
        if len(bound) != len(sizes):
            raise self._error("SL201", label, f"{dim.text} = {_plain(sizes)}", f"{dim.text} = {_plain(bound)}")
        for a, b in zip(sizes, bound, strict=True):
            _equal(a, b, lambda: self._error("SL202", label, f"{dim.text} = {_plain(sizes)}", _plain(bound)))

    def _agree(self, call: Binding, label: str, name: str, size: Any, origin: str) -> None:
        """Bind ``name`` to ``size``, or check that it agrees with what it was bound to first."""
        if name not in call.env:
            call.env[name], call.origin[name] = size, origin
            return
        bound, first = call.env[name], call.origin.get(name, f"argument {name!r}")
        _equal(size, bound, lambda: self._error("SL202", label, f"{name} = {size}", f"{name} = {bound}, {first}"))

    def _require(self, call: Binding, expr: Expr, holds: Any) -> None:
        if isinstance(holds, torch.SymBool):
            check(holds, lambda: str(self._error("SL208", "", _show(call, expr), expr)))
        elif not holds:
            raise self._error("SL208", "", _show(call, expr), expr)

    def _error(self, id: str, label: str, got: object, expected: object, fix: str = "") -> ShiplapError:
        if label and "'" not in label:
            label = repr(label)
        where = f"{self.spec.name}, argument {label}" if label else self.spec.name
        return error(id, where=where, got=got, expected=expected, fix=fix)


def _each(arg: Arg, value: Any) -> Iterator[tuple[str, Any]]:
    if not arg.many:
        yield arg.name, value
    else:
        yield from ((f"{arg.name}[{i}]", v) for i, v in enumerate(value))


def _equal(a: Any, b: Any, failure: Callable[[], ShiplapError]) -> None:
    """Plain sizes are compared; symbolic ones become a guard or a run-time assertion of the graph."""
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        check(a == b, lambda: str(failure()))
    elif a != b:
        raise failure()


def _overlaps_itself(t: Tensor) -> bool:
    """Whether two indices share memory. A symbolic shape passes: the real call is checked."""
    if t.is_contiguous():
        return False
    axes = list(zip(t.stride(), t.shape, strict=True))
    if not all(isinstance(v, int) for axis in axes for v in axis) or t.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(axes):
        if size > 1 and stride <= reach:
            break  # dims may interleave without touching, as sizes (2, 3) with strides (3, 2) do: count
        reach += (size - 1) * stride
    else:
        return False
    offsets = sum(np.ogrid[tuple(slice(size) for _, size in axes)][i] * stride for i, (stride, _) in enumerate(axes))
    return np.unique(offsets).size < t.numel()


def _show(call: Binding, expr: Expr) -> str:
    return ", ".join(f"{name} = {call.env.get(name)}" for name in sorted(expr.names))


def _plain(shape: Sequence[Any]) -> str:
    return f"({', '.join(map(str, shape))})"
