"""``RegisteredOp``, the torch registration of an op, which defines schemas and their implementations.

Most ops have two overloads of a name. These are the op, and ``raw``, the part of it below autograd. An op that returns
arguments which it writes to, ``name(Tensor(a!) x) -> Tensor(a!)``, has one more. It is ``writes``, which returns the
other results. Torch can functionalize, fake and record that overload, as it can any op that writes. The op itself calls
``writes`` and returns its arguments. An op whose result may be a view is implemented by its reference. Torch then
derives its views and its gradient.

``torch.vmap`` over ops that torch's own fallback does not support calls the op once for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from shiplap.declare.schema import WRITES, dispatcher_tags, overload_below_autograd, public_schema, schema_text
from shiplap.declare.sharding_rule import failure_hooks
from shiplap.declare.spec import OpSpec
from shiplap.declare.values import Args, Result, Value
from shiplap.dispatch.autocast import Cast, make_cast
from shiplap.dispatch.autograd import make_autograd
from shiplap.dispatch.autograd_function import compile_native_record
from shiplap.dispatch.execute import Executor
from shiplap.dispatch.fake import make_fake, refuse_shared_memory
from shiplap.dispatch.fast_paths import check_before_call, make_fast_execute, make_fast_path
from shiplap.dispatch.out import OutVariant, has_out_variant
from shiplap.dispatch.outputs import all_results, check_view_results
from shiplap.errors import ShiplapError, error
from shiplap.torch_private import available, dispatcher_calls, dispatcher_transforms, dynamo
from shiplap.torch_private.dispatcher_library import Overload, Registrations

RETURN_WRITTEN = (
    "map a function that returns the tensor that the op writes to: def f(x): op(x); return x, and torch.vmap(f)(x)"
)
FUNCTIONALIZED = "We only support functionalizing operators"  # torch's words for an op that writes


def core_overload_name(spec: OpSpec) -> str:
    """Return the torch name of the overload that kernels implement. It is the op's own name. For an op that returns
    arguments which it writes to, it is the name of a helper op that only writes.
    """
    return overload_below_autograd(spec.opname, WRITES) if spec.returned and not spec.view else spec.opname


def kernel_overload_names(spec: OpSpec, guarded: bool) -> tuple[str, ...]:
    """Return the torch names that kernels implement. They are that of :func:`core_overload_name` and, if ``guarded`` is
    true, that of the overload below autograd. ``guarded`` states whether the op has an autograd implementation.
    """
    core = core_overload_name(spec)
    return (core, overload_below_autograd(spec.opname)) if guarded else (core,)


class RegisteredOp(Executor):
    """An op with its registrations in torch.

    Attributes:
        mutating_overload: the op for which fakes, autograd and autocast are registered. It is ``overload`` itself,
            except for an op that returns arguments.
        cast: the function that converts the arguments of a call under autocast, or None if the op has no rule for
            autocast.
        variant: the out-variant ``<name>__out``, for callers that allocate the outputs. It is None if the op has no
            such variant.
    """

    mutating_overload: Overload
    cast: Cast | None = None
    variant: OutVariant | None = None
    _registrations: Registrations | None = None

    def operator_names(self) -> set[str]:
        """Return the torch names by which graphs call the op. They are those of its overloads and of its
        out-variant.
        """
        variant = [self.variant.overload] if self.variant is not None else []
        return {each.name() for each in (self.overload, self.mutating_overload, self.below_autograd, *variant)}

    @property
    def edition(self) -> int:
        """The number of different schemas that this process has declared under the op's name, counting from 1. For each
        of them, torch gets a new name.
        """
        return self._registrations.edition if self._registrations is not None else 1

    def _reregister(self) -> None:
        """Make torch recompile the code that calls this op by giving it a new overload object. Compiled graphs may rely
        on the previous declaration.
        """
        there, name = self._registrations, self.spec.opname
        if there is not None:
            self.overload = there.new_overload_object(name)
            core = core_overload_name(self.spec)
            self.mutating_overload = there.overload(core) if core != name else self.overload
            self.below_autograd = (
                there.overload(overload_below_autograd(name)) if self.needs_autograd else self.mutating_overload
            )
        self.install_fast_path()
        self._install_autograd()

    def install_fast_path(self) -> None:
        """Install the fastest functions for a call without gradients, for one that autograd records, and for
        ``op.out``. They depend on the kernels and bindings that are attached now.
        """
        composed = bool(self.spec.returned) or self.spec.view
        if not available("calls below autograd"):
            composed = True  # the op as torch has it
        plain = dispatcher_calls.builtin_of(self.overload)
        self.call_kernel = check_before_call(self, plain) if composed else make_fast_path(self)
        native = self.native is not None and self.native.records
        self._record_natively = compile_native_record(self.spec, plain) if native else None
        self.fast_execute = None if composed else make_fast_execute(self)
        if self.variant is not None:
            self.variant.install_fast_paths()

    def _install_autograd(self) -> None:
        """Build the functions by which autograd records calls of the op. This happens at registration, and again when a
        gradient is declared.
        """
        if self.needs_autograd:
            formula = self.run_surrogate
            made = make_autograd(
                self.spec, self.mutating_overload, self.call_below_autograd, self.serve_tangent, formula, self.gradient
            )
            self.record_call, recorder = made
            self._record_plain_call = recorder.apply if recorder is not None and self.can_skip_dispatcher else None

    def call_recorded(self, *args: Value, **kwargs: Value) -> Result:
        """Return the result of the function that currently records calls for autograd. torch has this method
        registered, since that function changes when a gradient is declared.
        """
        return self.record_call(*args, **kwargs)

    def call_below_autograd(self, *args: Value, **kwargs: Value) -> Result:
        """Return the result of the op's kernels without recording for autograd. If autocast is on, it stays on during
        the call.
        """
        if self.can_skip_dispatcher and not kwargs and not dispatcher_calls.any_autocast():
            return self.call_kernel(*args)
        result: Result = dispatcher_calls.builtin_of(self.below_autograd)(*args, **kwargs)
        return result

    def call_converted(self, *args: Value) -> Result:
        """Return the result of the op for arguments that autocast has converted. The call is recorded if an argument
        requires a gradient.
        """
        with dispatcher_calls.outside_autocast():
            if not torch.is_grad_enabled() or not dispatcher_calls.any_requires_grad(*args):
                return self.call_kernel(*args)
            if (recorded := self._record_natively) is None and self._record_plain_call is not None:
                recorded = partial(self._record_plain_call, self.call_kernel)
            result: Result = self.record_call(None, *args) if recorded is None else recorded(*args)
            return result

    def _cast_arguments(self, kind: str, args: Args, kwargs: dict[str, Value]) -> tuple[Args, dict[str, Value]]:
        """Return ``(positional, keywords)`` for a call, with its arguments converted by the op's autocast rule for the
        device type ``kind``.
        """
        assert self.cast is not None
        if not kwargs:
            return self.cast(kind, args), kwargs
        return self.spec.split(self.cast(kind, self.spec.complete(args, kwargs)))

    def _register_with_torch(self) -> None:
        """Define the op in torch, with its overloads, its fake, vmap and autocast rules, its autograd and its
        out-variant. Raise ``SL108`` if torch has an op of this name that no declaration has registered.
        """
        spec, name = self.spec, self.spec.opname
        if Registrations.is_foreign(spec.namespace, name):
            got, expected = "an op that other code has registered with torch", "a name that torch does not have"
            fix = f'give the op another name, or adopt the existing one with @sl.adopt("{spec.name}")'
            raise error("SL108", where=spec.name, got=got, expected=expected, fix=fix)
        self._registrations = there = Registrations.of(spec.namespace, name)
        # An op with view results is traced through its reference, and has no part below autograd.
        if spec.view:
            self._define_composed(there)
            self.mutating_overload = self.below_autograd = self.overload = there.overload(name)
            self.can_skip_dispatcher = False
        else:
            self._define_overloads(there, core_overload_name(spec))
        self.install_fast_path()
        self._install_autograd()
        self.variant = OutVariant(self, there) if has_out_variant(spec) else None
        self.cast = make_cast(spec) if spec.autocast is not None and not spec.view else None
        if self.cast is not None:
            there.register_autocast(core_overload_name(spec), self.mutating_overload, self._cast_arguments)
        there.publish()

    def _define_overloads(self, there: Registrations, core: str) -> None:
        """Define the overloads of the op in ``there``, its registrations in torch. These are the one that kernels
        implement (``core``), the one that skips autograd, and the public one for an op that returns arguments.
        """
        name, names = self.spec.opname, kernel_overload_names(self.spec, self.needs_autograd)
        if core != name:
            self._define_composed(there)  # first: torch forgets overloads in the order in which they were defined
        for each in names:
            self._define_overload(there, each)
        if needs_vmap_rule(self.spec):
            for each in names:
                rule = make_vmap_rule(self.spec, lambda: self.mutating_overload)
                there.map(each, rule, always=self.spec.draws)
        if self.needs_autograd:
            there.show_to_modes(names[-1], core)
            there.skip_autograd(names[-1])
            there.register_autograd(core, self.call_recorded)
        self.mutating_overload = there.overload(core)
        self.overload, self.below_autograd = there.overload(name), there.overload(names[-1])
        apart = self.needs_autograd and core == name and not any(a.many for a in self.spec.args)
        self.can_skip_dispatcher = apart and available("calls below autograd")

    def _define_overload(self, there: Registrations, name: str) -> None:
        """Define one overload under ``name``, with its schema, implementation, fake and translation of errors."""
        there.define(schema_text(self.spec, name), dispatcher_tags(self.spec))
        there.translate_errors(name, self._explain_error, self.plan.numbers)
        there.implement(
            name, self.execute, lambda args, kwargs: refuse_shared_memory(self.spec, self.spec.complete(args, kwargs))
        )
        fake = make_fake(self)

        def keeping_calls_apart(*args: Value, **kwargs: Value) -> Result:
            """Return the outputs of the fake implementation for an op with random results. Mark the overload, so that
            Inductor does not merge equal calls.
            """
            dynamo.keep_calls_apart(there.overload(name))
            return fake(*args, **kwargs)

        there.fake(name, keeping_calls_apart if self.spec.draws else fake)

    def _explain_error(
        self, cause: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ShiplapError | Literal[True] | None:
        """Return the catalogue error of a call that native code, the schema, ``functionalize`` or DTensor refused with
        ``cause``. Return True if a failure hook has repaired the cause, and None if there is no such error.
        """
        if self.spec.mutated and FUNCTIONALIZED in str(cause):
            got, expected = "torch.func.functionalize or a nested region", "torch.compile or torch.export alone"
            return error("SL137", where=self.spec.name, got=got, expected=expected)
        wrong = self.refusal(cause) or self.plan.misfit(args, kwargs)
        return wrong or any(hook(self, (*args, *kwargs.values()), cause) for hook in failure_hooks) or None

    def _define_composed(self, there: Registrations) -> None:
        """Define the public overload of an op that returns arguments or views. It is implemented by calls of other ops.
        When torch traces, it records these ops instead.
        """
        name = self.spec.opname
        there.define(public_schema(self.spec, name), dispatcher_tags(self.spec))
        there.implement_by_ops(name, self._run_with_views if self.spec.view else self._run_and_return_arguments)

    def _run_and_return_arguments(self, *args: Value, **kwargs: Value) -> Result:
        """Return all results of an op that returns arguments, after calling the helper op that writes to them."""
        given = self.spec.complete(args, kwargs)
        positional, named = self.spec.split(given)
        return all_results(self.spec, given, self.mutating_overload(*positional, **named))

    def _run_with_views(self, *args: Value, **kwargs: Value) -> Result:
        """Return the checked results of the reference, run on checked arguments. This is the implementation of an op
        with view results.
        """
        call = self.bind(self.spec.complete(args, kwargs))
        return check_view_results(self.spec, call, self.run_reference(call.args))


def needs_vmap_rule(spec: OpSpec) -> bool:
    """Return whether ``torch.vmap`` needs a rule of Shiplap for the op. torch's own fallback does not support lists,
    writes, data-dependent sizes and random numbers.
    """
    return spec.traced or spec.draws or bool(spec.mutated or spec.dynamic) or any(a.many for a in spec.args)


def make_vmap_rule(spec: OpSpec, overload: Callable[[], Overload]) -> Callable[..., Any]:
    """Return the function by which ``torch.vmap`` calls the op. It calls ``overload()`` for each sample and stacks the
    results.

    The function raises ``SL138`` if the results of different samples cannot be one tensor, or if samples would write to
    the same memory. It raises ``SL138`` also if the op draws random numbers and ``torch.vmap`` was not called with
    ``randomness="different"``, or if the op returns nothing and is itself the function that ``torch.vmap`` maps.
    """

    def refuse_shared(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raise ``SL138`` if the op writes to an argument that is not batched under ``torch.vmap``, because all samples
        would write to its memory.
        """
        given = spec.complete(args, kwargs)
        for arg, value in zip(spec.args, given, strict=True):
            if arg.mutated and value is not None and not dispatcher_transforms.is_mapped(value):
                raise _vmap_error(spec, f"{arg.name!r}, which all samples would write to")

    def run(sample: dispatcher_transforms.Sample, count: int) -> Any:
        """Return the stacked results of the op for the ``count`` samples of a vmapped batch. ``sample(index)`` returns
        the positional and keyword arguments of one sample.
        """
        if spec.dynamic:
            raise _vmap_error(spec, "results whose sizes depend on data")
        # Without a sample there is no result to take the shape from.
        if not count:
            raise _vmap_error(spec, "no sample")
        op, results = overload(), []
        for index in range(count):
            args, kwargs = sample(index)
            results.append(op(*args, **kwargs))
        return _stack_sample_results(spec, results)

    mapped = dispatcher_transforms.map_samples(run)

    def called(*args: Any, **kwargs: Any) -> Any:
        """Return the results of the op for all samples of a call under ``torch.vmap``. Raise ``SL138`` if the op draws
        random numbers that must not differ between samples, writes to memory that samples share, or returns nothing
        to ``torch.vmap``, which takes tensors only.
        """
        if spec.draws and (asked := dispatcher_transforms.vmap_randomness()) != "different":
            raise _vmap_error(
                spec, f"random numbers, and randomness={asked!r}", 'write torch.vmap(f, randomness="different")'
            )
        if spec.mutated:
            refuse_shared(args, kwargs)
        if not spec.results and not spec.returns and dispatcher_transforms.is_called_by_vmap():
            raise _vmap_error(spec, "an op that returns nothing", RETURN_WRITTEN)
        return mapped(*args, **kwargs)

    return called


def _stack_sample_results(spec: OpSpec, results: Sequence[Any]) -> Any:
    """Return the results of all samples as one result, with the samples along a new first dim of each tensor. Raise
    ``SL138`` if the samples' results differ in shape, in the length of a list or in a number.
    """
    first = results[0]
    if isinstance(first, Tensor):
        # A stack needs one shape, while a reference may make shapes depend on values.
        if any(not isinstance(r, Tensor) or r.shape != first.shape for r in results):
            raise _vmap_error(spec, "results of different shapes")
        return torch.stack(list(results))
    if isinstance(first, (list, tuple)):
        if any(len(r) != len(first) for r in results):
            raise _vmap_error(spec, "lists of different lengths")
        return type(first)(_stack_sample_results(spec, [r[i] for r in results]) for i in range(len(first)))
    if any(r != first for r in results):
        raise _vmap_error(spec, f"the numbers {', '.join(map(str, results[:3]))}")
    return first


def _vmap_error(spec: OpSpec, got: str, fix: str = "") -> ShiplapError:
    """Return the error ``SL138`` for a call of the op under ``torch.vmap`` that has no single result. ``got`` names the
    cause, and ``fix`` is the remedy, if there is one.
    """
    where, expected = f"torch.vmap of {spec.name}", "one result for all samples"
    return error("SL138", where=where, got=got, expected=expected, fix=fix)
