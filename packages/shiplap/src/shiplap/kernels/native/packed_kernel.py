"""``PackedKernel``: the base of kernels in native code, with packed arguments, outputs, workspace and bounds."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from shiplap.cached_property import cached_property
from shiplap.codegen import c_prototype
from shiplap.codegen.native import NativeOp
from shiplap.declare.binding import Binding, declared_output_shape
from shiplap.declare.bucket import read_bucket_rule
from shiplap.declare.kernel import Kernel, KernelTerms
from shiplap.declare.native_interface import NativeForm
from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Args, Outputs
from shiplap.dispatch.launch import allocate_workspace
from shiplap.dispatch.outputs import check_bound, empty_outputs
from shiplap.kernels.native import binding as native
from shiplap.plan.expression import TensorPlace
from shiplap.plan.packing import Packed, compile_packing
from shiplap.plan.rules import is_aligned

Extents: TypeAlias = dict[str, ctypes.c_int64]  # data-dependent dims, as the kernel reports them


class PackedKernel(Kernel):
    """The Python binding of a function that native code can call.

    Everything that does not depend on the call is computed once, for all configs.
    """

    by_python = False  # native code can take over, and goes along in a package
    native: NativeForm

    def __init__(self, spec: OpSpec, terms: KernelTerms, form: NativeForm) -> None:
        super().__init__(spec, terms)
        self.native, self.parameters, self.where = form, c_prototype(spec), f"{spec.name}, kernel {form.symbol}"

    @abstractmethod
    def invoke_function(
        self, call: Binding, tensors: Sequence[Tensor | None], extents: Extents, scratch: Tensor | None
    ) -> None:
        """Run the kernel on packed inputs, then outputs. It stores data-dependent sizes in ``extents``."""

    @property
    def stays_in_python(self) -> bool:
        return not self.native.counting and bool(self.native.why)

    def run_call(self, call: Binding) -> Outputs:
        """Allocate outputs, at their bounds where their sizes depend on data, run the kernel and narrow them."""
        spec = self.spec
        if not spec.bounds:
            outs = empty_outputs(spec, call)
            self._run(call, outs, {}, None)
            return outs
        env = {**call.env, **{dim: bound(call.env) for dim, bound in spec.bounds}}
        outs = empty_outputs(spec, replace(call, env=env))
        extents = {dim: ctypes.c_int64(0) for dim in spec.dynamic}
        self._run(call, outs, extents, None)
        return self._narrow(call, outs, extents)

    def run_into(self, call: Binding, outs: Sequence[Tensor], scratch: Tensor | None) -> None:
        """Fill ``outs``, of fixed sizes, with the caller's workspace if one is given."""
        if self.native.align > 1:
            for output, tensor in zip(self.spec.outputs, outs, strict=True):
                at = TensorPlace(self.spec.name, output.name, role="output")
                is_aligned(at, self.native.align, output=True).check_call({at.tensor.python: tensor})
        self._run(call, outs, {}, scratch)

    def why_not_packaged(self, call: Binding) -> str:
        """Return the reason why a package cannot hold the kernel: no equivalent in C++, or a decision of Python.

        Empty if it can.
        """
        if self.supports is not None:
            return f"{self.name}, whose supports= is asked by Python on {self.device}"
        form, rule = self.native, read_bucket_rule(self.spec)
        described = NativeOp(
            self.spec,
            form.symbol,
            (),
            self.device,
            self.workspace,
            form.strided,
            self.dtypes,
            space=self.space,
            rule=rule,
            align=form.align,
        )
        if why := described.unfit:
            return f"{self.name}, called by Python on {self.device} because of {why}"
        if why := self.why_refused(call):
            return f"{self.name} does not take this call, which Python would run on {self.device}: {why}"
        return ""

    def _run(self, call: Binding, outs: Sequence[Tensor], extents: Extents, scratch: Tensor | None) -> None:
        """Run the kernel on packed inputs, and write mutated copies back."""
        inputs, copies = self._pack(call.args)
        if scratch is None and self.workspace is not None:
            scratch = allocate_workspace(self.workspace, call)
        self.invoke_function(call, [*inputs, *outs], extents, scratch)
        for target, copy in copies:
            target.copy_(copy)
        if self.native.counting:
            native.count_python_call(self.spec, self.native)

    @cached_property
    def _pack(self) -> Callable[[Args], Packed]:
        """The function that packs arguments: tensors in order, copied where they are not contiguous or aligned."""
        return compile_packing(self.spec, self.native.strided, self.native.align)

    def _narrow(self, call: Binding, outs: Outputs, extents: Extents) -> Outputs:
        """Cut outputs from their bound to the filled part. An output that is at most half full is copied, which frees
        its memory."""
        env = dict(call.env)
        for dim, extent in extents.items():
            env[dim] = extent.value
            check_bound(self.spec, self.where, dim, extent.value, env)
        narrowed = []
        for out, full in zip(self.spec.outputs, outs, strict=True):
            shape = declared_output_shape(out, env)
            part = full[tuple(slice(0, size) for size in shape)]
            keep = part.is_contiguous() and 2 * part.numel() > full.numel()
            narrowed.append(part if keep else part.clone(memory_format=torch.contiguous_format))
        return tuple(narrowed)
