"""``OutputPlan``, the steps for the outputs and the workspace of a call, which are allocated here or passed by the
caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor

from shiplap.cached_property import cached_property
from shiplap.declare.binding import Binding
from shiplap.declare.spec import OpSpec, Output
from shiplap.declare.values import Args, EnvValue, Outputs
from shiplap.plan import rules
from shiplap.plan.build import steps_around, try_expression
from shiplap.plan.expression import Expression, TensorPlace, VariableNames, argument_variable, shared_variable
from shiplap.plan.python_source import PythonWriter, compile_function
from shiplap.plan.rule import ArgumentRule
from shiplap.plan.steps import AllocateStep, Block, CheckStep, LetStep, PresentStep, Step, VariableType
from shiplap.plan.values import Scope

SCRATCH_VARIABLE = "scratch"  # the variable of the workspace

Allocator: TypeAlias = Callable[[Mapping[str, EnvValue], Mapping[str, torch.dtype], torch.device], Outputs]
OutputsCheck: TypeAlias = Callable[[Binding, Args], None]
MemoryCheck: TypeAlias = Callable[[Binding, Sequence[Tensor], Tensor | None], None]
ScratchCheck: TypeAlias = Callable[[Binding, Tensor], None]
RoomCheck: TypeAlias = Callable[[Binding, Tensor, int], None]


def scratch_name(spec: OpSpec) -> str:
    """Return the name of the workspace argument of an op. It is ``workspace``, with underscores appended until it
    differs from the op's arguments and outputs.
    """
    name = "workspace"
    # An op may have an argument called workspace.
    while name in {a.name for a in spec.args} | {o.name for o in spec.outputs}:
        name += "_"
    return name


class OutputPlan:
    """The steps and rules for the outputs and the workspace of the calls of one declaration.

    Attributes:
        bounds: the steps that set each data-dependent dim to its bound.
        measured: the steps that compute the sizes declared as expressions, such as ``n // 2``.
        fitting: the checks of an output that the caller passes.
        disjoint: the checks that outputs and workspace share no memory with other tensors.
        scratch: the check of the dtype, shape and device of a workspace that the caller passes.
        room: the checks of the size and the address of that workspace.
    """

    def __init__(self, spec: OpSpec, names: VariableNames) -> None:
        """Store the declaration, the names of its variables, and the place of each output in generated code."""
        self.spec, self.names = spec, names
        self.places = {o.name: TensorPlace(spec.name, o.name, role="output") for o in spec.outputs}

    @cached_property
    def bounds(self) -> Block:
        """The steps that set each dim whose size depends on data to its declared upper bound. The outputs are allocated
        at this size.
        """
        checks: list[Step] = []
        for dim, expr in self.spec.bounds:
            steps, term = try_expression(self.spec, self.names, f"v_bound_{dim}", VariableType.SIZE, expr)
            # The outputs are allocated at these sizes and cut afterwards.
            checks += [*steps, LetStep(self.names(dim), VariableType.SIZE, term)]
        return tuple(checks)

    @cached_property
    def measured(self) -> Block:
        """The steps that compute those sizes of the outputs that are declared as expressions such as ``n // 2``, and
        check that they are not negative.
        """
        return tuple(step for o in self.spec.outputs for step in self._measured(o))

    def _measured(self, out: Output) -> list[Step]:
        """Return the steps that compute those sizes of ``out`` that are expressions, and check that none is negative.
        They set the variables ``e_<output>_<axis>``.
        """
        checks: list[Step] = []
        for axis, dim in enumerate(out.tensor.dims):
            if dim.expr is not None:
                name = f"e_{out.name}_{axis}"
                steps, term = try_expression(self.spec, self.names, name, VariableType.SIZE, dim.expr)
                # An expression that cannot fail still gets a variable, to which the check below refers.
                checks += steps or (LetStep(name, VariableType.SIZE, term),)
                checks.append(
                    CheckStep(rules.output_size_is_valid(self.places[out.name], dim.text, shared_variable(name)))
                )
        return checks

    def shape(self, out: Output) -> Expression:
        """Return the expression for the shape of an output. It is a tuple in Python and a braced list in C++."""
        python, cpp = [], []
        for axis, dim in enumerate(out.tensor.dims):
            name = self.names(dim.text)
            size = f"e_{out.name}_{axis}" if dim.expr else str(dim.size) if dim.kind == "fixed" else name
            python.append(f"*{size}, " if dim.kind == "variadic" else f"{size}, ")
            cpp.append(f"int64_t{{{size}}}" if dim.kind == "fixed" else size)
        return Expression(f"({''.join(python)})", f"{{{', '.join(cpp)}}}")

    def dtype(self, out: Output) -> Expression:
        """Return the expression for the dtype of an output in a call. It is the declared dtype if there is only one.
        Otherwise it is that of the output's dtype class, the group of tensors that have the same dtype.
        """
        return rules.wanted_dtype(out.name, out.tensor.dtype_class, out.tensor.dtypes)

    @cached_property
    def allocated(self) -> Block:
        """The steps that allocate each output with its computed shape and dtype."""
        return tuple(AllocateStep(self.places[o.name], self.shape(o), self.dtype(o)) for o in self.spec.outputs)

    @cached_property
    def fitting(self) -> Block:
        """The checks of the dtype, device, shape and contiguity of outputs that the caller passes."""
        steps: list[Step] = []
        for out in self.spec.outputs:
            at, kind = self.places[out.name], out.tensor
            t = at.tensor
            steps += [
                LetStep(f"type_{out.name}", VariableType.DTYPE, Expression("", f"{t.cpp}.dtype()")),
                CheckStep(rules.output_fits_kind(at, self.dtype(out), kind.dtypes[0] if kind.concrete else "")),
                LetStep(f"shape_{out.name}", VariableType.SHAPE, Expression(f"{t.python}.shape", f"{t.cpp}.sizes()")),
                LetStep(f"rank_{out.name}", VariableType.SIZE, Expression("", f"{t.cpp}.dim()")),
                CheckStep(rules.output_fits_shape(at, self.shape(out))),
                # A kernel writes its outputs contiguously.
                CheckStep(rules.is_contiguous(at, "SL212")),
            ]
        return tuple(steps)

    @cached_property
    def disjoint(self) -> Block:
        """The checks that outputs, and the workspace if the caller passes one, share no memory with arguments or with
        each other.
        """
        return self._disjoint(workspace=True)

    def _disjoint(self, *, workspace: bool) -> Block:
        """Return the checks that outputs share no memory with arguments or with each other. If ``workspace`` is true,
        the checks include a workspace that the caller passes. Otherwise they leave it out.
        """
        spec, overlap_rules = self.spec, list[Step]()
        scratch = TensorPlace(spec.name, scratch_name(spec), role="output", variable=SCRATCH_VARIABLE)
        written = [*self.places.values(), *([scratch] if workspace else [])]
        for index, target in enumerate(written):
            steps: list[Step] = []
            for arg in spec.tensors:
                other = TensorPlace(spec.name, arg.name, arg.many)
                steps += steps_around(arg, other, (CheckStep(rules.shares_no_memory(target, other, output=True)),))
            steps += [CheckStep(rules.shares_no_memory(target, other, output=True)) for other in written[:index]]
            # A caller may pass outputs without a workspace.
            overlap_rules += [PresentStep(scratch, tuple(steps))] if target is scratch else steps
        return tuple(overlap_rules)

    @cached_property
    def disjoint_outputs(self) -> Block:
        """The checks that outputs share no memory with arguments or with each other. A workspace is not checked."""
        return self._disjoint(workspace=False)

    @cached_property
    def no_gradient(self) -> ArgumentRule:
        """The rule that no argument, output or workspace of an out-variant requires a gradient while gradients are
        enabled.
        """
        tensors = [argument_variable(a) for a in self.spec.tensors] + [p.tensor.python for p in self.places.values()]
        return rules.out_has_no_gradient(self.spec.name, (*tensors, SCRATCH_VARIABLE))

    @cached_property
    def scratch(self) -> Block:
        """The check that a workspace passed by the caller is a uint8 tensor with one contiguous dim on the device of
        the call.
        """
        return (CheckStep(rules.scratch_fits_kind(self.spec.name, scratch_name(self.spec))),)

    @cached_property
    def room(self) -> Block:
        """The checks that a workspace passed by the caller has at least ``needed`` bytes and begins at an aligned
        address.
        """
        where = self.spec.name, scratch_name(self.spec)
        return CheckStep(rules.scratch_has_room(*where)), CheckStep(rules.scratch_is_aligned(*where))

    # In Python

    @cached_property
    def allocate(self) -> Allocator:
        """The generated function ``allocate(env, dtypes, device)``, which computes the sizes of the outputs and returns
        new contiguous outputs as a tuple. ``env`` must contain the data-dependent dims too.
        """
        # Sizes may be symbols here: the fake implementation allocates by the same function.
        writer = PythonWriter(careful=True)
        writer.write((*self.measured, *self.allocated))
        result = f"    return ({''.join(f'{p.tensor.python}, ' for p in self.places.values())})"
        constants = {
            f"want_{o.name}": getattr(torch, o.tensor.dtypes[0]) for o in self.spec.outputs if o.tensor.concrete
        }
        head = ["def allocate(env, dtypes, device):", *self._sizes(self._computed()), *self._dtypes()]
        made = compile_function(f"allocate {self.spec.name}", "\n".join(head), [result], writer, constants)
        return cast(Allocator, made)

    @cached_property
    def check(self) -> OutputsCheck:
        """The generated function ``check(call, outs)``. It raises ``SL212`` unless the dtype, shape and device of
        ``outs``, the caller's outputs, fit the bound call. Fake tensors are allowed.
        """
        return cast(OutputsCheck, self._section("check", "outs", (*self.measured, *self.fitting)))

    @cached_property
    def check_memory(self) -> MemoryCheck:
        """The generated function ``check_memory(call, outs, scratch)``. It raises ``SL210`` if an output or the
        workspace shares memory with another tensor. It raises ``SL304`` if a tensor requires a gradient while gradients
        are enabled.
        """
        steps = (*self.disjoint, CheckStep(self.no_gradient))
        return cast(MemoryCheck, self._section("check_memory", f"outs, {SCRATCH_VARIABLE}", steps))

    @cached_property
    def check_scratch(self) -> ScratchCheck:
        """The generated function ``check_scratch(call, scratch)``. It raises ``SL213`` unless ``scratch``, the caller's
        workspace, is a uint8 tensor with one contiguous dim on the device of the call.
        """
        return cast(ScratchCheck, self._section("check_scratch", SCRATCH_VARIABLE, self.scratch))

    @cached_property
    def check_room(self) -> RoomCheck:
        """The generated function ``check_room(call, scratch, needed)``. It raises ``SL213`` unless ``scratch``, the
        caller's workspace, has at least ``needed`` bytes at an aligned address.
        """
        return cast(RoomCheck, self._section("check_room", f"{SCRATCH_VARIABLE}, needed", self.room))

    def _section(self, name: str, extra: str, steps: Block) -> Callable[..., object]:
        """Return a generated function ``name(call, <extra>)`` that runs ``steps`` on ``call``, a ``Binding`` of checked
        arguments, and returns None.

        ``extra`` is the source code of its further parameters. The function first sets the variables of the arguments,
        sizes, dtypes and device.
        """
        # Given outputs may be fakes with symbolic sizes.
        writer = PythonWriter(careful=True)
        writer.write(steps)
        outs = "".join(f"{p.tensor.python}, " for p in self.places.values())
        arguments = "".join(f"{argument_variable(a)}, " for a in self.spec.args)
        head = [
            f"def {name}(call, {extra}):",
            f"    {arguments}= call.args",
            *([f"    {outs}= outs"] if extra.startswith("outs") else []),
            "    env, dtypes, device = call.env, call.dtypes, call.device",
            *self._sizes(self._computed()),
            *self._dtypes(),
        ]
        names: Scope = {"requires_grad": requires_grad, "overlap": address_ranges_meet}
        return compile_function(f"{name} {self.spec.name}", "\n".join(head), ["    return"], writer, names)

    def _computed(self) -> set[str]:
        """Return the names of the dims and scalars that determine the sizes of the outputs."""
        dims = [d for o in self.spec.outputs for d in o.tensor.dims]
        plain = {d.text for d in dims if d.kind in ("name", "variadic")}
        return plain.union(*(d.expr.names for d in dims if d.expr))

    def _sizes(self, names: set[str]) -> list[str]:
        """Return lines of generated Python that set the variable of each of ``names``, which are dims and scalars, from
        the dict ``env``.
        """
        return [f"    {self.names(n)} = env[{n!r}]" for n in sorted(names)]

    def _dtypes(self) -> list[str]:
        """Return lines of generated Python that set the variable of each dtype class of the outputs from the dict
        ``dtypes``. A dtype class is a group of tensors that have the same dtype.
        """
        classes = {o.tensor.dtype_class for o in self.spec.outputs if not o.tensor.concrete}
        return [f"    dtype_{c} = dtypes[{c!r}]" for c in sorted(classes)]


def requires_grad(values: Sequence[object]) -> bool:
    """Return whether a tensor among ``values``, alone or in a list, requires a gradient."""
    each = [v if isinstance(v, (list, tuple)) else (v,) for v in values]
    return any(isinstance(v, Tensor) and v.requires_grad for vs in each for v in vs)


def address_ranges_meet(a: Tensor, b: Tensor) -> bool:
    """Return whether the memory ranges of two tensors, from the first to the last byte, overlap. Return False for
    tensors on different devices and for tensors without elements.
    """
    # Equal addresses on two devices are different memory.
    if a.device != b.device or a.numel() == 0 or b.numel() == 0:
        return False
    return a.data_ptr() < b.data_ptr() + bytes_spanned(b) and b.data_ptr() < a.data_ptr() + bytes_spanned(a)


def bytes_spanned(t: Tensor) -> int:
    """Return the number of bytes from the start of the first element to the end of the last. The tensor must have
    elements and no negative strides.
    """
    return (sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1) * t.itemsize
