"""``op.out``: the op ``<name>__out``, whose outputs and workspace belong to the caller.

A name of its own, since two overloads of one name cannot be declared again. It returns nothing: what it writes is in
its schema. No autograd and no autocast stand in front of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import Library

from shiplap.errors import ShiplapError, error
from shiplap.op import registry
from shiplap.op.binding import Binding, shape_of
from shiplap.op.explain import explain
from shiplap.op.launch import check_sharing, fit_outputs, workspace_size
from shiplap.op.schema import schema
from shiplap.op.spec import OpSpec

if TYPE_CHECKING:
    from shiplap.op.op import Op

__all__ = ["OutVariant", "WithOut", "has_out", "out_name", "out_schema", "scratch_name"]

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


class WithOut:
    """The part of ``Op`` for callers that own the memory: ``out`` and ``workspace_bytes``."""

    variant: OutVariant | None = None

    def out(self, *args: Any, out: Any, workspace: Tensor | None = None, **kwargs: Any) -> Any:
        """Run into ``out``, a contiguous tensor or one for each output, and return it; nothing is allocated for it.

        ``workspace`` is uint8 scratch of at least ``workspace_bytes(...)`` bytes, aligned to 64; without it, it is
        allocated as ever. Arguments that a kernel wants contiguous and are not are still copied. No gradient is
        recorded; native code serves where gradients are off, under ``torch.no_grad()`` or ``torch.inference_mode()``.

        Raises:
            ArgumentError: SL210, SL212 or SL213 for tensors that overlap, do not fit or are too small.
            KernelError: SL304 when a gradient is asked for.
            TypeError: the op's outputs have data-dependent sizes, or it has none.
        """
        if self.variant is None:
            raise TypeError(f"{self!r} has no out-variant: no outputs, sizes that depend on data, or an adopted op")
        return self.variant(args, kwargs, out, workspace)

    def workspace_bytes(self, *args: Any, **kwargs: Any) -> int:
        """Bytes of workspace that the kernel asks for which takes these arguments, 0 for one without."""
        op: Any = self
        kernel = op.pick(call := bound(op, args, kwargs))
        return workspace_size(getattr(kernel and kernel.run, "workspace", None), call)


def bound(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Binding:
    """The checked call, whichever arguments come by name."""
    if kwargs:
        args = (*args, *(kwargs.get(a.name, a.default) for a in op.spec.args[len(args) :]))
    return (op._bind and op._bind(*args)) or op.bind(args)


class OutVariant:
    """The registered out-variant of a declared op."""

    def __init__(self, op: Op, library: Library) -> None:
        self.op, self.spec = op, op.spec
        self.scratch, self.names = scratch_name(self.spec), tuple(o.name for o in self.spec.outputs)
        name = out_name(self.spec)
        tags = [torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides]
        if marked := getattr(torch.Tag, "out_variant", None):  # since 2.13
            tags.append(marked)
        library.define(out_schema(self.spec), tags=tuple(tags))
        library.impl(name, self.execute, "CompositeExplicitAutograd")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # execute and native code see to gradients
        torch.library.register_fake(f"{self.spec.namespace}::{name}", self._fake, lib=library)
        self.overload = getattr(getattr(torch.ops, self.spec.namespace), name).default

    def __call__(self, args: tuple[Any, ...], keywords: dict[str, Any], out: Any, workspace: Tensor | None) -> Any:
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
            outs = [keywords.pop(name) for name in self.names]
            keywords.pop(self.scratch, None)
            self._explain(args, keywords, outs, workspace, e)
            raise
        return out

    def _several(self, out: Any) -> tuple[Tensor, ...]:
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

    def _explain(self, args: Any, kwargs: Any, outs: Sequence[Tensor], workspace: Any, cause: Exception) -> None:
        """Raise what the checks in Python say of a call that native code or the dispatcher refused; else return."""
        if isinstance(cause, ShiplapError):
            return
        op: Any = self.op
        explain(op._checker, op.__signature__, args, kwargs, TypeError())  # the arguments come first
        call = bound(op, args, kwargs)
        self._check(call, outs, workspace)
        self._check_workspace(call, workspace, self._needs(op.pick(call)))
        explain(op._checker, op.__signature__, args, kwargs, cause)

    def execute(self, *args: Any, **kwargs: Any) -> None:
        """The real implementation where no native code serves."""
        op: Any = self.op
        outs = tuple([kwargs.pop(o.name) for o in self.spec.outputs])
        scratch = kwargs.pop(self.scratch, None)
        call = bound(op, args, kwargs)
        self._check(call, outs, scratch)
        kernel = op.pick(call)
        self._check_workspace(call, scratch, self._needs(kernel))
        with torch.no_grad():
            if kernel is not None and hasattr(kernel.run, "into"):
                kernel.run.into(call, outs, scratch)
                return
            made = kernel.run(call) if kernel else fit_outputs(self.spec, call, op.run_reference(call.args))
            for out, value in zip(outs, made, strict=True):
                out.copy_(value)

    def _fake(self, *args: Any, **kwargs: Any) -> None:
        registry.ensure()
        outs = tuple(kwargs.pop(o.name) for o in self.spec.outputs)
        scratch = kwargs.pop(self.scratch, None)
        full = (*args, *(kwargs.get(a.name, a.default) for a in self.spec.args[len(args) :]))
        call = self.op.bind(full)
        self._fit(call, outs)
        if scratch is not None:
            self._check_bytes(call, scratch)

    @staticmethod
    def _needs(kernel: Any) -> Any:
        return getattr(kernel and kernel.run, "workspace", None)

    def _fit(self, call: Binding, outs: Sequence[Tensor]) -> None:
        for output, tensor in zip(self.spec.outputs, outs, strict=True):
            self._fits(call, output.name, tensor, shape_of(output, call.env), call.dtype_of(output.tensor))

    def _check(self, call: Binding, outs: Sequence[Tensor], scratch: Tensor | None) -> None:
        """The outputs are of the declared kind, each in memory of its own, and no gradient is asked for."""
        spec = self.spec
        self._fit(call, outs)
        arguments = [(a.name, v) for a, v in zip(spec.args, call.args, strict=True) if a.tensor is not None]
        tensors = [(n, t) for n, v in arguments for t in (v if isinstance(v, (list, tuple)) else [v]) if t is not None]
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

    def _fits(self, call: Binding, name: str, tensor: Tensor, shape: list[Any], dtype: torch.dtype) -> None:
        where = f"{self.spec.name}, output {name!r}"
        if not isinstance(tensor, Tensor) or tensor.dtype != dtype or tensor.device != call.device:
            got = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise error("SL212", where=where, got=got, expected=f"{dtype} on {call.device}")
        sizes = list(tensor.shape)
        if len(sizes) != len(shape) or any(a != b for a, b in zip(sizes, shape, strict=True)):
            raise error("SL212", where=where, got=f"shape {tuple(sizes)}", expected=f"shape {tuple(shape)}")
        if not tensor.is_contiguous():
            raise error("SL212", where=where, got=f"strides {tuple(tensor.stride())}", expected="a contiguous tensor")

    def _check_workspace(self, call: Binding, scratch: Tensor | None, expr: Any) -> None:
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
