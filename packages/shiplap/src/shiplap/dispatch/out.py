"""``op.out``, the op ``<name>__out``, whose outputs and workspace belong to the caller.

It has a name of its own, since two overloads of one name cannot be declared again. It returns nothing, since its schema
lists what it writes. It has no autograd and no autocast implementation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shiplap.declare.binding import Binding
from shiplap.declare.kernel import Kernel
from shiplap.declare.schema import schema_text
from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Args, Outputs, Value
from shiplap.dispatch import compile_cache_key
from shiplap.dispatch.autocast import call_outside_region
from shiplap.dispatch.check_unchanged import places_of, require_places
from shiplap.dispatch.execute import Executor
from shiplap.dispatch.fast_paths import OutFastPath, compile_out_fast_path
from shiplap.dispatch.launch import workspace_size
from shiplap.dispatch.outputs import check_outputs
from shiplap.errors import ShiplapError, error
from shiplap.plan.outputs import requires_grad, scratch_name
from shiplap.torch_private import available, dispatcher_calls, dispatcher_transforms, dtensor
from shiplap.torch_private.dispatcher_library import Registrations

__all__ = ["OutVariant", "has_out_variant", "out_variant_name", "out_variant_schema", "scratch_name"]


def has_out_variant(spec: OpSpec) -> bool:
    """Return whether the op has an out-variant. It must have outputs whose sizes the arguments determine, so that a
    caller can allocate them.
    """
    return bool(spec.outputs) and not spec.dynamic


def out_variant_name(spec: OpSpec) -> str:
    """Return the torch name of the op's out-variant without its namespace, such as ``scale__out``."""
    return f"{spec.stem}__out"


def out_variant_schema(spec: OpSpec, name: str = "") -> str:
    """Return the schema of the out-variant, ``name(<arguments>, *, Tensor(out0!) out, Tensor(scratch!)? workspace=None)
    -> ()``. The default of ``name`` is the variant's own name.
    """
    given = schema_text(spec, name or out_variant_name(spec)).rpartition(") -> ")[0]
    keywords = [] if any(a.keyword_only for a in spec.args) else ["*"]
    keywords += [f"Tensor(out{i}!) {o.name}" for i, o in enumerate(spec.outputs)]
    keywords += [f"Tensor(scratch!)? {scratch_name(spec)}=None"]
    return f"{given}, {', '.join(keywords)}) -> ()"


class OutVariant:
    """The registered out-variant of a declared op, which fills outputs that the caller passes."""

    def __init__(self, op: Executor, registrations: Registrations) -> None:
        """Define the out-variant of ``op`` in torch, with its schema, implementation, fake and vmap rule."""
        self.op, self.spec, self.plan = op, op.spec, op.plan.outputs
        self.lists = any(a.many for a in self.spec.args)
        self.scratch, self.names = scratch_name(self.spec), tuple(o.name for o in self.spec.outputs)
        name = out_variant_name(self.spec)
        tags = [torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides, *self.spec.tags]
        if marked := getattr(torch.Tag, "out_variant", None):  # since 2.13
            tags.append(marked)
        registrations.define(out_variant_schema(self.spec), tags)
        registrations.implement(name, self.execute)
        registrations.skip_autograd(name)  # execute and native code see to gradients
        registrations.fake(name, self._fake)
        registrations.map(name, op.refuse_vmap)
        registrations.translate_errors(name, lambda cause, args, kwargs: op.refusal(cause))
        self.overload = registrations.overload(name)
        self.install_fast_paths()

    def install_fast_paths(self) -> None:
        """Build ``fast_path`` and ``dispatched_fast_path``, two generated functions that run ``op.out``. The first
        skips torch's dispatcher, and the second is called by it. Each is None if the kernels do not run in Python.
        """
        past = available("calls below autograd")
        self.fast_path = compile_out_fast_path(self.op, self._check_call, dispatched=False) if past else None
        self.dispatched_fast_path = compile_out_fast_path(self.op, self._check_call, dispatched=True) if past else None

    def __call__(
        self, args: Args, keywords: dict[str, Value], out: Tensor | Sequence[Tensor], workspace: Tensor | None
    ) -> Tensor | Sequence[Tensor]:
        """Run the op into the caller's tensors ``out`` and return ``out``. Raise the catalogue error for wrong
        arguments or tensors. ``keywords`` is changed, so the caller must not use it again.
        """
        if self.op.plan.numbers is not None and torch.is_grad_enabled():
            self.op.plan.numbers(args, keywords)
        if dispatcher_calls.is_compiling():
            if torch.is_grad_enabled() and requires_grad((*args, *keywords.values(), out)):
                raise self._no_gradient_error()  # in a graph nobody would see that the gradient is lost
        elif dispatcher_transforms.is_transform_active():
            self._refuse_transform((*args, *keywords.values()))
        elif (
            self.fast_path is not None
            and workspace is None
            and not keywords
            and self._run_fast_path(self.fast_path, args, out)
        ):
            increment_version(out)
            return out
        if len(self.names) == 1 and isinstance(out, Tensor):
            keywords[self.names[0]] = out
        else:
            keywords.update(zip(self.names, self._as_outputs(out), strict=True))
        if workspace is not None:
            keywords[self.scratch] = workspace
        try:
            if self.lists:
                self.overload(*args, **keywords)
            else:
                dispatcher_calls.without_gradients(self.overload, args, keywords)
        except (RuntimeError, TypeError) as e:
            outs, _ = self._take_outputs(keywords)
            self._explain(args, keywords, outs, workspace, e)
            raise
        if not dispatcher_calls.is_compiling():
            increment_version(out)  # a backward that has saved what is written to has to know
        return out

    def _run_fast_path(self, direct: OutFastPath | None, args: Args, out: Tensor | Sequence[Tensor]) -> bool:
        """Run a call of ``op.out`` by the generated function ``direct``, which fills ``out``, and return True. Return
        False if there is no such function or it does not support the call.
        """
        if direct is None or dispatcher_calls.any_autocast():
            return False
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if len(outs) != len(self.names) or len(args) > len(self.spec.args) or dispatcher_calls.is_compiling():
            return False
        if len(args) < len(self.spec.args):
            if not self.spec.args[len(args)].has_default:
                return False
            args = self.spec.complete(args)
        return direct(*args, *outs)

    def _refuse_transform(self, values: Args) -> None:
        """Raise ``SL304`` if ``values`` carry a forward-mode tangent or a gradient of torch.func. Memory of the caller
        cannot carry either.
        """
        graded = torch.is_grad_enabled() and dispatcher_calls.any_requires_grad(*values)
        if graded or dispatcher_transforms.carries_tangent(values):
            raise self._no_gradient_error()

    def _no_gradient_error(self) -> ShiplapError:
        """Return the error ``SL304`` for a gradient or tangent that was requested of an out-variant."""
        got = "a gradient or a tangent was requested of an out-variant"
        return error("SL304", where=self.spec.name, got=got, expected="no gradient", fix="call the op without out=")

    def _as_outputs(self, out: Tensor | Sequence[Tensor]) -> Outputs:
        """Return ``out`` as a tuple with a tensor for each output. Raise ``SL212`` for another number of tensors."""
        many = isinstance(out, (list, tuple))
        outs = tuple(out) if many else (out,)
        if len(outs) != len(self.names) or not (many or isinstance(out, Tensor)):
            raise error(
                "SL212",
                where=self.spec.name,
                got=f"{len(outs)} tensors in out=" if many or isinstance(out, Tensor) else type(out).__name__,
                expected=f"{len(self.names)}: {', '.join(self.names)}",
                fix="pass one tensor for each output",
            )
        return outs

    def _explain(
        self, args: Args, kwargs: dict[str, Value], given: Args, workspace: Tensor | None, cause: Exception
    ) -> None:
        """Raise the catalogue error that Python's checks find in a call of the out-variant which failed with ``cause``.
        ``given`` are the outputs of the call, and ``workspace`` is its workspace or None. Return if the checks find no
        error.
        """
        # A catalogue error needs no explanation, and the caller raises it again.
        if isinstance(cause, ShiplapError):
            return
        op = self.op
        if wrong := op.refusal(cause) or op.plan.misfit(args, kwargs):  # the arguments come first
            raise wrong from None
        if any(map(dtensor.is_dtensor, (*args, *kwargs.values(), *given))):
            raise error("SL217", where=self.spec.name, got="DTensors in a call of op.out", expected="plain tensors")
        self._check_call(op.plan.quick(*self.spec.complete(args, kwargs)), given, workspace)

    def _take_outputs(self, kwargs: dict[str, Value]) -> tuple[Args, Tensor | None]:
        """Remove the outputs and the workspace from ``kwargs`` by name. Return them as ``(outputs, workspace or
        None)``.
        """
        given = tuple([kwargs.pop(name) for name in self.names])
        scratch = kwargs.pop(self.scratch, None)
        return given, scratch if isinstance(scratch, Tensor) else None

    def execute(self, *args: Value, **kwargs: Value) -> None:
        """Run the out-variant on tensors with data in Python, outside autocast. Check the call, pick a kernel and fill
        the caller's outputs.
        """
        if dispatcher_calls.any_autocast():
            call_outside_region(self.execute, args, kwargs)
            return
        if dispatcher_calls.lacks_eager_keys():
            dispatcher_calls.call_with_eager_keys(self.execute, args, kwargs)
            return
        op = self.op
        graded = torch.is_grad_enabled()
        if (
            graded
            and op.native is not None
            and not self.lists
            and not dispatcher_calls.any_requires_grad(*args, **kwargs)
        ):
            dispatcher_calls.without_gradients(
                self.overload, args, kwargs
            )  # native code hands on what might have a gradient
            return
        written, scratch = self._take_outputs(kwargs)
        given = self.spec.complete(args, kwargs)
        if self.dispatched_fast_path is not None and scratch is None and self.dispatched_fast_path(*given, *written):
            return
        call = op.plan.quick(*given)
        outs, kernel = self._check_call(call, written, scratch)
        with torch.no_grad():
            if kernel is not None:
                kernel.run_into(call, outs, scratch)
                return
            places = places_of(self.spec, call.args) if self.spec.mutated else []
            made = check_outputs(self.spec, call, op.run_reference(call.args))
            require_places(f"{self.spec.name}, reference", places)
            for out, value in zip(outs, made, strict=True):
                out.copy_(value)

    def _fake(self, *args: Value, **kwargs: Value) -> None:
        """Check a call of the out-variant whose tensors are fake. Nothing is returned, since fake tensors cannot be
        filled.
        """
        compile_cache_key.ensure_cache_keys()
        written, scratch = self._take_outputs(kwargs)
        call = self.op.bind(self.spec.complete(args, kwargs))
        self.plan.check(call, written)
        if scratch is not None:
            self.plan.check_scratch(call, scratch)

    def _check_call(self, call: Binding, given: Args, scratch: Tensor | None) -> tuple[Outputs, Kernel | None]:
        """Check ``given``, the caller's outputs, and ``scratch``, the caller's workspace, if there is one. Return
        ``(outputs, kernel)``. ``kernel`` is picked for the call, and is None for the reference.
        """
        self.plan.check(call, given)
        if scratch is not None:
            self.plan.check_scratch(call, scratch)
        outs = tuple([t for t in given if isinstance(t, Tensor)])
        self.plan.check_memory(call, outs, scratch)
        kernel = self.op.pick_kernel(call)
        # How many bytes the workspace needs depends on the kernel.
        if scratch is not None:
            self.plan.check_room(call, scratch, workspace_size(kernel.workspace, call) if kernel else 0)
        return outs, kernel
