"""``CallPlan``, the checks and conversions of the arguments of an op's calls, built once from its declaration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch import Tensor

from shiplap.cached_property import cached_property
from shiplap.declare.binding import Binding
from shiplap.declare.generated_code import tuple_source
from shiplap.declare.schema import public_schema
from shiplap.declare.spec import OpSpec
from shiplap.declare.value_kinds import kind_mismatch
from shiplap.declare.values import Value
from shiplap.errors import ShiplapError, error
from shiplap.plan.argument_kinds import (
    arrange_arguments,
    fix_of_value_for_number,
    number_check,
)
from shiplap.plan.build import argument_steps, sharing_steps
from shiplap.plan.expression import TensorPlace, VariableNames, argument_variable, parameter_list
from shiplap.plan.outputs import OutputPlan
from shiplap.plan.python_source import PythonWriter, compile_function, possibly_unset
from shiplap.plan.rule import ArgumentRule
from shiplap.plan.rules import argument_is_kind, argument_kind_text, is_dense
from shiplap.plan.steps import Block
from shiplap.plan.value_for_tensor import fix_of_value_for_tensor
from shiplap.plan.values import has_strides

Bind = Callable[..., Binding]


class CallPlan:
    """The steps of a call, in order, and the functions that are generated from them.

    Attributes:
        arguments: the steps for any call, also for one with fake tensors.
        sharing: the steps that compare memory and so require real tensors.
        kinds: the rules that the dispatcher has checked before the op is called.
    """

    def __init__(self, spec: OpSpec) -> None:
        """Store the declaration, the names of its variables and its public schema. The steps are built on first use."""
        self.spec, self.names, self.schema = spec, VariableNames(spec), public_schema(spec)

    @cached_property
    def arguments(self) -> Block:
        """The steps that check the arguments of any call, also of one with fake tensors, against the declaration. They
        set the variables of the generated code, such as sizes.
        """
        return argument_steps(self.spec)

    @cached_property
    def sharing(self) -> Block:
        """The steps that check that tensors which the op writes to share no memory with other arguments. They require
        real tensors.
        """
        return sharing_steps(self.spec)

    @cached_property
    def kinds(self) -> tuple[ArgumentRule, ...]:
        """One rule for each argument, which states that it is of the declared kind (tensor, number, list). In a call
        through torch, the dispatcher has already checked these rules.
        """
        return tuple(argument_is_kind(self.spec.name, a) for a in self.spec.args)

    @cached_property
    def numbers(self) -> Callable[[Sequence[Value], Mapping[str, Value]], None] | None:
        """The function ``check(args, kwargs)``, which raises ``SL220`` if a number is given as a tensor with a
        gradient. It is None if no argument is a number.
        """
        return number_check(self.spec)

    @cached_property
    def outputs(self) -> OutputPlan:
        """The plan of the outputs and the workspace. It holds the steps that allocate and check them."""
        return OutputPlan(self.spec, self.names)

    @cached_property
    def quick(self) -> Bind:
        """The generated function ``quick(*args)``. It checks a call with real tensors, including shared memory, and
        returns its ``Binding``. Trailing defaults may be left out.
        """
        return self._compiled(careful=False)

    @cached_property
    def careful(self) -> Bind:
        """The generated function ``careful(*args)``. It checks a call whose sizes may be symbols, and returns its
        ``Binding``. It does not check shared memory.
        """
        return self._compiled(careful=True)

    def bind(self, args: Sequence[Value]) -> Binding:
        """Return the ``Binding`` of a call with the positional arguments ``args``. It holds the arguments, sizes,
        dtypes and device. Sizes may be symbols. Raise ``SL2xx`` if a check fails.
        """
        return self.careful(*args)

    def misfit(self, args: Sequence[Value], kwargs: Mapping[str, Value]) -> ShiplapError | None:
        """Return the error that explains a failed call, or None if the checks of the arguments find nothing. Raise
        ``SL209`` if the arguments do not fit the signature, and ``SL220`` for a number with a gradient.
        """
        values = arrange_arguments(self.spec, self.schema, args, kwargs)
        accepted: ShiplapError | None = None
        if self.numbers is not None:
            self.numbers((), values)
        for arg in self.spec.args:
            if arg.name in values and (got := kind_mismatch(arg, value := values[arg.name])):
                where = f"{self.spec.name}, argument {arg.name!r}"
                wants_tensor = arg.tensor is not None and not arg.many
                fix = (
                    fix_of_value_for_tensor(self.spec, arg, values)
                    if wants_tensor
                    else fix_of_value_for_number(arg, value)
                )
                wrong = error("SL209", where=where, got=got, expected=argument_kind_text(arg), fix=fix)
                # An empty text is the one value of another kind that the dispatcher lets pass.
                if not isinstance(value, str) or value:
                    return wrong
                accepted = accepted or wrong  # torch takes it for an empty list, and the checks for what they find
        try:
            # The generated checks report which of them fails.
            self.bind([values[a.name] if a.name in values else cast(Value, a.default) for a in self.spec.args])
        except ShiplapError as e:
            return e
        except Exception:  # of a nested tensor, which has no sizes
            return self._without_strides(values) or accepted
        return accepted

    def _without_strides(self, values: Mapping[str, Value]) -> ShiplapError | None:
        """Return the error ``SL207`` of the first tensor argument without strides, such as a sparse or nested tensor.
        Return None if all have strides.
        """
        for arg in self.spec.tensors:
            value = values.get(arg.name)
            at = TensorPlace(self.spec.name, arg.name, arg.many)
            for number, each in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if isinstance(each, Tensor) and not has_strides(each):
                    return is_dense(at).make_error({f"t_{arg.name}": each, f"i_{arg.name}": number})
        return None

    def source(self, *, careful: bool = False) -> str:
        """Return the Python source of a generated function. If ``careful`` is true, it is that of the function
        ``careful``, and otherwise that of ``quick``. Tests and readers of the code use it.
        """
        head, body, writer = self._written(careful)
        return "\n".join([head, *writer.lines, *body])

    def _written(self, careful: bool) -> tuple[str, list[str], PythonWriter]:
        """Return ``(head, body, writer)`` of the generated function that binds a call.

        ``head`` is its ``def`` line. ``writer`` holds the lines of the checks, and ``body`` the lines that build the
        ``Binding`` (the call's arguments, sizes, dtypes and device). If ``careful`` is true, sizes may be symbols, and
        shared memory is not checked. Otherwise sizes are integers, and shared memory is checked.
        """
        writer = PythonWriter(careful=careful)
        writer.write(self.arguments)
        # Fake tensors have no addresses, so memory is compared in real calls alone.
        if not careful:
            writer.write(self.sharing)
        # A variable that no argument has set must not become an entry with None.
        spec, unset = self.spec, possibly_unset(self.arguments)
        env = dict.fromkeys([*(a.name for a in spec.scalars), *self._dims()])
        sizes = {name: self.names(name) for name in env}
        classes = {c: f"dtype_{c}" for c in sorted(self._classes())}
        body = [
            f"    env = {{{', '.join(f'{n!r}: {v}' for n, v in sizes.items() if v not in unset)}}}",
            *(f"    if {v} is not None: env[{n!r}] = {v}" for n, v in sizes.items() if v in unset),
            f"    dtypes = {{{', '.join(f'{c!r}: {v}' for c, v in classes.items() if v not in unset)}}}",
            *(f"    if {v} is not None: dtypes[{c!r}] = {v}" for c, v in classes.items() if v in unset),
            f"    return Binding({tuple_source(map(argument_variable, spec.args))}, env, dtypes, device)",
        ]
        return f"def bind({parameter_list(spec.args)}):", body, writer

    def _compiled(self, *, careful: bool) -> Bind:
        """Return the compiled generated function that checks a call and returns its ``Binding`` (arguments, sizes,
        dtypes, device). If ``careful`` is true, the function also accepts symbolic sizes. Otherwise it accepts only
        integers as sizes.
        """
        head, body, writer = self._written(careful)
        # By index: a default may be any object, which source text could not state.
        defaults = [a.default for a in self.spec.args]
        made = compile_function(
            f"bind {self.spec.name}", head, body, writer, {"defaults": defaults, "Binding": Binding}
        )
        return cast(Bind, made)

    def _dims(self) -> list[str]:
        """Return the names of all dims that are not scalar arguments, each once, in the order of the declaration."""
        dims = [d for a in self.spec.tensors if a.tensor for d in a.tensor.dims]
        named = [d.text for d in dims if d.kind in ("name", "variadic") and d.text != "..."]
        scalars = {a.name for a in self.spec.scalars}
        return [n for n in dict.fromkeys([*named, *(name for name, _ in self.spec.dims)]) if n not in scalars]

    def _classes(self) -> set[str]:
        """Return the names of the dtype classes of the declaration. A dtype class is a group of tensors that have the
        same dtype in a call.
        """
        return set(self.spec.dtype_classes)
