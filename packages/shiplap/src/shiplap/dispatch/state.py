"""``OpState``, an op as data. It holds the declaration, the reference, and the kernels and gradient attached later."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import TypeAlias

from shiplap.declare.batch import Batching
from shiplap.declare.binding import Binding
from shiplap.declare.bucket import BucketRule, read_bucket_rule
from shiplap.declare.choices import gives_result, to_members, to_values
from shiplap.declare.code_digest import code_digest
from shiplap.declare.code_parts import AnyValue, HasCode
from shiplap.declare.gradient import Backward, Surrogate
from shiplap.declare.kernel import Kernel
from shiplap.declare.named_parameters import bind_names
from shiplap.declare.native_interface import NativeBinding, NativeEntrance
from shiplap.declare.sharding_rule import ShardedPart, ShardingRule, read_sharding
from shiplap.declare.spec import OpSpec
from shiplap.declare.template import Template
from shiplap.declare.values import Args, Returned, Value
from shiplap.dispatch.autograd import carries_gradients, floating_outputs
from shiplap.dispatch.check_unchanged import UnchangedArguments
from shiplap.errors import error
from shiplap.plan import CallPlan
from shiplap.torch_private import dispatcher_calls

Sampler: TypeAlias = Callable[..., Args]  # fn(rng, sizes, dtype, device) -> all arguments
# By method that is used as a decorator: the id of the error for an assignment to it, and the decorator.
_DECORATORS = {
    "kernel": ("SL122", '@op.kernel("cpu")'),
    "backward": ("SL110", "@op.backward"),
    "samples": ("SL123", "@op.samples"),
}
# One object, so that the comparison by identity holds for a device without kernels.
_NO_KERNELS: list[Kernel] = []


def bind_sampler(spec: OpSpec, sampler: Sampler) -> Sampler:
    """Return the author's sample builder as a function of ``(rng, sizes, dtype, device)`` by position. Raise ``SL123``
    for a parameter with another name.
    """
    names = ("rng", "sizes", "dtype", "device")
    named = bind_names(sampler, names, id="SL123", where=f"{spec.name}, samples")
    # The wrapper costs a call, so that only ops with Enum arguments have it.
    if not spec.enumerated:
        return named

    @wraps(sampler)
    def with_members(rng: Value, sizes: Mapping[str, Value], dtype: Value, device: Value) -> Args:
        """Call the author's sample builder with ``Enum`` members in ``sizes``. Return its arguments with each member
        replaced by the value that the torch schema takes.
        """
        return to_values(spec, named(rng, to_members(spec, sizes), dtype, device))

    return with_members


class OpState(HasCode):
    """The data of an ``Op``. No method here calls torch's dispatcher.

    Attributes:
        spec: the declaration.
        reference: the decorated function in plain PyTorch, which defines the right result of kernels and gradients.
        kernels: the implementations by device type, in the order in which they are tried.
        templates: the templates by device type. Inductor fuses neighbouring operations into them.
        gradient: the declared backward, or None.
        sampler: the function that builds arguments for audit and tuning, or None to draw them from the declaration.
        rule: the rule that sorts calls into buckets. Calls in one bucket share a tuned choice.
        batching: the dims along which several calls can be replaced by one.
        shardings: the declared rules by which DTensor may shard calls, or None to derive them from the declaration.
        native: the native binding in use, or None while the Python binding runs the op's calls.
        entrance: the native functions that torch calls, or None until native code is first attached.
        plan: the checks and conversions of the arguments of a call.
        unchanged: the check that the reference does not write to its arguments.
        differentiable: whether an output can carry a gradient, and a backward can be declared.
        needs_autograd: whether the op has an autograd implementation, because autograd may have to see a call. This is
            so if the op is differentiable. It is also so if the op writes to a tensor that could carry a gradient,
            which would otherwise be lost without an error.
    """

    def __init__(self, spec: OpSpec, reference: Callable[..., Returned]) -> None:
        """Start an op without kernels and gradient, with its call plan and with the properties that follow from
        ``spec``.
        """
        self.spec, self.reference = spec, gives_result(spec, reference)
        self.signature = inspect.signature(reference)
        self.kernels: dict[str, list[Kernel]] = {}
        self.templates: dict[str, list[Template]] = {}
        self.gradient: Backward | None = None
        self.sampler: Sampler | None = None
        self.rule: BucketRule = read_bucket_rule(spec)
        self.batching: tuple[Batching, ...] = ()
        self.shardings: tuple[ShardingRule, ...] | None = None
        self.native: NativeBinding | None = None
        self.entrance: NativeEntrance | None = None
        self.plan = CallPlan(spec)
        self.unchanged = UnchangedArguments(spec, "reference")
        self.differentiable = not spec.mutated and not spec.view and floating_outputs(spec)
        made, written = not spec.mutated and floating_outputs(spec, detached=True), bool(spec.mutated)
        self.needs_autograd = not spec.view and (made or (written and carries_gradients(spec)))
        self._eager: dict[str, tuple[list[Kernel], list[Kernel]]] = {}  # the list that it was made from, and `eager`

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute. Raise an error for a method that is used as a decorator: an assignment would replace the
        method, and the assigned function would never be called.
        """
        if name in _DECORATORS:
            id, decorator = _DECORATORS[name]
            what, got = "a function is attached by a decorator", f"an assignment to {name} of the op"
            fix = f"write {decorator} above the function, or pass it to op.{name}(...)"
            raise error(id, where=self.spec.name, what=what, got=got, expected=f"a call of {name}", fix=fix)
        super().__setattr__(name, value)

    def sharding(
        self, inputs: Mapping[str, ShardedPart] | None = None, outputs: ShardedPart | Sequence[ShardedPart] = ()
    ) -> None:
        """Declare a rule by which DTensor may shard calls of the op over devices.

        Each call of this method adds one rule. Declared rules replace the derived ones. A call without arguments,
        ``op.sharding()``, forbids sharding. ``shiplap audit --check sharding`` proves the rules.

        Args:
            inputs: a dict from the name of a tensor argument to the axis along which it is sharded. The value is
                ``"whole"`` if each rank has the whole tensor, and ``"sum"`` if the tensors of the ranks are partial
                sums. The default is ``"whole"``.
            outputs: the same for each output, in order, or for the only output. ``"max"`` and ``"min"`` state that the
                result is the elementwise maximum or minimum over the ranks.

        Example: ``mm.sharding({"a": 1, "b": 0}, "sum")`` shards a matrix product along the dim that is summed over.

        Raises:
            ArgumentError: ``SL218`` if a rule does not fit the declaration.
        """
        rules = () if inputs is None else (read_sharding(self.spec, inputs, outputs),)
        self.shardings = (*(self.shardings or ()), *rules)

    def bind(self, args: Sequence[Value]) -> Binding:
        """Return the arguments ``args``, real or fake tensors in declared order, as a checked call. The call also holds
        the value of each dim. Trailing defaults may be left out.

        Raise an ``ArgumentError``, ``SL201`` to ``SL210``, if the arguments do not fit the declaration.
        """
        return self.plan.bind(args)

    def run_reference(self, args: Args) -> Returned:
        """Return the unchecked result of the reference, the op's body in PyTorch, on all arguments in declared order.
        Autocast is off meanwhile.
        """
        return self._run_function(self.reference, args)

    def run_surrogate(self, args: Args) -> Returned:
        """Return the result of the function whose derivative is the gradient of the op, on all arguments. It is a
        declared surrogate, or else the reference. Autocast is off meanwhile.
        """
        return self._run_function(self.surrogate, args)

    def _run_function(self, function: Callable[..., Returned], args: Args) -> Returned:
        """Return the result of an author's function on all arguments in declared order, called outside autocast."""
        positional, named = self.spec.split(args)
        if dispatcher_calls.any_autocast():
            with dispatcher_calls.outside_autocast():
                return function(*positional, **named)
        return function(*positional, **named)

    @property
    def surrogate(self) -> Surrogate:
        """The function whose derivative is the gradient of the op. It is the declared surrogate, or else the
        reference.
        """
        return self.gradient.surrogate if self.gradient and self.gradient.surrogate else self.reference

    @property
    def file(self) -> str:
        """The absolute path of the source file that declares the op."""
        path: str = inspect.unwrap(self.reference).__code__.co_filename
        return os.path.abspath(path)

    def native_kernels(self, device: str) -> list[Kernel]:
        """Return the kernels for a device type that the author has bound. Kernels that templates provide are
        left out.
        """
        return [k for k in self.kernels.get(device, ()) if k.template is None]

    def native_choices(self, device: str) -> list[Kernel]:
        """Return the kernels among which native code picks on a device type. They are the first ones in the order of
        trying, as long as they are C functions of one library.

        Only Python can call a ``supports``. The list therefore ends before the first kernel that has one, or that is a
        Python function.
        """
        chosen: list[Kernel] = []
        for kernel in (kernels := self.native_kernels(device)):
            form = kernel.native
            # Native code cannot call a supports() of Python, nor pick between a generated function and others.
            if form is None or kernel.supports is not None or (form.generated and len(kernels) > 1):
                break
            if chosen and chosen[0].native is not None and form.library != chosen[0].native.library:
                break
            chosen.append(kernel)
        return chosen

    def eager_kernels(self, device: str) -> list[Kernel]:
        """Return the kernels to try, in this order, for a call outside compiled graphs that has no tuned choice. The
        reference runs if no kernel supports the call.

        If the reference is declared with ``reference_is_fast_on=`` for the device type, it is preferred to templates,
        which are then left out. A template with ``default=False`` runs only if a measurement has chosen it.
        """
        bound = self.kernels.get(device, _NO_KERNELS)
        known = self._eager.get(device)
        # Adding a kernel makes a new list, so its identity tells whether the stored selection still holds.
        if known is None or known[0] is not bound:
            library = device in self.spec.reference_is_fast_on
            ready = [k for k in bound if k.template is None or (k.template.default and not library)]
            known = self._eager[device] = bound, ready
        return known[1]

    def attach_kernel(self, kernel: Kernel) -> None:
        """Add a kernel to those of its device type. A kernel with the same name is replaced. A kernel that the author
        bound is tried before all others, and the kernel of a template after all others.
        """
        # A kernel of the author keeps its place when a template of the same name is declared.
        others = [k for k in self.kernels.get(kernel.device, []) if k.name != kernel.name or k.template is None]
        if kernel.template is None:
            self.kernels[kernel.device] = [kernel, *(k for k in others if k.name != kernel.name)]
        elif kernel.name not in [k.name for k in others]:
            self.kernels[kernel.device] = [*others, kernel]

    @property
    def identity(self) -> str:
        """A digest of the declaration and of the code of reference, gradient, kernels and templates, on which compiled
        code depends.
        """
        return code_digest(self)

    def code_parts(self) -> Iterator[tuple[str, AnyValue]]:
        """Yield a label and a value for each part of the op's code. The parts are the reference and the gradient, then
        kernels and templates in the order of trying them.
        """
        yield f"op {self.spec.digest} {self.rule if self.rule != read_bucket_rule(self.spec) else ''}", self.reference
        yield "gradient", self.gradient
        # The order of device types has no effect, and that of kernels has one.
        for device, kernels in sorted(self.kernels.items()):
            for kernel in kernels:
                yield f"{device}/{kernel.name}", kernel
        for device, templates in sorted(self.templates.items()):
            for template in templates:
                yield f"{device}/{template.name}", template
