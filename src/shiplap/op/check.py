"""Argument checks derived from the declaration, and the values they bind: sizes, dtypes, scalars, device.

The same code runs on real tensors before a kernel is launched and on fake tensors while a graph is traced, so a call
that would fail fails with the same error in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shiplap.errors import ShiplapError, error
from shiplap.op.spec import Arg, Dim, OpSpec, Output, TensorType

__all__ = ["Binding", "Checker", "shape_of"]


@dataclass
class Binding:
    """One call's arguments, by name, with what they determine.

    ``env`` maps dim names and int arguments to sizes; ``dtypes`` maps dtype classes to dtypes.
    """

    args: tuple[Any, ...]
    env: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    device: torch.device | None = None
    origin: dict[str, str] = field(default_factory=dict)

    def dtype_of(self, out: TensorType) -> torch.dtype:
        """The dtype of an output: its own if it is concrete, else that of its class in this call."""
        return getattr(torch, out.dtypes[0]) if out.concrete else self.dtypes[out.dtype_class]


def shape_of(out: Output, env: dict[str, Any]) -> list[Any]:
    """The shape of an output once ``env`` holds every dim it names."""
    shape: list[Any] = []
    for dim in out.tensor.dims:
        if dim.kind == "variadic":
            shape.extend(env[dim.text])
        elif dim.expr is not None:
            shape.append(dim.expr(env))
        else:
            shape.append(dim.size if dim.kind == "fixed" else env[dim.text])
    return shape


class Checker:
    """Binds calls of one declared op. Built once; holds nothing of any call."""

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        self._accepted = {
            a.name: frozenset(getattr(torch, n) for n in a.tensor.dtypes) for a in spec.args if a.tensor is not None
        }

    def bind(self, args: Sequence[Any]) -> Binding:
        """Check ``args`` (in schema order; trailing defaults may be missing) and bind names; raises SL2xx."""
        spec = self.spec
        full = (*args, *(a.default for a in spec.args[len(args) :]))
        call = Binding(full)
        for arg, value in zip(spec.args, full, strict=True):
            if arg.scalar is not None:
                call.env[arg.name] = value
        for arg, value in zip(spec.args, full, strict=True):
            if arg.tensor is not None and value is not None:
                for label, tensor in _each(arg, value):
                    self._tensor(call, arg, label, tensor)
        for name, expr in spec.dims:
            self._agree(call, f"dim {name!r}", name, expr(call.env), f"declared as {expr}")
        for expr in spec.requires:
            self._require(call, expr.source, expr(call.env))
        return call

    def _tensor(self, call: Binding, arg: Arg, label: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise self._error("SL209", label, type(value).__name__, str(arg.tensor))
        assert arg.tensor is not None
        self._dtype(call, arg, label, value)
        if call.device is None:
            call.device, call.origin["device"] = value.device, label
        elif value.device != call.device:
            raise self._error("SL206", label, value.device, f"{call.device}, as {call.origin['device']!r}")
        self._shape(call, arg.tensor, label, value)
        if arg.contiguous and not value.is_contiguous():
            raise self._error("SL207", label, f"strides {tuple(value.stride())}", "a contiguous tensor")
        if arg.mutated and _overlaps_itself(value):
            raise self._error(
                "SL210", label, f"shape {tuple(value.shape)}, strides {value.stride()}", "distinct memory"
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
        if kind.variadic:
            dims = _spread(call, dims, len(shape))
        if len(dims) != len(shape):
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
            expected = dim.expr(call.env)
            _equal(
                size,
                expected,
                lambda: self._error("SL202", label, f"size {size} in axis {axis}", f"{dim.text} = {expected}"),
            )

    def _bind_variadic(self, call: Binding, dim: Dim, label: str, sizes: tuple[Any, ...]) -> None:
        if dim.text == "...":
            return
        bound = call.env.setdefault(dim.text, sizes)
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

    def _require(self, call: Binding, source: str, holds: Any) -> None:
        values = ", ".join(f"{a.name}={call.env[a.name]}" for a in self.spec.scalars)
        if isinstance(holds, torch.SymBool):
            torch._check(holds, lambda: str(self._error("SL208", "", values, source)))
        elif not holds:
            raise self._error("SL208", "", values, source)

    def _error(self, id: str, label: str, got: object, expected: object) -> ShiplapError:
        if label and "'" not in label:
            label = repr(label)
        return error(
            id, where=f"{self.spec.name}, argument {label}" if label else self.spec.name, got=got, expected=expected
        )


def _each(arg: Arg, value: Any) -> Iterator[tuple[str, Any]]:
    if not arg.many:
        yield arg.name, value
    else:
        yield from ((f"{arg.name}[{i}]", v) for i, v in enumerate(value))


def _spread(call: Binding, dims: tuple[Dim, ...], rank: int) -> tuple[Dim, ...]:
    """``dims`` as they are if the variadic one has room, else nothing that could match."""
    return dims if rank >= len(dims) - 1 else ()


def _equal(a: Any, b: Any, failure: Callable[[], ShiplapError]) -> None:
    """Plain sizes are compared; symbolic ones become a guard or a run-time assertion of the graph."""
    if isinstance(a, int) and isinstance(b, int):
        if a != b:
            raise failure()
    else:
        torch._check(a == b, lambda: str(failure()))


def _overlaps_itself(t: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride(), strict=True))


def _plain(shape: Sequence[Any]) -> str:
    return f"({', '.join(map(str, shape))})"
