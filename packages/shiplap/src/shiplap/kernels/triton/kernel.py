"""The kernel behind ``sl.triton(kernel, grid=...)``. Generated C++ launches its plain Triton functions.

Triton launches the first calls from Python. Once the binding of the op is attached, the generated C++ computes grid and
arguments and launches through the CUDA driver. It calls Triton's compiler once for each form that is missing. If the
environment variable ``TRITON_INTERPRET`` is 1, Triton's interpreter runs the same launches on the CPU, where audits can
be made.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shiplap.codegen.launcher import WORD, WORKSPACE, Cubin, KernelLaunch, KernelParameter, WorkspaceFill, WorkspaceSort
from shiplap.declare.binding import Binding, declared_output_shape
from shiplap.declare.config import Values
from shiplap.declare.kernel import Kernel, KernelTerms
from shiplap.declare.spec import OpSpec, Output
from shiplap.declare.values import Args
from shiplap.dispatch import Op, registry, tuned_choices
from shiplap.dispatch.launch import is_current_device, workspace_size
from shiplap.errors import ShiplapError, error, notice
from shiplap.kernels.c.declaration import CFunctionKernel
from shiplap.kernels.native import binding as native
from shiplap.kernels.native import prebuilt
from shiplap.kernels.native.packed_kernel import Extents
from shiplap.kernels.triton.interpreter_budget import measure_launch_time
from shiplap.kernels.triton.launcher import triton_launcher
from shiplap.kernels.triton.program import OPTIONS
from shiplap.kernels.triton.specializations import LaunchedForm, ProgramSource
from shiplap.kernels.triton.specialize import (
    LaunchNumbers,
    device_architecture,
    specialization_key,
    why_form_unfit,
    with_constants,
)
from shiplap.torch_private.triton_internals import correct_interpreted_casts


@dataclass(frozen=True)
class PlainLaunch:
    """A call that is a single launch of one kernel.

    Attributes:
        kernel: the ``@triton.jit`` function.
        grid: the launch grid.
        tensors: the argument or output for each parameter that is a tensor.
        values: numbers and compile-time values by parameter.
        options: Triton's options, such as ``num_warps``.
        strided: the arguments that may have any strides. All others are contiguous.
    """

    kernel: Any
    grid: tuple[int, ...]
    tensors: dict[str, str]
    values: dict[str, object]
    options: dict[str, Any]
    strided: frozenset[str]


class LaunchedKernel(CFunctionKernel):
    """The kernel of a Triton program. Python launches it with the values that the generated C++ would compute.

    Once the generated C++ is attached, Python calls that. If the package of the op has a binding, it is attached at the
    first call. Triton's own launcher, which compiles C, is then not needed.
    """

    compiles = True
    native: LaunchedForm

    def __init__(self, spec: OpSpec, terms: KernelTerms, source: ProgramSource) -> None:
        """Bind the program ``source`` to the declaration. Raise ``SL619`` for a device other than CUDA, unless it is
        the CPU and Triton's interpreter runs the kernels.
        """
        names = terms.space.names if terms.space is not None else ()
        # A C name, unique among the ops of one library.
        symbol = re.sub(r"\W", "_", f"{spec.namespace}_{spec.opname}_{terms.name}_launches")
        super().__init__(spec, terms, LaunchedForm(spec, symbol, source, names))
        self.function, self.interpreted = source.function, source.interpreted
        self.config_values: dict[str, Any] = {}
        self._function: tuple[ctypes.CDLL, Callable[..., int]] | None = None
        if terms.device not in ("cuda", "cpu") or (terms.device == "cpu" and not self.interpreted):
            raise error(
                "SL619",
                where=f"{spec.name}, kernel {terms.name}",
                got=f"the device {terms.device!r}",
                expected='"cuda"; the CPU runs Triton kernels where TRITON_INTERPRET=1 was set before the import',
                fix=f'bind the kernel with {spec.opname}.kernel("cuda", ...)',
            )
        if self.interpreted:
            self.native.settle("Triton's interpreter runs the kernel")

    def configure(self, values: Values) -> None:
        """Use ``values``, the tuning parameters of a config by name, as compile-time values of later launches."""
        super().configure(values)
        self.config_values = dict(values)

    def invoke_function(
        self, call: Binding, tensors: Sequence[Tensor | None], extents: Extents, scratch: Tensor | None
    ) -> None:
        """Run the declared steps (launches, fills, sorts) on ``tensors``, which are the inputs and then the outputs.
        Generated C++ runs them if it is attached. Otherwise each launch is made through Triton. ``scratch`` is the
        workspace.
        """
        if self.native.counting and not self.native.calls and not self.interpreted:
            self._attach_prebuilt(call, tensors, scratch)
        if self.native.bindings:
            self.call_function(self._generated_function(self.native.bindings[-1]), call, tensors, extents, scratch)
            return
        numbers = self._numbers(call, *tensors)
        if self.native.given.errors is not None:
            # Raises the error of an earlier launch before this one.
            numbers[WORD] = self.native.given.errors.word(call.device)
        numbers[WORKSPACE] = scratch.data_ptr() if scratch is not None else 0
        if is_current_device(call.device):
            self._launch(numbers, scratch)
            return
        with torch.cuda.device(call.device):
            self._launch(numbers, scratch)

    def _attach_prebuilt(self, call: Binding, tensors: Sequence[Tensor | None], scratch: Tensor | None) -> None:
        """Attach the generated C++ that came with the package of the op. Do nothing if there is none.

        Every compiled kernel that this call needs is loaded from the package, or compiled by Triton. If one of them
        cannot be compiled, issue a notice, and calls stay with launches from Python. ``tensors`` and the workspace
        ``scratch`` are those of the call.
        """
        op = registry.find_declared_op(self.spec.name)
        if op is None or prebuilt.find_prebuilt_library(op)[0] is None:
            return
        numbers, form = self._numbers(call, *tensors), self.native
        address = scratch.data_ptr() if scratch is not None else 0
        try:
            for number, launch in form.taken(numbers):
                form.compile(
                    number,
                    device_architecture(call.device),
                    specialization_key(launch, numbers, self.config_values, address),
                )
        except ShiplapError as e:  # what only the compiler finds out
            form.settle(f"{e.id}: {e.what}, {e.got}")
            notice(f"native {form.why}", f"{self.spec.name} stays with launches from Python: {form.why}")
        else:
            native.attach_installed_library(op)

    def _generated_function(self, binding: ctypes.CDLL) -> Callable[..., int]:
        """Return the C++ function of the kernel in the library ``binding``, with the ctypes of its parameters set."""
        if self._function is None or self._function[0] is not binding:
            self._function = binding, self.typed(binding[self.native.symbol])
        return self._function[1]

    def compile(self, call: Binding) -> None:
        """Compile the Triton kernels that ``call`` launches from Python, without launching them. Meta tensors take the
        place of outputs and workspace. Do nothing if Triton's interpreter runs the kernels.
        """
        if self.interpreted:
            return
        numbers = self._numbers(call, *self._stand_ins(call))
        scratch = torch.empty(workspace_size(self.workspace, call), dtype=torch.uint8, device="meta")
        with nullcontext() if is_current_device(call.device) else torch.cuda.device(call.device):
            for number, launch in self.native.taken(numbers):
                grid, values, options = self._arguments(number, launch, numbers, scratch)
                if 0 not in grid:
                    _make_launcher(self.native.declared[number].kernel).compile(grid, *values, **options)

    def plain_launch(self, call: Binding) -> PlainLaunch | None:
        """Return the launch of ``call`` as data for Inductor. Return None unless the kernel is a single launch with one
        output, all tensors present and none written to. Configs, a workspace, a condition and late errors also make it
        None.
        """
        form = self.native
        if (
            self.space is not None
            or self.workspace is not None
            or len(self.spec.outputs) != 1
            or self.why_refused(call)
        ):
            return None
        if len(form.program.steps) != 1 or form.program.late or form.given.late:
            return None
        numbers, (launch,) = self._numbers(call, *self._stand_ins(call)), form.launches
        absent = any(p.kind == "tensor" and numbers.tensors[p.source] is None for p in launch.parameters)
        if launch.when is not None or absent or any(a.mutated for a in self.spec.args):
            return None
        own = with_constants(launch, numbers, self.config_values)
        parts = [(p.name, p.source) for p in launch.parameters if p.kind == "tensor"]
        values = {p.name: self._value(p, own, None) for p in launch.parameters if p.kind != "tensor"}
        options = {k: v for k, v in form.declared[0].constants.items() if k in OPTIONS}
        grid = tuple([int(expr(own)) for expr in launch.grid])
        return PlainLaunch(form.declared[0].kernel, grid, dict(parts), values, options, form.strided)

    def _launch(self, numbers: LaunchNumbers, scratch: Tensor | None) -> None:
        """Run the declared steps whose conditions hold for ``numbers``, in order. Steps are launches, and fills and
        sorts of the workspace ``scratch``. ``numbers`` holds the sizes and scalars of a call.
        """
        form, number = self.native, -1
        for step in form.program.steps:
            # A launch that is left out counts as well: the number is its place in the program.
            number += isinstance(step, KernelLaunch)
            if step.when is not None and not step.when(numbers):
                continue
            match step:
                case KernelLaunch():
                    self._launch_one(number, step, numbers, scratch)
                case WorkspaceFill():
                    start, size = [int(expr(numbers)) for expr in step.exprs]
                    if size:
                        assert scratch is not None
                        scratch[start : start + size].fill_(step.byte)
                case WorkspaceSort():
                    assert scratch is not None
                    _sort_workspace(step, numbers, scratch)

    def _launch_one(self, number: int, launch: KernelLaunch, numbers: LaunchNumbers, scratch: Tensor | None) -> None:
        """Run ``launch`` unless its grid is empty. ``number`` is its index among the launches of the kernel,
        ``numbers`` are the sizes and scalars of the call, and ``scratch`` is the workspace, or None if there is none.

        If the compiled kernel needs something that generated C++ cannot provide, pass the reason to
        ``self.native.settle``. Python then makes the launches of all later calls.
        """
        declared = self.native.declared[number]
        grid, values, options = self._arguments(number, launch, numbers, scratch)
        if 0 in grid:
            return
        if self.interpreted:
            with measure_launch_time(declared.kernel, grid), correct_interpreted_casts():
                declared.kernel[grid](*values, **options)
            return
        compiled = _make_launcher(declared.kernel)[grid](*values, **options)
        # Only a compiled kernel says what it needs.
        if self.native.counting and (why := why_form_unfit(compiled.metadata)):
            self.native.settle(f"Triton kernel {declared.name} needs {why}")

    def _arguments(
        self, number: int, launch: KernelLaunch, numbers: LaunchNumbers, scratch: Tensor | None
    ) -> tuple[tuple[int, ...], list[object], dict[str, Any]]:
        """Return the grid of ``launch``, the arguments in the order of the kernel's parameters, and Triton's options
        such as ``num_warps``. If a size of the grid is 0, the list of arguments is empty. ``number`` is the position of
        the launch in the kernel's program. ``numbers`` are the sizes and scalars of the call, and ``scratch`` is the
        workspace, or None if there is none.
        """
        own = with_constants(launch, numbers, self.config_values)
        grid = tuple([int(expr(own)) for expr in launch.grid])
        values = [self._value(p, own, scratch) for p in launch.parameters] if 0 not in grid else []
        given = {**self.native.declared[number].constants, **self.config_values}
        return grid, values, {k: v for k, v in given.items() if k in OPTIONS}

    def _value(self, p: KernelParameter, own: LaunchNumbers, scratch: Tensor | None) -> object:
        """Return the value of the kernel's parameter ``p`` for a launch. It is a tensor, the workspace ``scratch`` from
        an offset on, a number from ``own``, or a compile-time value.
        """
        match p.kind:
            case "constant":
                return p.value
            case "config" | "computed":
                return own[p.name]
            case "tensor":
                return own.tensors[p.source]
            case "scratch":
                return _workspace_part(scratch, p, own)
            case "integer":
                assert p.expr is not None
                return int(p.expr(own))
        value: Any = own[p.source] if p.value is None else p.value
        if p.kind == "boolean":  # of which Triton's interpreter makes no tensor
            return int(value) if self.interpreted else bool(value)
        return value

    def _numbers(self, call: Binding, *tensors: Tensor | None) -> LaunchNumbers:
        """Return a mapping from name to value for the expressions of the declared steps. The values are the sizes and
        scalars of ``call``, properties of ``tensors`` such as strides, and the integers that the author named.
        ``tensors`` are the inputs followed by the outputs.
        """
        names = [*(a.name for a in self.spec.tensors), *(o.name for o in self.spec.outputs)]
        numbers = LaunchNumbers(call.env, dict(zip(names, tensors, strict=True)))
        numbers[WORD] = numbers[WORKSPACE] = 0  # for a key, which they are not in
        # In order: a later value may use the ones before it.
        for name, expr in self.native.program.values:
            numbers[name] = int(expr(numbers))
        return numbers

    def _stand_ins(self, call: Binding) -> list[Tensor | None]:
        """Return tensors from which a launch can be compiled without running it. They are the inputs of ``call``,
        copied if the kernel needs that, and meta tensors in place of its outputs. An optional input that was not passed
        is None.
        """
        inputs, _ = self._pack(call.args)
        return [*inputs, *(_stand_in_tensor(output, call) for output in self.spec.outputs)]

    def compile_for(self, call: Binding, target: int) -> list[Cubin]:
        """Return the compiled kernels for the launches of ``call`` on the architecture ``target``, such as 90 for
        compute capability 9.0. The tensors may be on any device.

        The address of the workspace, if there is one, is assumed to be aligned, as PyTorch's allocator aligns it.
        """
        # Nothing is run, so outputs need no memory.
        numbers, form = self._numbers(call, *self._stand_ins(call)), self.native
        keys = [
            (number, specialization_key(launch, numbers, self.config_values)) for number, launch in form.taken(numbers)
        ]
        return [form.compile(number, target, key) for number, key in keys]


def compile_ahead(op: Op, calls: Iterable[Args], architectures: Iterable[int]) -> None:
    """Compile the Triton kernels of ``op`` for the dtypes, alignments and sizes of ``calls``, so that ``deploy`` puts
    them into its library. The GPUs need not be in this machine.

    Args:
        op: an op with a kernel of :func:`triton` for CUDA.
        calls: arguments like those of the program, on any device. Their sizes, dtypes and strides matter, but not their
            values. Triton compiles multiples of 16, the number 1 and addresses that are multiples of 16 specially.
        architectures: GPU architectures, such as 90 for compute capability 9.0.

    Raises:
        LaunchError: ``SL619`` for a kernel that no generated launch can run, ``SL620`` for an op without a kernel of
            :func:`triton`.
        ArgumentError: ``SL201`` to ``SL210`` if arguments do not fit the declaration.
    """
    if not launched_kernels(op):
        raise error("SL620", where=op.spec.name, got="no sl.triton kernel for CUDA", expected="a kernel of sl.triton")
    for args in calls:
        compile_call(op, op.bind(op.spec.complete(args)), architectures)


def launched_kernels(op: Op) -> list[LaunchedKernel]:
    """Return the kernels of :func:`triton` that ``op`` has for CUDA, in order."""
    return [k for k in op.kernels.get("cuda", ()) if isinstance(k, LaunchedKernel)]


def compile_call(op: Op, call: Binding, architectures: Iterable[int], others: Iterable[Kernel] = ()) -> None:
    """Compile, for each of ``architectures``, the Triton kernels that ``call``, a checked call of ``op``, launches.
    They are compiled with the default config, with the config that tuning has chosen for the call, and with those of
    the kernels ``others``.
    """
    targets, more = tuple(architectures), set(others)
    # The config that a call runs with now is packed as well as the default.
    chosen = tuned_choices.resolved_choices(op).get(("cuda", *op.rule.key(call)))
    for kernel in launched_kernels(op):
        mine = isinstance(chosen, LaunchedKernel) and chosen.name == kernel.name
        asked = {kernel.variant_for_call(call), chosen if mine else None, *(k for k in more if k.name == kernel.name)}
        for variant, target in product([v for v in asked if isinstance(v, LaunchedKernel)], targets):
            variant.compile_for(call, target)


@cache
def _make_launcher(kernel: Any) -> Any:
    """Return the launcher of a Triton kernel, one object for each kernel. If Triton's interpreter runs the kernel,
    return the kernel itself.
    """
    return kernel if type(kernel).__name__ == "InterpretedFunction" else triton_launcher(kernel)


def _sort_workspace(step: WorkspaceSort, numbers: LaunchNumbers, scratch: Tensor) -> None:
    """Sort integers in the workspace ``scratch`` as ``step`` describes, and write the sorted integers and their earlier
    positions into it. ``numbers`` has the values of the names in the step. In generated C++, ``sort_in_workspace`` does
    this.
    """
    bits, count, keys, values, rows = [int(expr(numbers)) for expr in step.exprs]
    dtype = {16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    if count:
        size = count * dtype.itemsize
        given, sorted_keys = (scratch[at : at + size].view(dtype) for at in (keys, values))
        torch.sort(given, stable=True, out=(sorted_keys, scratch[rows : rows + 8 * count].view(torch.int64)))


def _workspace_part(scratch: Tensor | None, p: KernelParameter, own: LaunchNumbers) -> Tensor:
    """Return the bytes of the workspace ``scratch`` from the offset of the parameter ``p`` to the end, as a tensor of
    the parameter's dtype. ``own`` has the numbers from which the offset is computed.
    """
    assert scratch is not None
    assert p.expr is not None
    dtype: torch.dtype = getattr(torch, p.source)
    rest = scratch[int(p.expr(own)) :]
    # A view as another dtype needs a whole number of its elements.
    return rest[: rest.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _stand_in_tensor(output: Output, call: Binding) -> Tensor:
    """Return a meta tensor of the shape and dtype of an output. Its address 0 counts as aligned, as are addresses of
    PyTorch's allocator.
    """
    return torch.empty(declared_output_shape(output, call.env), dtype=call.dtype_of(output.tensor), device="meta")
