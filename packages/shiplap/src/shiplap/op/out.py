"""``op.out``: the op ``<name>__out``, whose outputs and workspace belong to the caller.

A name of its own, since two overloads of one name cannot be declared again. It returns nothing: what it writes is in
its schema. No autograd and no autocast stand in front of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shiplap.compat.library import Registrations
from shiplap.errors import ShiplapError, error
from shiplap.op import digest
from shiplap.op.binding import Binding, shape_of
from shiplap.op.explain import explain
from shiplap.op.expr import Expr
from shiplap.op.launch import workspace_size
from shiplap.op.outputs import check_sharing, fit_outputs, tensors_of
from shiplap.op.schema import schema
from shiplap.op.serve import Served
from shiplap.op.spec import OpSpec
from shiplap.op.values import Args, Outputs, Size, Value

__all__ = ["OutVariant", "has_out", "out_name", "out_schema", "scratch_name"]

ALIGNMENT = 64  # bytes: what kernels are promised of a workspace


def has_out(spec: OpSpec) -> bool:
    """Whether all outputs have sizes that the arguments determine, so that a caller can own them."""
    return bool(spec.outputs) and not spec.dynamic


def out_name(spec: OpSpec) -> str:
    """The torch op's name, without namespace."""
    return f"{spec.opname}__out"


def scratch_name(spec: OpSpec) -> str:
    """What the workspace argument is called: an argument of the op may have that name already."""
    name = "workspace"
    while name in {a.name for a in spec.args} | {o.name for o in spec.outputs}:
        name += "_"
    return name


def out_schema(spec: OpSpec, name: str = "") -> str:
    """``name(<arguments>, *, Tensor(a1!) out, Tensor(a2!)? workspace=None) -> ()``."""
    given = schema(spec, name or out_name(spec)).rpartition(") -> ")[0]
    keywords = [] if any(a.keyword_only for a in spec.args) else ["*"]
    keywords += [f"Tensor(a{len(spec.args) + i}!) {o.name}" for i, o in enumerate(spec.outputs)]
    keywords += [f"Tensor(a{len(spec.args) + len(spec.outputs)}!)? {scratch_name(spec)}=None"]
    return f"{given}, {', '.join(keywords)}) -> ()"


class OutVariant:
    """The registered out-variant of a declared op."""

    def __init__(self, op: Served, registrations: Registrations) -> None:
        self.op, self.spec = op, op.spec
        self.scratch, self.names = scratch_name(self.spec), tuple(o.name for o in self.spec.outputs)
        name = out_name(self.spec)
        tags = [torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides]
        if marked := getattr(torch.Tag, "out_variant", None):  # since 2.13
            tags.append(marked)
        registrations.define(out_schema(self.spec), tags)
        registrations.implement(name, self.execute)
        registrations.skip_autograd(name)  # execute and native code see to gradients
        registrations.fake(name, self._fake)
        self.overload = registrations.overload(name)

    def __call__(
        self, args: Args, keywords: dict[str, Value], out: Tensor | Sequence[Tensor], workspace: Tensor | None
    ) -> Tensor | Sequence[Tensor]:
        """Run into ``out``; ``keywords`` is the caller's own dict no longer."""
        if len(self.names) == 1 and isinstance(out, Tensor):
            keywords[self.names[0]] = out
        else:
            keywords.update(zip(self.names, self._several(out), strict=True))
        if workspace is not None:
            keywords[self.scratch] = workspace
        try:
            self.overload(*args, **keywords)
        except (RuntimeError, TypeError) as e:
            outs, _ = self._taken(keywords)
            self._explain(args, keywords, outs, workspace, e)
            raise
        return out

    def _several(self, out: Tensor | Sequence[Tensor]) -> Outputs:
        outs = (out,) if isinstance(out, Tensor) else tuple(out)
        if len(outs) != len(self.names):
            raise error(
                "SL212",
                where=self.spec.name,
                got=f"{len(outs)} tensors in out=",
                expected=f"{len(self.names)}: {', '.join(self.names)}",
                fix="pass one tensor for each output",
            )
        return outs

    def _explain(
        self, args: Args, kwargs: dict[str, Value], given: Args, workspace: Tensor | None, cause: Exception
    ) -> None:
        """Raise what the checks in Python say of a call that native code or the dispatcher refused; else return."""
        if isinstance(cause, ShiplapError):
            return
        op = self.op
        explain(op.checker, op.signature, args, kwargs, TypeError())  # the arguments come first
        call = op.bind(self.spec.complete(args, kwargs))
        self._check(call, given, workspace)
        kernel = op.pick(call)
        self._check_workspace(call, workspace, kernel.workspace if kernel else None)
        explain(op.checker, op.signature, args, kwargs, cause)

    def _taken(self, kwargs: dict[str, Value]) -> tuple[Args, Tensor | None]:
        """The outputs and the workspace, taken out of the keywords of a call."""
        given = tuple([kwargs.pop(name) for name in self.names])
        scratch = kwargs.pop(self.scratch, None)
        return given, scratch if isinstance(scratch, Tensor) else None

    def execute(self, *args: Value, **kwargs: Value) -> None:
        """The real implementation where no native code serves."""
        op, (written, scratch) = self.op, self._taken(kwargs)
        given = self.spec.complete(args, kwargs)
        call = (op.quick_bind and op.quick_bind(*given)) or op.bind(given)
        outs = self._check(call, written, scratch)
        kernel = op.pick(call)
        self._check_workspace(call, scratch, kernel.workspace if kernel else None)
        with torch.no_grad():
            if kernel is not None:
                kernel.into(call, outs, scratch)
                return
            made = fit_outputs(self.spec, call, op.run_reference(call.args))
            for out, value in zip(outs, made, strict=True):
                out.copy_(value)

    def _fake(self, *args: Value, **kwargs: Value) -> None:
        digest.ensure()
        written, scratch = self._taken(kwargs)
        call = self.op.bind(self.spec.complete(args, kwargs))
        self._fit(call, written)
        if scratch is not None:
            self._check_bytes(call, scratch)

    def _fit(self, call: Binding, given: Args) -> Outputs:
        """What the caller gave as outputs, if it is that; SL212 else."""
        return tuple(
            [
                self._fits(call, output.name, value, shape_of(output, call.env), call.dtype_of(output.tensor))
                for output, value in zip(self.spec.outputs, given, strict=True)
            ]
        )

    def _check(self, call: Binding, given: Args, scratch: Tensor | None) -> Outputs:
        """The outputs are of the declared kind, each in memory of its own, and no gradient is asked for."""
        spec, outs = self.spec, self._fit(call, given)
        arguments = [(a.name, v) for a, v in zip(spec.args, call.args, strict=True) if a.tensor is not None]
        tensors = [(n, t) for n, v in arguments for t in tensors_of([v])]
        written = [(o.name, t) for o, t in zip(spec.outputs, outs, strict=True)]
        if scratch is not None:
            written.append((self.scratch, scratch))
        for index, (name, target) in enumerate(written):
            for other, tensor in tensors + written[:index]:
                if _overlap(target, tensor):
                    raise error(
                        "SL210",
                        where=f"{spec.name}, output {name!r}",
                        got=f"memory of {other!r}",
                        expected="memory of its own",
                        what="output overlaps another tensor",
                        fix="pass a tensor of its own",
                    )
        if torch.is_grad_enabled() and any(t.requires_grad for _, t in tensors + written):
            raise error(
                "SL304",
                where=f"{spec.name}, out=",
                got="a tensor that requires grad",
                expected="tensors outside autograd",
                what="an out-variant has no gradient",
                fix="call it under torch.no_grad(), or call the op without out=",
            )
        if spec.mutated:
            check_sharing(spec, call)
        return outs

    def _fits(self, call: Binding, name: str, tensor: Value, shape: list[Size], dtype: torch.dtype) -> Tensor:
        where = f"{self.spec.name}, output {name!r}"
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tensor.device != call.device:
            got = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise error("SL212", where=where, got=got, expected=f"{dtype} on {call.device}")
        sizes = list(tensor.shape)
        if len(sizes) != len(shape) or any(a != b for a, b in zip(sizes, shape, strict=True)):
            raise error("SL212", where=where, got=f"shape {tuple(sizes)}", expected=f"shape {tuple(shape)}")
        if not tensor.is_contiguous():
            raise error("SL212", where=where, got=f"strides {tuple(tensor.stride())}", expected="a contiguous tensor")
        return tensor

    def _check_workspace(self, call: Binding, scratch: Tensor | None, expr: Expr | None) -> None:
        if scratch is None:
            return
        self._check_bytes(call, scratch)
        where, need = f"{self.spec.name}, {self.scratch}", workspace_size(expr, call)
        if scratch.numel() < need:
            raise error("SL213", where=where, got=f"{scratch.numel()} bytes", expected=f"at least {need} bytes")
        if scratch.data_ptr() % ALIGNMENT:
            got = f"an address that is {scratch.data_ptr() % ALIGNMENT} modulo {ALIGNMENT}"
            raise error("SL213", where=where, got=got, expected=f"memory aligned to {ALIGNMENT} bytes")

    def _check_bytes(self, call: Binding, scratch: Tensor) -> None:
        if (
            scratch.dtype != torch.uint8
            or scratch.device != call.device
            or scratch.dim() != 1
            or scratch.stride(0) != 1
        ):
            got = f"{scratch.dtype} on {scratch.device}, {tuple(scratch.shape)} by {tuple(scratch.stride())}"
            raise error(
                "SL213",
                where=f"{self.spec.name}, {self.scratch}",
                got=got,
                expected=f"torch.uint8 on {call.device}, one contiguous dim",
            )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the address ranges of two tensors meet."""
    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    return a.data_ptr() < b.data_ptr() + _reach(b) and b.data_ptr() < a.data_ptr() + _reach(a)


def _reach(t: Tensor) -> int:
    return (sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1) * t.itemsize
