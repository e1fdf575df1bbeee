"""Python functions as kernels, run with the call's device as the current one.

There are two styles of kernels, with different signatures. An *out-style* kernel takes the outputs' names as keywords
and fills tensors that Shiplap allocated. A *functional* kernel returns its outputs, which are then checked and made
contiguous and fresh. Both may take ``workspace`` (uint8) by keyword. Parameters have the names of the op's arguments,
in any order. Tensors arrive contiguous, as they do in C and Triton, unless ``strided=`` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TypeAlias, cast

import torch
from torch import Tensor

from shiplap.declare.binding import Binding
from shiplap.declare.choices import gives_result
from shiplap.declare.code_parts import AnyValue
from shiplap.declare.config import Values
from shiplap.declare.generated_code import define_function
from shiplap.declare.kernel import Implementation, Kernel, KernelTerms, Refill, Rerun
from shiplap.declare.named_parameters import NamedParameters, read_parameters
from shiplap.declare.spec import Arg, OpSpec
from shiplap.declare.values import Args, Outputs, Result, Returned, Value
from shiplap.dispatch.check_unchanged import UnchangedArguments, places_of, places_of_tensors, require_places
from shiplap.dispatch.launch import allocate_bytes, allocate_workspace, is_current_device, workspace_size
from shiplap.dispatch.outputs import (
    can_refit_outputs,
    check_outputs,
    empty_outputs,
    make_output_refit,
    tensors_in_arguments,
)
from shiplap.errors import DeclarationError, ShiplapError, error
from shiplap.plan.expression import argument_variable
from shiplap.plan.outputs import scratch_name

Launch: TypeAlias = Callable[[Args, dict[str, Value]], Returned]
Copies: TypeAlias = list[tuple[Tensor, Tensor]]  # an argument, and the contiguous copy that is written to


class PythonFunction(Implementation):
    """The implementation that ``Op.kernel`` makes of a Python function. ``function`` is that function. It is not yet
    bound to an op.
    """

    takes_strided = True

    def __init__(self, function: Callable[..., Returned]) -> None:
        """Set the Python function that implements a kernel."""
        self.function = function

    @property
    def name(self) -> str:
        """The name of the kernel, which is that of its function."""
        return getattr(self.function, "__name__", "kernel")

    def code_parts(self) -> Iterator[tuple[str, AnyValue]]:
        """Yield the pair of the label ``"function"`` and the Python function, from whose code digests are computed."""
        yield "function", self.function

    def bind(self, spec: OpSpec, terms: KernelTerms) -> PythonKernel:
        """Return the function as a kernel of the op that ``spec`` declares. ``terms`` are the checked keywords of
        ``Op.kernel``, such as workspace and dtypes.
        """
        return (WritingPythonKernel if spec.mutated else PythonKernel)(spec, terms, gives_result(spec, self.function))

    def keywords(self, spec: OpSpec) -> frozenset[str] | None:
        """Return the names of the function's parameters that are no argument, output or workspace. Only a config
        (compile-time values) can fill them. Return None if the function accepts any keyword or does not fit the op.
        """
        try:
            takes = read_parameters(self.function, partial(_parameter_error, spec, self.name))
        except DeclarationError:
            return None  # `bind` refuses the function
        given = {*(a.name for a in spec.args), *(o.name for o in spec.outputs), scratch_name(spec)}
        return None if takes.open else frozenset(takes.named.keys() - given)


def _parameter_error(spec: OpSpec, kernel: str, got: str, fix: str = "") -> ShiplapError:
    """Return the error ``SL122`` for a kernel function with wrong parameters. It lists the parameters that the kernel
    may have. ``got`` describes those that it has, and ``fix`` is the remedy, if there is one.
    """
    named = [a.name for a in spec.args if a.keyword_only]
    named += [] if spec.dynamic or spec.traced else [o.name for o in spec.outputs]
    listed = [a.name for a in spec.args if not a.keyword_only]
    expected = f"{kernel}({', '.join([*listed, *(['*'] if named else []), *named])})"
    return error("SL122", where=f"{spec.name}, kernel {kernel}", got=got, expected=expected, fix=fix)


class PythonKernel(Kernel):
    """A Python function as a kernel of one op. ``out_style`` states whether the function takes the outputs as
    parameters and fills them, or returns them. ``values`` are the config values that it receives by keyword.
    """

    function: Callable[..., Returned]

    def __init__(self, spec: OpSpec, terms: KernelTerms, function: Callable[..., Returned]) -> None:
        """Bind ``function`` as a kernel of the op. Raise ``SL122`` if its parameters do not have the names of the op's
        arguments.
        """
        super().__init__(spec, terms)
        self.function = function
        takes = read_parameters(function, partial(_parameter_error, spec, terms.name))
        self.outputs = tuple(o.name for o in spec.outputs)
        self.out_style = bool(self.outputs) and {*self.outputs} <= takes.named.keys() and not spec.dynamic
        self.can_repeat = self.out_style or can_refit_outputs(spec)  # all that it needs is known once it has run
        self.scratch = scratch_name(spec)
        self.wants_workspace = self.scratch in takes.named
        self.values: Values = {}
        self._check_parameters(takes)
        self.unchanged = UnchangedArguments(spec, f"kernel {terms.name}")
        self._free = terms.strided | {a.name for a in spec.args if a.contiguous}  # the plan refuses others
        scope = {"otherwise": self._launch_checked, "unchanged": self.unchanged}
        self._pass, self._launch = compile_launch(spec, function, takes, self._free, scope)

    def _check_parameters(self, takes: NamedParameters) -> None:
        """Raise ``SL122`` if a parameter of the function (``takes``) is no argument, output or compile-time value.
        Raise it also if the function lacks a parameter for an argument or a compile-time value.
        """
        named = [a.name for a in self.spec.args]
        keywords = [*(self.outputs if self.out_style else ()), *([self.scratch] * self.wants_workspace)]
        configs = () if self.space is None else self.space.names
        if self.space is not None and not configs:  # sizes decide: they may give whatever the function takes
            configs = tuple(self.space.keywords or ())
        by_keyword = {n for n, p in takes.named.items() if p.kind is not p.POSITIONAL_ONLY} & {*keywords, *configs}
        for name in takes.named:
            if name not in (*takes.optional, *named, *by_keyword):
                got = f"{takes.shown}: nothing is called {name!r}"
                raise _parameter_error(self.spec, self.name, got, self._parameter_fix(name, takes))
        for name in (*named, *(self.space.names if self.space is not None else ())):
            if name not in takes.named and not takes.open:
                got = f"{takes.shown}: the parameter {name!r} is missing"
                raise _parameter_error(self.spec, self.name, got, f"add the parameter {name!r} to the kernel")

    def _parameter_fix(self, name: str, takes: NamedParameters) -> str:
        """Return the fix, in words, for a function parameter ``name`` for which there is no value. An example is to
        rename it.
        """
        missing = [a.name for a in self.spec.args if a.name not in takes.named]
        outputs = [n for n in self.outputs if n not in takes.named]
        if not missing and name == "out" and outputs:
            return f"take each output by its name: {', '.join(self.outputs)}"
        missing = missing or outputs
        if len(missing) == 1 and not (missing == outputs and name.isupper()):
            return f"rename {name!r} to {missing[0]!r}"
        return "use the names in 'expected'" if missing else f"remove {name!r}, or give it a value in configs="

    def configure(self, values: Values) -> None:
        """Set the config values, which the function receives by keyword."""
        self.values = values

    def run_call(self, call: Binding) -> Outputs:
        """Run the kernel on a call with checked arguments, with new outputs and workspace. Return its checked
        outputs.
        """
        given = allocate_workspace(self.workspace, call) if self.wants_workspace else None
        if not self.out_style:
            return check_outputs(self.spec, call, self._call(call.args, call.device, given, {}))
        outs = empty_outputs(self.spec, call)
        self._call(call.args, call.device, given, dict(zip(self.outputs, outs, strict=True)))
        return outs

    def run_into(self, call: Binding, outs: Sequence[Tensor], scratch: Tensor | None) -> None:
        """Run the kernel on a call with checked arguments into ``outs``, with the workspace ``scratch``. If the
        function returns its results, they are copied into ``outs``.
        """
        if scratch is None and self.wants_workspace:
            scratch = allocate_workspace(self.workspace, call)
        if self.out_style:
            self._call(call.args, call.device, scratch, dict(zip(self.outputs, outs, strict=True)))
            return
        made = check_outputs(self.spec, call, self._call(call.args, call.device, scratch, {}))
        for out, value in zip(outs, made, strict=True):
            out.copy_(value)

    def run_first_call(self, call: Binding) -> tuple[Outputs, Rerun | None]:
        """Run the kernel on a call with checked arguments. Return ``(outputs, rerun)``. ``rerun`` is a function that
        repeats the call on other tensors of the same layout. It is None if each call has to be checked.
        """
        outs = self.run_call(call)
        # The number of threads may change between calls, and with it the size of the workspace.
        if not self.can_repeat or (self.workspace is not None and "threads" in self.workspace.names):
            return outs, None
        if not self.out_style:
            return outs, self._rerun_functional(call, outs)
        made = [(name, o.shape, o.dtype) for name, o in zip(self.outputs, outs, strict=True)]
        return outs, self._rerun_out_style(made, call, workspace_size(self.workspace, call))

    def fill_first_call(self, call: Binding, outs: Outputs) -> Refill | None:
        """Run the kernel on ``call``, whose arguments are checked, and fill ``outs``. Return a function ``refill(args,
        outs)`` that repeats this with other tensors of the same layout, or None if each call has to be checked.
        """
        self.run_into(call, outs, None)
        # The number of threads may change between calls, and with it the size of the workspace.
        if not self.out_style or (self.workspace is not None and "threads" in self.workspace.names):
            return None
        room, device = workspace_size(self.workspace, call), call.device

        known = self._arguments_fit_as_they_are(call)

        def refill(args: Args, given: Outputs) -> None:
            """Run the kernel on ``args`` into ``given`` without repeating the checks of the first call."""
            workspace = allocate_bytes(room, device) if self.wants_workspace else None
            self._call(args, device, workspace, dict(zip(self.outputs, given, strict=True)), known)

        return refill

    def _rerun_functional(self, call: Binding, outs: Outputs) -> Rerun:
        """Return a function that takes the arguments of a call like ``call`` and returns the kernel's result. It is for
        kernels that return their outputs. If a result differs from ``outs``, the outputs of the first call, in dtype,
        size or device, the function checks it against the declaration.
        """
        fit, device, room = make_output_refit(self.spec, call, outs), call.device, workspace_size(self.workspace, call)
        known = self._arguments_fit_as_they_are(call)

        def rerun(args: Args) -> Result:
            """Return the result of the kernel on ``args``. If its dtypes, sizes or device are not those of the first
            call's outputs, check it against the declaration.
            """
            given = allocate_bytes(room, device) if self.wants_workspace else None
            return fit(args, self._call(args, device, given, {}, known))

        return rerun

    def _arguments_fit_as_they_are(self, call: Binding) -> bool:
        """Return whether all tensors of ``call`` can be passed to the function unchanged. Repeated calls with this
        layout then need no contiguous copies.
        """
        return not self.spec.mutated and all(
            given is value for given, value in zip(call.args, self._pack_arguments(call.args)[0], strict=True)
        )

    def _rerun_out_style(self, made: list[tuple[str, torch.Size, torch.dtype]], call: Binding, room: int) -> Rerun:
        """Return a function that takes the arguments of a call like ``call``, allocates the outputs, lets the kernel
        fill them, and returns them. It is for kernels that fill their outputs. ``made`` holds the names, shapes and
        dtypes of the outputs, and ``room`` the bytes of the workspace.
        """
        device, known = call.device, self._arguments_fit_as_they_are(call)

        def rerun(args: Args) -> Result:
            """Run the kernel on ``args`` into new outputs. Return these as a tuple."""
            outs = tuple([torch.empty(shape, dtype=dtype, device=device) for _, shape, dtype in made])
            given = allocate_bytes(room, device) if self.wants_workspace else None
            self._call(args, device, given, dict(zip(self.outputs, outs, strict=True)), known)
            return outs

        if len(made) > 1:
            return rerun
        ((name, shape, dtype),) = made

        def rerun_one(args: Args) -> Tensor:  # most ops have one output: not a frame more than that takes
            """Run the kernel on ``args`` into its only output, which is newly allocated. Return the output."""
            out = torch.empty(shape, dtype=dtype, device=device)
            self._call(args, device, allocate_bytes(room, device) if self.wants_workspace else None, {name: out}, known)
            return out

        return rerun_one

    def _call(
        self, args: Args, device: torch.device, scratch: Tensor | None, keywords: dict[str, Value], known: bool = False
    ) -> Returned:
        """Return the result of the function for ``args``, each passed to the parameter of its name. Outputs, config
        values and the workspace ``scratch`` are passed by keyword. ``device`` is the current CUDA device during the
        call.

        If ``known`` is true, an earlier call with an equal layout needed no copies, so strides are not checked.
        Otherwise strided tensors are copied where the function needs that.
        """
        if self.values:
            keywords.update(self.values)
        if self.wants_workspace:
            keywords[self.scratch] = scratch
        # The layout is part of the key of a repeated call, so that strides need no second check.
        launch = self._pass if known else self._launch
        if device.type != "cuda" or is_current_device(device):
            return launch(args, keywords)
        with torch.cuda.device(device):
            return launch(args, keywords)

    def _launch_checked(self, args: Args, keywords: dict[str, Value]) -> Returned:
        """Return the result of the function, called with contiguous copies in place of strided tensors. Copies of
        arguments that the op writes to are copied back. Raise ``SL316`` if the function changes an argument that it
        must not change.

        The function must not move copies and outputs to other memory, because copies are copied back, and outputs may
        be the caller's.
        """
        packed, copies = self._pack_arguments(args)
        # A copy whose memory is replaced could not be copied back.
        places = places_of(self.spec, packed) if copies else []

        def launch() -> Returned:
            """Return the result of the function for ``packed``, the contiguous arguments in the enclosing method."""
            return self._pass(packed, keywords)

        if self.unchanged.left:
            outs = [keywords[name] for name in self.outputs] if self.out_style else []
            filled = places_of_tensors(zip(self.outputs, outs, strict=False))
            result = self.unchanged.during(args, launch, outs)
            if outs:
                self._require_filled(result, outs)
                require_places(f"{self.spec.name}, kernel {self.name}", filled, what="an output")
        else:
            result = launch()
        require_places(f"{self.spec.name}, kernel {self.name}", places)
        for original, copy in copies:
            original.copy_(copy)
        return _restore_copied_arguments(result, copies) if copies else result

    def _require_filled(self, result: Returned, outs: Sequence[Value]) -> None:
        """Raise ``SL301`` if a kernel that takes its outputs as parameters returns other tensors. These would be
        ignored.
        """
        owned = {t.untyped_storage().data_ptr() for t in tensors_in_arguments(outs)}
        # Tensors without elements are left out, since they have no memory.
        others = [
            t for t in tensors_in_arguments(result if isinstance(result, (tuple, list)) else (result,)) if t.numel()
        ]
        if any(t.untyped_storage().data_ptr() not in owned for t in others):
            listed = ", ".join(self.outputs)
            fix = f"write the result into {listed}, or remove {listed} from the parameters and return it"
            got, expected = "another tensor was returned", f"None, after {listed} was filled"
            raise error("SL301", where=f"{self.spec.name}, kernel {self.name}", got=got, expected=expected, fix=fix)

    def _pack_arguments(self, args: Args) -> tuple[Args, Copies]:
        """Return ``(arguments, copies)``. ``arguments`` are ``args`` with strided tensors replaced by contiguous
        copies, except those that are declared to take any strides. ``copies`` holds a pair ``(original, copy)`` for
        each replaced tensor that is written to.
        """
        copies: Copies = []

        def contiguous(value: Value, mutated: bool) -> Value:
            """Return ``value`` with its tensors contiguous, copied where they are not. If ``mutated`` is true, the op
            writes to the argument, and each copied tensor is added to ``copies`` with its original. Otherwise it is not
            added.
            """
            if isinstance(value, (list, tuple)):
                return cast("Value", [contiguous(v, mutated) for v in value])
            if not isinstance(value, Tensor) or value.is_contiguous():
                return value
            copy = value.clone(memory_format=torch.contiguous_format)
            if mutated:
                copies.append((value, copy))
            return copy

        values = [
            value if arg.tensor is None or arg.name in self._free else contiguous(value, arg.mutated)
            for arg, value in zip(self.spec.args, args, strict=True)
        ]
        return tuple(values), copies


class WritingPythonKernel(PythonKernel):
    """A kernel that is a Python function of an op which writes to arguments. The function must not move these arguments
    to other memory.
    """

    def _call(
        self, args: Args, device: torch.device, scratch: Tensor | None, keywords: dict[str, Value], known: bool = False
    ) -> Returned:
        """Return the result of the function for ``args``. Raise ``SL316`` if an argument that the op writes to has
        other memory or another shape afterwards.

        :meth:`PythonKernel._call` documents the parameters.
        """
        places = places_of(self.spec, args)
        result = super()._call(args, device, scratch, keywords, known)
        require_places(f"{self.spec.name}, kernel {self.name}", places)
        return result


def _restore_copied_arguments(result: Returned, copies: Copies) -> Returned:
    """Return ``result`` with each contiguous copy of an argument replaced by the original argument."""
    if isinstance(result, (list, tuple)):
        return cast("Returned", type(result)([_restore_copied_arguments(cast("Returned", r), copies) for r in result]))
    return next((original for original, copy in copies if result is copy), result)


def compile_launch(
    spec: OpSpec,
    function: Callable[..., Returned],
    takes: NamedParameters,
    free: Collection[str],
    scope: dict[str, object],
) -> tuple[Launch, Launch]:
    """Return two generated functions ``(pass_on, launch)`` of ``(args, keywords)``. Each calls the kernel ``function``
    with each argument at the parameter of its name.

    ``launch`` first tests that the tensors not named in ``free`` are contiguous. If the test fails, or while
    ``scope["unchanged"]`` still checks calls, ``launch`` calls ``scope["otherwise"]``.
    """
    positional, named = takes.split(a.name for a in spec.args)
    values = [argument_variable(spec.arg(n)) for n in positional] + [
        f"{n}={argument_variable(spec.arg(n))}" for n in named
    ]
    unpack = f"    {''.join(f'{argument_variable(a)}, ' for a in spec.args)}= args" if spec.args else ""
    called = f"    return function({', '.join([*values, '**keywords'])})"
    ready = " and ".join(
        ["not unchanged.left", *(_is_contiguous_argument(a) for a in spec.tensors if a.name not in free)]
    )
    lines = ["def pass_on(args, keywords):", unpack, called]
    lines += ["def launch(args, keywords):", unpack, f"    if not ({ready}): return otherwise(args, keywords)", called]
    names = {**scope, "function": function, "all_contiguous": all_contiguous}
    launch = define_function("launch", lines, f"kernel of {spec.name}", names)
    return cast("Launch", names["pass_on"]), launch


def _is_contiguous_argument(arg: Arg) -> str:
    """Return the Python source of the condition that an argument is contiguous or absent. For a list, all members must
    be.
    """
    name = argument_variable(arg)
    if arg.many:
        return f"all_contiguous({name})"
    return f"({name} is None or {name}.is_contiguous())" if arg.optional else f"{name}.is_contiguous()"


def all_contiguous(tensors: Sequence[Tensor | None] | None) -> bool:
    """Return whether all of ``tensors`` are contiguous. Members that are None are skipped. If ``tensors`` is None, the
    result is True.
    """
    return all(t is None or t.is_contiguous() for t in tensors or ())
