"""The builder of call plans. Its steps from a declaration are in an order in which each variable is set before use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shiplap.declare.dim_expression import Expr
from shiplap.declare.spec import Arg, Dim, OpSpec, TensorType
from shiplap.plan import rules
from shiplap.plan.expression import (
    Expression,
    TensorPlace,
    Text,
    VariableNames,
    can_fail,
    declared_value,
    quoted_text,
    shared_variable,
)
from shiplap.plan.rule import ArgumentRule
from shiplap.plan.steps import (
    CheckStep,
    EachStep,
    EvaluateStep,
    LetStep,
    MeetStep,
    PresentStep,
    Step,
    UnsetStep,
    VariableType,
)

_Late = Callable[[], None]


def argument_steps(spec: OpSpec) -> tuple[Step, ...]:
    """Return the steps that check the arguments of a call and set its variables, in the order in which they run. Steps
    are data from which the checks are generated in Python and in C++. The variables hold, for example, dims and dtypes.

    The steps check the class, choices, device, dtype and shape of the arguments, and the preconditions in
    ``requires=``.
    """
    builder = _PlanBuilder(spec)
    for arg in spec.scalars:
        if arg.cls is not None:
            builder.check(rules.is_object(spec.name, arg.name, arg.cls, arg.optional))
        if arg.choices:
            builder.check(rules.is_choice(spec.name, arg))
        elif arg.scalar == "str" and not arg.optional:  # which C can take
            builder.check(rules.has_no_nul(spec.name, arg.name))
    for arg in spec.tensors:
        builder.argument(arg)
    builder.compare_arguments()
    # Only now is it known which variables some calls leave unset, and they are declared before all else.
    unset = [UnsetStep(name, type) for name, type in builder.loose.items()]
    return (*unset, *builder.steps)


def sharing_steps(spec: OpSpec) -> tuple[Step, ...]:
    """Return the steps that check each tensor to which the op writes (``spec.mutated``). The tensor must share no
    memory with another tensor argument, nor with another member of its own list. Steps are data from which checks are
    generated.
    """
    steps: list[Step] = []
    for index, name in enumerate(spec.mutated):
        written = spec.arg(name)
        target = TensorPlace(spec.name, name, written.many)
        if written.many:
            steps.append(CheckStep(rules.members_are_distinct(spec.name, name)))
        for arg in spec.tensors:
            # Each pair of mutated arguments is compared once.
            if arg.name not in spec.mutated[: index + 1]:
                other = TensorPlace(spec.name, arg.name, arg.many)
                rule = rules.shares_no_memory(target, other, both=arg.name in spec.mutated)
                steps += steps_around(written, target, steps_around(arg, other, (CheckStep(rule),)))
    return tuple(steps)


def steps_around(arg: Arg, at: TensorPlace, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return ``steps``, which check the tensor at ``at``, wrapped so that they run only if the tensor is there.

    If the argument ``arg`` is a list of tensors, they run once for each element. If it is optional, they run only if it
    is not None.
    """
    if not arg.many:
        return (PresentStep(at, steps),) if arg.optional else steps
    return (EachStep(at, (PresentStep(at, steps),) if arg.absent else steps, arg.optional),)


def dtype_step(at: TensorPlace) -> LetStep:
    """Return the step that sets the generated variable ``type_<argument>`` to the dtype of the tensor at ``at``."""
    return LetStep(
        f"type_{at.arg}", VariableType.DTYPE, Expression(f"{at.tensor.python}.dtype", f"{at.tensor.cpp}.dtype()")
    )


def try_expression(
    spec: OpSpec, names: VariableNames, variable: str, type: VariableType, expr: Expr
) -> tuple[tuple[Step, ...], Expression]:
    """Return ``(steps, expression)`` for the declared expression ``expr``. ``steps`` evaluate it. ``expression`` is the
    source, in Python and in C++, by which later steps read its value.

    If the evaluation can fail, as a division can, a step stores the value in ``variable``, which has the type ``type``.
    Otherwise ``steps`` is empty, and ``expression`` computes the value itself.
    """
    term = declared_value(expr, names)
    # Without a step of its own the term stands inside the check, which keeps the generated code short.
    if not can_fail(expr, names):
        return (), term
    return (EvaluateStep(variable, type, expr, term, rules.has_value(spec.name, expr, names)),), shared_variable(
        variable
    )


class _PlanBuilder:
    """A builder of the steps of one declaration.

    Attributes:
        bound: the variables that every call has set by now, or that the current block has set.
        loose: the variables that some calls leave unset, with their types.
        origins: for each variable that every call has set, the text that names the argument which set it, for errors.
    """

    def __init__(self, spec: OpSpec) -> None:
        """Start with no steps, and with the scalar arguments as the only variables that are set."""
        self.spec, self.names = spec, VariableNames(spec)
        self.steps: list[Step] = []
        self.bound = {self.names(a.name) for a in spec.scalars}
        self.origins: dict[str, Text] = {self.names(a.name): (f"argument '{a.name}'",) for a in spec.scalars}
        self.loose: dict[str, VariableType] = {}
        self.late: list[tuple[Arg, TensorPlace, _Late]] = []
        self.sure = True  # whether every call takes the steps that are written now

    def check(self, rule: ArgumentRule) -> None:
        """Append a step that raises the error of ``rule``, a condition with error texts, if the condition is false in a
        call.
        """
        self.steps.append(CheckStep(rule))

    @contextmanager
    def block(self, arg: Arg, at: TensorPlace) -> Iterator[None]:
        """Collect the steps that are appended inside the ``with`` into one block. The block runs only if the argument
        ``arg`` is not None. If ``arg`` is a list, the block runs once for each element. For a required single tensor,
        the steps are appended without a block.
        """
        if not (arg.optional or arg.many):
            yield
            return
        outer, bound, self.steps, self.sure = self.steps, set(self.bound), [], False
        yield
        self.steps = [*outer, *steps_around(arg, at, tuple(self.steps))]
        # A variable set inside the block is unset in a call that skips the block.
        self.bound, self.sure = bound, True

    def meet(self, variable: str, type: VariableType, term: Expression, origin: Text, *checked: ArgumentRule) -> None:
        """Append the steps that set ``variable`` to ``term`` or compare it with ``term``.

        If no earlier argument sets ``variable``, one step sets it. If each call has set it by now, the steps check the
        rules ``checked``, which compare its value with ``term``. If earlier arguments set it only in some calls, the
        generated code tests in each call which case applies. ``type`` is the type of ``variable``. ``origin`` names the
        argument in error messages.
        """
        if variable in self.bound:
            for rule in checked:
                self.check(rule)
        elif self.sure and variable not in self.loose:
            self.steps.append(LetStep(variable, type, term))
            self.origins[variable] = origin
        else:
            self.loose.setdefault(variable, type)
            self.steps.append(MeetStep(variable, type, term, origin, checked))
        self.bound.add(variable)

    def origin(self, variable: str) -> Text:
        """Return the text by which errors name the argument that gave ``variable`` its value. If calls differ in that
        argument, the text reads the generated variable ``from_<variable>``.
        """
        return self.origins.get(variable, (shared_variable(f"from_{variable}"),))

    def argument(self, arg: Arg) -> None:
        """Append the steps of one tensor argument. They check that it is a tensor with strides (not sparse or nested),
        and then its dtype, device, shape and memory.
        """
        at, kind = TensorPlace(self.spec.name, arg.name, arg.many), arg.tensor
        assert kind is not None
        with self.block(arg, at):
            # First the kind, then the layout: the later checks read properties that only dense tensors have.
            self.check(rules.is_tensor(at, str(kind)))
            self.check(rules.is_dense(at))
            self.dtype(at, kind)
            device = rules.same_device(at, self.origin("device"))
            self.meet("device", VariableType.DEVICE, at.device, quoted_text(at.label), device)
            self.shape(arg, at, kind)
            for rule in rules.argument_rules(at, arg):
                self.check(rule)

    def dtype(self, at: TensorPlace, kind: TensorType) -> None:
        """Append the steps that check the dtype of the tensor at ``at``.

        They set the variable of its dtype and check it against the declared dtypes of ``kind``. They also compare it
        with the dtypes of the other tensors of its dtype class, which must be equal.
        """
        self.steps.append(dtype_step(at))
        if kind.dtypes:
            self.check(rules.dtype_is_among(at, kind.dtype_class, kind.dtypes))
        if not kind.concrete:
            variable = f"dtype_{kind.dtype_class}"
            same = rules.same_dtype(at, kind, self.origin(variable))
            self.meet(variable, VariableType.DTYPE, at.dtype, quoted_text(at.label), same)

    def shape(self, arg: Arg, at: TensorPlace, kind: TensorType) -> None:
        """Append the steps that check the shape of the tensor at ``at``. ``arg`` is the op's argument that the tensor
        belongs to, and ``kind`` is the declared type of the tensor.

        The first steps read the shape into generated variables and check the rank. The next steps treat each dim in
        order. They check its size or set the variable of a name that occurs for the first time.
        """
        self.look(at)
        count = len(kind.dims)
        spread = next((i for i, d in enumerate(kind.dims) if d.kind == "variadic"), count)
        self.check(rules.has_rank(at, count - kind.variadic, str(kind), least=kind.variadic))
        for axis, dim in enumerate(kind.dims):
            if axis == spread:
                self.spread(at, dim, axis, count - 1 - axis)
            else:
                # Behind the variadic dim, axes are counted from the end.
                self.dim(arg, at, dim, axis if axis < spread else axis - count)

    def look(self, at: TensorPlace) -> None:
        """Append the steps that set the generated variables ``shape_<argument>`` and ``rank_<argument>`` from the
        tensor at ``at``. Only C++ needs the rank, since its shape is a pointer.
        """
        shape = Expression(f"{at.tensor.python}.shape", f"{at.tensor.cpp}.sizes()")
        self.steps.append(LetStep(f"shape_{at.arg}", VariableType.SHAPE, shape))
        self.steps.append(LetStep(f"rank_{at.arg}", VariableType.SIZE, Expression("", f"{at.tensor.cpp}.dim()")))

    def dim(self, arg: Arg, at: TensorPlace, dim: Dim, axis: int) -> None:
        """Append the steps of one dim of the tensor at ``at``. For a named dim, they set its variable or compare the
        tensor's size with it. For a fixed or computed dim, they compare the size.

        ``axis`` is the position of the dim. Behind a variadic dim, which stands for any number of axes, it is negative.
        """
        if dim.kind == "name":
            variable = self.names(dim.text)
            same = rules.same_size(at, axis, dim.text, shared_variable(variable), self.origin_of_size(variable))
            self.meet(variable, VariableType.SIZE, at.size(axis), quoted_text(at.label), same)
            if dim.of:
                self.repeated(arg, at, dim.of, axis)
        elif dim.kind == "fixed":
            self.check(rules.fixed_size(at, axis, dim.size))
        elif dim.expr is not None:
            expr = dim.expr
            # A size that a later argument gives is not known yet, so the check waits for all arguments.
            if all(self.names(n) in self.bound for n in expr.names):
                self.computed(at, axis, expr)
            else:
                self.late.append((arg, at, lambda: self.computed(at, axis, expr)))

    def repeated(self, arg: Arg, at: TensorPlace, of: str, axis: int) -> None:
        """Append the check that the tensor's size along ``axis`` is 1 or the size of the dim ``of``, to which it
        broadcasts. If no argument has set ``of`` yet, postpone the check until all arguments are read.
        """

        def write() -> None:
            """Append the check that the tensor's size along the axis given to ``repeated`` is 1 or the size of the dim
            to which it broadcasts.
            """
            variable = self.names(of)
            self.check(
                rules.same_size(at, axis, of, shared_variable(variable), self.origin_of_size(variable), or_one=True)
            )

        if self.names(of) in self.bound:
            write()
        else:
            self.late.append((arg, at, write))

    def origin_of_size(self, variable: str) -> Text:
        """Return the words by which errors name the argument that gave the size ``variable`` its value. They are ``in
        'x'`` for a tensor and ``argument 'k'`` for a scalar.
        """
        origin = self.origin(variable)
        source = origin[0] if origin else ""
        return origin if isinstance(source, str) and source.startswith(("argument", "declared")) else ("in ", *origin)

    def computed(self, at: TensorPlace, axis: int, expr: Expr) -> None:
        """Append the check that the size of the tensor at ``at`` along ``axis`` equals the value of the declared
        expression ``expr``.
        """
        wanted = self.value(f"v_at_{at.arg}_{axis}".replace("-", "m"), VariableType.SIZE, expr)
        self.check(rules.computed_size(at, axis, expr.source, wanted))

    def value(self, variable: str, type: VariableType, expr: Expr) -> Expression:
        """Append the steps that evaluate the declared expression ``expr``, and return the expression by which later
        steps read its value. If the evaluation can fail, a step stores the value in ``variable``.
        """
        steps, term = try_expression(self.spec, self.names, variable, type, expr)
        self.steps += steps
        return term

    def spread(self, at: TensorPlace, dim: Dim, before: int, behind: int) -> None:
        """Append the steps of a variadic dim (any number of axes) of the tensor at ``at``. For the dim ``...``, append
        none.

        The steps take the tensor's sizes except those of the first ``before`` and the last ``behind`` axes. They store
        them in the dim's variable or compare them with it.
        """
        if dim.text == "...":
            return
        here = f"spread_{at.arg}"
        # The C++ form is empty: declarations with variadic dims have none.
        here_sizes = Expression(f"tuple(shape_{at.arg}[{before}:len(shape_{at.arg}) - {behind}])", "")
        self.steps.append(LetStep(here, VariableType.SHAPE, here_sizes))
        self.meet(
            self.names(dim.text),
            VariableType.SHAPE,
            Expression(here, ""),
            quoted_text(at.label),
            *rules.same_variadic_dims(at, dim.text),
        )

    def compare_arguments(self) -> None:
        """Append the checks that concern several arguments together, after the steps of each single argument.

        A list of tensors must have members if no other argument gives a size that is needed. Sizes must equal the
        expressions in ``dims=``. Then follow the checks that waited for the sizes of later arguments (``late``), and
        the preconditions in ``requires=``. A traced op without a tensor argument first gets its device.
        """
        op = self.spec.name
        # A traced op may have no tensor argument that gives the device.
        if self.spec.traced and "device" not in self.bound:
            self.place()
        # Only a list of tensors gives these, and an empty list gives nothing.
        if missing := [v for v in self.needed() if v not in self.bound]:
            self.check(rules.lists_have_members(op, missing))
            self.bound.update(missing)
        for name, expr in self.spec.dims:
            variable = self.names(name)
            computed = self.value(f"v_dim_{name}", VariableType.SIZE, expr)
            same = rules.agrees_with_computed(
                op, name, shared_variable(variable), computed, self.origin_of_size(variable)
            )
            self.meet(variable, VariableType.SIZE, computed, (f"declared as {expr}",), same)
        for arg, at, write in self.late:
            with self.block(arg, at):
                if arg.optional or arg.many:  # the variables set inside the block of this argument are gone
                    self.look(at)
                write()
        for number, expr in enumerate(self.spec.requires):
            truth = self.value(f"v_requires_{number}", VariableType.BOOL, expr)
            self.check(rules.requirement_holds(op, expr, self.names, truth))

    def place(self) -> None:
        """Append the step that sets the device of a call that may have no tensor. It is the device of its tensors.
        Without tensors, it is the ``device`` argument, or torch's default if there is none.
        """
        given = next((self.names(a.name) for a in self.spec.scalars if a.scalar == "device"), "None")
        self.steps.append(
            LetStep(
                "device",
                VariableType.DEVICE,
                Expression(f"placed({'device' if self.has('device') else 'None'}, {given})", ""),
            )
        )
        self.bound.add("device")

    def has(self, variable: str) -> bool:
        """Return whether only some calls set the generated variable ``variable``, so that it may be unset when the
        current step runs.
        """
        return variable in self.loose

    def needed(self) -> list[str]:
        """Return the variables of the generated code that outputs, bounds and preconditions read, and which every call
        has to set. The device comes first, then the sizes, sorted, and then the dtypes, sorted.
        """
        spec = self.spec
        exprs = [e for _, e in (*spec.dims, *spec.bounds)] + list(spec.requires)
        dims = [d for o in spec.outputs for d in o.tensor.dims]
        names = {d.text for d in dims if d.kind in ("name", "variadic")}
        names = names.union(
            *(e.names for e in exprs), *(d.expr.names for d in dims if d.expr), spec.broadcasts.values()
        )
        # ``dims=`` and bounds compute these, so that no argument has to give them.
        names -= {k for k, _ in (*spec.dims, *spec.bounds)}
        classes = {o.tensor.dtype_class for o in spec.outputs if not o.tensor.concrete}
        return ["device", *sorted(map(self.names, names)), *(f"dtype_{c}" for c in sorted(classes))]
