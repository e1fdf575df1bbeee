"""``PackedKernel``, the base of kernels in native code, with packed arguments, outputs, workspace and bounds."""

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
    """The Python binding of a kernel that native code can call, too. The packing of its arguments does not depend on
    the call, so it is generated once and used for all configs.
    """

    by_python = False  # native code can take over, and goes along in a package
    native: NativeForm

    def __init__(self, spec: OpSpec, terms: KernelTerms, form: NativeForm) -> None:
        """Bind the native function ``form`` to the op declared as ``spec``."""
        super().__init__(spec, terms)
        self.native, self.parameters, self.where = form, c_prototype(spec), f"{spec.name}, kernel {form.symbol}"

    @abstractmethod
    def invoke_function(
        self, call: Binding, tensors: Sequence[Tensor | None], extents: Extents, scratch: Tensor | None
    ) -> None:
        """Run the kernel on ``tensors``, the inputs followed by the outputs. The inputs already have the layout that
        the kernel needs. The kernel stores data-dependent sizes in ``extents``, by name of the dim. ``scratch`` is its
        workspace, or None if it has none.
        """

    @property
    def stays_in_python(self) -> bool:
        """Whether it is certain that generated C++ will never run the calls of this kernel. Such calls need not be
        counted.
        """
        return not self.native.counting and bool(self.native.why)

    def run_call(self, call: Binding) -> Outputs:
        """Return the outputs of a call, filled by the kernel. An output whose size depends on data is allocated at its
        upper bound, then cut to the size that the kernel reports. Raise ``SL302`` if that size is above the bound.
        """
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
        """Run the kernel on the inputs of ``call`` and fill ``outs``, outputs of fixed sizes. ``scratch`` is the
        workspace. If it is None, a workspace is allocated if the kernel needs one. Raise ``SL212`` if an output is not
        aligned as the kernel needs.
        """
        if self.native.align > 1:
            for output, tensor in zip(self.spec.outputs, outs, strict=True):
                at = TensorPlace(self.spec.name, output.name, role="output")
                # An input would be copied; what the caller passes as output must be written itself.
                is_aligned(at, self.native.align, output=True).check_call({at.tensor.python: tensor})
        self._run(call, outs, {}, scratch)

    def why_not_packaged(self, call: Binding) -> str:
        """Return the reason why a package without Python cannot hold the kernel for ``call``, or an empty string if it
        can.
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
        """Run the kernel into ``outs`` on the inputs of ``call``. ``scratch`` is the workspace. If it is None, a
        workspace is allocated if the kernel needs one. ``extents`` receives the data-dependent sizes. An input is
        copied first if the kernel does not accept its layout or alignment. If the op changes such an input, the copy is
        written back.
        """
        inputs, copies = self._pack(call.args)
        if scratch is None and self.workspace is not None:
            scratch = allocate_workspace(self.workspace, call)
        self.invoke_function(call, [*inputs, *outs], extents, scratch)
        # A mutated argument that was packed gets its values back.
        for target, copy in copies:
            target.copy_(copy)
        if self.native.counting:
            native.count_python_call(self.spec, self.native)

    @cached_property
    def _pack(self) -> Callable[[Args], Packed]:
        """The generated function that prepares the tensor arguments for the kernel. It returns them in order, and pairs
        of a tensor and the copy that must be written back to it. Tensors that are not contiguous or not aligned as
        needed are copied.
        """
        return compile_packing(self.spec, self.native.strided, self.native.align)

    def _narrow(self, call: Binding, outs: Outputs, extents: Extents) -> Outputs:
        """Return outputs cut from their upper bounds to the sizes that the kernel reported in ``extents``. An output of
        which at most half is left is copied, which frees its memory. Raise ``SL302`` if a size is above its bound.
        """
        env = dict(call.env)
        for dim, extent in extents.items():
            env[dim] = extent.value
            # A kernel that reports more than its bound has written beyond the output.
            check_bound(self.spec, self.where, dim, extent.value, env)
        narrowed = []
        for out, full in zip(self.spec.outputs, outs, strict=True):
            shape = declared_output_shape(out, env)
            part = full[tuple(slice(0, size) for size in shape)]
            keep = part.is_contiguous() and 2 * part.numel() > full.numel()
            narrowed.append(part if keep else part.clone(memory_format=torch.contiguous_format))
        return tuple(narrowed)
