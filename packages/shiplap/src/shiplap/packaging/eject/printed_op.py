"""One op as plain Python: its functions, and the calls of ``torch.library`` that register them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shiplap.codegen.launcher import KernelLaunch, KernelParameter, WorkspaceFill, WorkspaceSort, parse_fact
from shiplap.declare.dim_expression import Expr
from shiplap.declare.gradient import Backward
from shiplap.declare.kernel import Kernel
from shiplap.declare.schema import dispatcher_tags, public_schema, schema_text
from shiplap.declare.spec import Arg
from shiplap.dispatch import Op
from shiplap.dispatch.python_kernel import PythonKernel
from shiplap.dispatch.registration import core_overload_name
from shiplap.kernels.triton.kernel import LaunchedKernel
from shiplap.kernels.triton.program import OPTIONS
from shiplap.packaging.eject.checks import CallPrinter
from shiplap.packaging.eject.copied_source import CannotCopy, SourceCopy


def literal(value: Any) -> str:
    """Return a Python expression for a plain value, such as a default. The expression of a tuple is a list."""
    # NaN and infinity have a repr that is no expression of Python.
    if (isinstance(value, float) and value != value) or value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, tuple):
        return repr(list(value))
    return repr(value)


def parameters(args: Sequence[Arg]) -> str:
    """Return the source code of a parameter list with the parameters and defaults of ``args``, without parentheses."""
    parts: list[str] = []
    for arg in args:
        if arg.keyword_only and "*" not in parts:
            parts.append("*")
        parts.append(f"{arg.name}={literal(arg.default)}" if arg.has_default else arg.name)
    return ", ".join(parts)


class PrintedOp:
    """The source code of one op in an ejected module, which does not use Shiplap.

    Attributes:
        native: the device types whose kernels are C functions, which a library in C++ registers.
        functions: the source code of each function.
        registrations: the lines that register the functions with torch.
    """

    def __init__(self, op: Op, name: str, copy: SourceCopy, native: Iterable[str]) -> None:
        """Prepare the source of ``op`` under ``name``. ``copy`` is the new module. Nothing is printed yet."""
        self.op, self.spec, self.name, self.copy = op, op.spec, name, copy
        self.native, self.functions, self.registrations = tuple(native), list[str](), list[str]()
        self.stem = op.spec.stem
        self.kernels = {d: usable_kernels(op, d) for d in op.kernels if d not in self.native}
        self.printer = CallPrinter(self.spec, op.plan, self.stem, copy, self._asked_names())
        self.core = core_overload_name(self.spec)
        self.given = [a.name for a in self.spec.args]

    @property
    def qualified(self) -> str:
        """The qualified name ``namespace::name`` of the torch op for which implementations are registered."""
        return f"{self.spec.namespace}::{self.core}"

    @property
    def handle(self) -> str:
        """The Python expression, in the ejected module, for the torch op for which implementations are registered."""
        return _torch_op(self.spec.namespace, self.core)

    def print(self) -> None:
        """Append the sources of all functions of the op to ``functions``, and the statements that register them with
        torch to ``registrations``. Raise ``CannotCopy`` if the source of a function cannot be copied.
        """
        self.functions.append(f"# {'-' * 4} {self.spec.name} {'-' * max(4, 105 - len(self.spec.name))}")
        if self.spec.view:
            self._print_view()
            return
        self.functions.append(self.printer.check_function())
        if memory := self.printer.memory_function():
            self.functions.append(memory)
        reference = self.copy.function(self.op.reference, f"{self.stem}_reference")
        if not self.native:
            self._define()
        self._implement(
            "default",
            [f"result = {self._call(reference)}", *self._write_marks(), *self._returns("result")],
            f"_{self.stem}_by_reference",
        )
        for device, kernels in self.kernels.items():
            self._print_device(device, kernels)
        self._print_fake(reference)
        if self.spec.returned:
            self._print_returning()
        self._print_autocast()
        if self.op.needs_autograd and not self.spec.mutated:
            self._print_autograd()
        if self.native and self.spec.mutated:
            written = {a.name: i for i, a in enumerate(self.spec.args) if a.mutated}
            self.registrations.append(
                f"support.watch_writes({self._library()}, {self.core!r}, {self.handle}, {written!r})"
            )
        self.registrations.append(f"{self.name} = {_torch_op(self.spec.namespace, self.spec.opname)}")

    # --- the parts ----------------------------------------------------------------------------------------------------

    def _asked_names(self) -> set[str]:
        """Return the names of the sizes that the expressions of the op's launches and scratch memory read."""
        names: set[str] = set()
        for kernel in (k for kernels in self.kernels.values() for k in kernels):
            names |= kernel.workspace.names if kernel.workspace is not None else set()
            if isinstance(kernel, LaunchedKernel):
                program = kernel.native.program
                exprs = [e for s in program.steps for e in (*s.exprs, *([s.when] if s.when else []))]
                found = {n for e in (*exprs, *(e for _, e in program.values)) for n in e.names}
                fixed = {p.name for launch in program.launches for p in launch.parameters} | {
                    n for n, _ in program.values
                }
                dims = {d.text for a in self.spec.tensors if a.tensor for d in a.tensor.dims} | {
                    n for n, _ in self.spec.dims
                }
                names |= {n for n in found if n in dims or (n not in fixed and not parse_fact(n))} - {*OPTIONS}
        return names & self._sizes()

    def _sizes(self) -> set[str]:
        """Return the names of all dims of the op's tensor arguments and of computed dims."""
        dims = {d.text for a in self.spec.tensors if a.tensor for d in a.tensor.dims if d.kind in ("name", "variadic")}
        return dims | {name for name, _ in self.spec.dims}

    def _define(self) -> None:
        """Append to ``registrations`` the lines that define the op's torch schemas, first the one that users call."""
        tags = ", ".join(f"torch.Tag.{t.name}" for t in dispatcher_tags(self.spec))
        texts = [public_schema(self.spec, self.spec.opname)] if self.spec.returned else []
        texts.append(
            schema_text(self.spec, self.core)
            if not self.spec.returns or self.spec.returned
            else public_schema(self.spec, self.core)
        )
        library = self._library()
        self.registrations += [f"{library}.define({text!r}, tags=({tags},))" for text in texts]

    def _library(self) -> str:
        """Return the name of the variable that holds the torch library in which the op is defined."""
        return f"_{self.spec.namespace}"

    def _implement(self, device: str, body: list[str], name: str) -> None:
        """Append to ``functions`` the source of a function ``name`` that checks the arguments and runs the lines
        ``body``. Append to ``registrations`` the statement that makes it the op's implementation for ``device``.
        """
        # torch.library registers an implementation for "default" for all devices without one of their own.
        where = "where no kernel takes the call" if device == "default" else f"on {device}"
        self._function(
            name,
            parameters(self.spec.args),
            f"The implementation of {self.spec.name} {where}.",
            self.printer.call(body),
        )
        self.registrations.append(f"torch.library.impl({self.qualified!r}, {device!r}, {name}, lib={self._library()})")

    def _function(self, name: str, takes: str, doc: str, body: Iterable[str]) -> None:
        """Append to ``functions`` the source of a function ``name``. It has the parameter list ``takes``, the docstring
        ``doc`` and the lines ``body``.
        """
        lines = [f"    {line}" if line else "" for line in body]
        self.functions.append("\n".join([f"def {name}({takes}):", f'    """{doc}"""', *lines]))

    def _call(self, function: str) -> str:
        """Return the source of a call of ``function`` that passes on the op's own parameters."""
        given = [f"{a.name}={a.name}" if a.keyword_only else a.name for a in self.spec.args]
        return f"{function}({', '.join(given)})"

    def _write_marks(self) -> list[str]:
        """Return the lines that report to autograd, by ``support.written``, which arguments the op writes to."""
        return [f"support.written({name}, {name})" for name in self.spec.mutated]

    def _returns(self, result: str) -> list[str]:
        """Return the lines that return the results of the op's reference, held in the variable ``result``. Views of
        arguments are copied. Arguments that the reference returns after writing to them are left out.
        """
        if self.spec.results and self.spec.returned:  # the reference returns the arguments that it wrote to, too
            places = [i for i, r in enumerate(self.spec.returns) if not r.alias]
            result = f"({''.join(f'{result}[{i}], ' for i in places)})" if len(places) > 1 else f"{result}[{places[0]}]"
        return self._owned_return(result)

    def _checked_return(self, results: str) -> list[str]:
        """Return the lines that return ``results``, after a check that data-dependent sizes keep their bounds."""
        checks = [line for dim, expr in self.spec.bounds for line in self._bound_check(dim, expr)]
        return [f"results = {results}", *checks, "return results"] if checks else [f"return {results}"]

    def _bound_check(self, dim: str, expr: Expr) -> list[str]:
        """Return a line, in a list, that checks that the data-dependent size ``dim`` is at most ``expr``. If no output
        has the size, the list is empty.
        """
        at = next(
            (
                (i, axis)
                for i, o in enumerate(self.spec.outputs)
                for axis, d in enumerate(o.tensor.dims)
                if d.text == dim
            ),
            None,
        )
        if at is None:
            return []
        value = f"{'results' if len(self.spec.outputs) == 1 else f'results[{at[0]}]'}.shape[{at[1]}]"
        texts = [
            repr("an output is larger than its bound"),
            repr(self.spec.name),
            f"'{dim} = {{}}'.format({value})",
            f"'{dim} <= {{}}'.format({self.printer.expression(expr)})",
            repr("correct the kernel"),
        ]
        return [f"support.expect({value} <= {self.printer.expression(expr)}, lambda: ({', '.join(texts)}))"]

    def _print_device(self, device: str, kernels: Sequence[Kernel]) -> None:
        """Append the op's implementation for ``device`` to ``functions``, and its registration to ``registrations``. At
        run time the first of ``kernels`` that accepts the call runs it. If none accepts it, the reference runs.
        """
        body: list[str] = []
        for index, kernel in enumerate(kernels):
            condition = self._condition(kernel)
            lines = self._launch(kernel, f"_{self.stem}_{device}" + (f"_{index}" if index else ""))
            body += [f"if {condition}:", *(f"    {line}" for line in lines)] if condition else lines
            # It takes all calls: kernels behind it and the reference are never reached.
            if not condition:
                break
        else:
            body += [f"result = {self._call(f'{self.stem}_reference')}", *self._write_marks(), *self._returns("result")]
        name = f"_{self.stem}_on_{device}"
        self._implement(device, body, name)
        if any(isinstance(k, LaunchedKernel) for k in kernels) and device == "cuda" and "cpu" not in self.kernels:
            self.copy.imports["import os"] = None
            self.registrations += [
                'if os.environ.get("TRITON_INTERPRET") == "1":  # Triton\'s interpreter runs kernels on the CPU',
                f'    torch.library.impl({self.qualified!r}, "cpu", {name}, lib={self._library()})',
            ]

    def _condition(self, kernel: Kernel) -> str:
        """Return the Python condition under which ``kernel`` accepts a call, or an empty string if it accepts all."""
        parts = []
        if kernel.dtypes:
            names = ", ".join(f"torch.{n}" for n in kernel.dtypes)
            parts += [f"dtype_{c} in ({names},)" for c in self.spec.dtype_classes]
        if kernel.supports is not None:
            function = self.copy.function(kernel.supports, f"_{self.stem}_{kernel.name}_supports")
            takes = inspect.signature(kernel.supports).parameters
            parts.append(f"{function}({', '.join(f'{n}={n}' for n in takes)}) is True")
        return " and ".join(parts)

    def _launch(self, kernel: Kernel, name: str) -> list[str]:
        """Return the lines that run ``kernel``. The copy of a Python function gets a name that begins with ``name``."""
        if isinstance(kernel, LaunchedKernel):
            return self._launch_triton(kernel)
        assert isinstance(kernel, PythonKernel)
        function = self.copy.function(kernel.function, f"{name}_kernel")
        free = kernel.strided | {a.name for a in self.spec.args if a.contiguous}
        names = {a.name: a.name for a in self.spec.args}
        lines: list[str] = []
        for arg in self.spec.tensors:
            if arg.name not in free:
                names[arg.name] = f"c_{arg.name}"
                lines.append(f"c_{arg.name} = support.contiguous({arg.name})")
        given = [f"{a}={v}" for a, v in names.items()]
        if kernel.wants_workspace:
            lines += self._workspace(kernel)
            given.append(f"{kernel.scratch}=scratch")
        config = kernel.space.static if kernel.space is not None else None
        given += [f"{k}={literal(v)}" for k, v in (config.items if config is not None else ())]
        wrote = [f"support.written({n}, {names[n]})" for n in self.spec.mutated]
        if not kernel.out_style:
            return [*lines, f"result = {function}({', '.join(given)})", *wrote, *self._owned_return("result")]
        given += [f"{o}=t_{o}" for o in kernel.outputs]
        outs = ", ".join(f"t_{o}" for o in kernel.outputs)
        return [*lines, *self.printer.allocated(), f"{function}({', '.join(given)})", *wrote, f"return {outs}"]

    def _owned_return(self, result: str) -> list[str]:
        """Return the lines that return the op's results, the value of the expression ``result``. Views of arguments are
        copied.
        """
        if not self.spec.results:
            return ["return None"]
        return self._checked_return(f"support.owned({', '.join([result, *(a.name for a in self.spec.tensors)])})")

    def _workspace(self, kernel: Kernel) -> list[str]:
        """Return the lines that allocate the scratch memory of a kernel and assign it to the variable ``scratch``."""
        expr, lines = kernel.workspace, list[str]()
        text = self.printer.expression(expr) if expr is not None else "0"
        if expr is not None and "threads" in expr.names:
            lines.append("w_threads = torch.get_num_threads()")
        if expr is not None and "itemsize" in expr.names:
            sizes = [f"dtype_{c}.itemsize" for c in self.spec.dtype_classes] or [
                f"{a.name}.element_size()" for a in self.spec.tensors if not a.optional
            ]
            lines.append(f"w_itemsize = max([{', '.join(sizes)}])")
        return [*lines, f"scratch = torch.empty({text}, dtype=torch.uint8, device=device)"]

    # --- Triton ---------------------------------------------------------------------------------------------------

    def _launch_triton(self, kernel: LaunchedKernel) -> list[str]:
        """Return the lines that allocate outputs and launch a Triton kernel. Raise ``CannotCopy`` if plain Python
        cannot do what the kernel's launch needs, such as report errors late.
        """
        form, lines = kernel.native, list[str]()
        program, declared = form.program, list(form.given.steps)
        if program.late:
            raise CannotCopy("its Triton kernel reports errors late")
        for arg in self.spec.tensors:
            if arg.name not in form.strided:
                lines.append(f"t_{arg.name} = support.contiguous({arg.name})")
            else:
                lines.append(f"t_{arg.name} = {arg.name}")
        lines += self.printer.allocated()
        if kernel.workspace is not None:
            lines += self._workspace(kernel)
        for name, expr in program.values:
            lines.append(f"n_{name} = {self._number(expr, {}, dict(program.values))}")
        config = dict(kernel.space.static.items) if kernel.space is not None and kernel.space.static is not None else {}
        first = next(a.name for a in self.spec.tensors if not a.optional)
        inside: list[str] = []
        for step, given in zip(program.steps, declared, strict=True):
            made = self._step(step, given, config, dict(program.values))
            if step.when is not None:
                made = [f"if {self._number(step.when, {}, dict(program.values))}:", *(f"    {line}" for line in made)]
            inside += made
        wrote = [f"support.written({n}, t_{n})" for n in self.spec.mutated]
        outs = ", ".join(f"t_{o.name}" for o in self.spec.outputs) or "None"
        # Triton launches on the current device.
        guard = f"with torch.cuda.device_of({first}):"
        return [*lines, guard, *(f"    {line}" for line in inside), *wrote, f"return {outs}"]

    def _step(self, step: Any, declared: Any, config: Mapping[str, Any], values: Mapping[str, Expr]) -> list[str]:
        """Return the lines of one step of a Triton kernel, which is a fill of the workspace or a launch. ``config``
        holds tuning parameters, ``values`` named integers. Raise ``CannotCopy`` for a step that sorts.
        """
        match step:
            case WorkspaceFill(offset, size, byte):
                start, length = (self._number(e, {}, values) for e in (offset, size))
                return [f"scratch[{start} : {start} + {length}].fill_({byte})"]
            case WorkspaceSort():
                raise CannotCopy("its Triton kernel has a step that sorts the workspace")
        assert isinstance(step, KernelLaunch)
        function = self.copy.triton_function(declared.kernel)
        fixed = {
            p.name: self._parameter(p, config, {}, values)
            for p in step.parameters
            if p.kind in ("constant", "config", "computed")
        }
        given = [f"{p.name}={fixed.get(p.name) or self._parameter(p, config, fixed, values)}" for p in step.parameters]
        options = {n: v for n, v in {**declared.constants, **config}.items() if n in OPTIONS}
        given += [f"{n}={v!r}" for n, v in options.items()]
        grid = ", ".join(
            self._number(e, {**fixed, **{n: repr(v) for n, v in config.items()}}, values) for e in step.grid
        )
        return [f"{function}[({grid},)](", *(f"    {each}," for each in given), ")"]

    def _parameter(
        self, p: KernelParameter, config: Mapping[str, Any], fixed: Mapping[str, str], values: Mapping[str, Expr]
    ) -> str:
        """Return the value of parameter ``p`` at a launch as Python source. ``config`` holds tuning parameters,
        ``fixed`` compile-time values as source, and ``values`` named integers. Raise ``CannotCopy`` if ``p`` has none.
        """
        match p.kind:
            case "constant":
                return literal(p.value)
            case "config":
                return literal(config[p.name])
            case "tensor":
                return f"t_{p.source}"
            case "scratch":
                start = self._number(p.expr, fixed, values) if p.expr is not None else "0"
                return f"scratch[{start} :].view(torch.{p.source})"
            case "real32" | "real64" | "boolean":
                return p.source or literal(p.value)
            case "integer" | "computed" if p.expr is not None:
                return self._number(p.expr, fixed, values)
        raise CannotCopy(f"its Triton kernel takes {p.name} in a way that has no plain form")

    def _number(self, expr: Expr, fixed: Mapping[str, str], values: Mapping[str, Expr]) -> str:
        """Return an integer expression of a launch, such as ``n * stride``, as Python source. ``fixed`` holds
        compile-time values as source, and ``values`` the integers that the author named.
        """
        scalars = {a.name for a in self.spec.scalars}

        def variable(name: str) -> str:
            """Return the Python source that stands for ``name`` in the converted expression. ``name`` is a compile-time
            value, a property of a tensor such as a stride, an integer that the author named, a scalar or a size.
            """
            if name in fixed:
                return fixed[name]
            if (fact := parse_fact(name)) is not None and name not in scalars:
                kind, tensor, axis = fact
                return {"numel": f"t_{tensor}.numel()", "size": f"t_{tensor}.shape[{axis}]"}.get(
                    kind, f"t_{tensor}.stride({axis})"
                )
            return f"n_{name}" if name in values else name if name in scalars else f"d_{name}"

        return self.printer.text_with(expr, variable)

    # --- what torch asks of the op ----------------------------------------------------------------------------------

    def _print_fake(self, reference: str) -> None:
        """Append the op's fake implementation to ``functions`` and register it. It returns tensors without data, which
        it allocates by the declared dims. Without declared outputs, the copied function ``reference`` makes them.
        """
        body: list[str] = []
        if self.spec.traced:
            body += [
                f"result = {self._call(reference)}",
                *(self._returns("result") if self.spec.results else ["return None"]),
            ]
        else:
            for dim, expr in self.spec.bounds:
                variable = self.op.plan.names(dim)
                body += [
                    f"{variable} = torch.library.get_ctx().new_dynamic_size()",
                    f"torch._check({variable} <= {self.printer.expression(expr)})",
                ]
            body += [
                *self.printer.allocated(),
                f"return {', '.join(f't_{o.name}' for o in self.spec.outputs) or 'None'}",
            ]
        doc, body = f"The shapes and dtypes of {self.spec.name}.", self.printer.call(body, memory=False)
        self._function(f"_{self.stem}_fake", parameters(self.spec.args), doc, body)
        self.registrations.append(
            f"torch.library.register_fake({self.qualified!r}, _{self.stem}_fake, lib={self._library()})"
        )

    def _print_returning(self) -> None:
        """Append to ``functions`` the op that users call if an op returns arguments which it writes to, and register
        it. It calls the inner op, which writes to them, and returns them together with the inner op's results.
        """
        made = iter(range(len(self.spec.results)))
        count = len(self.spec.results)
        parts = [r.alias or ("made" if count == 1 else f"made[{next(made)}]") for r in self.spec.returns]
        body = [f"made = {self._call(self.handle)}", f"return {', '.join(parts)}"]
        name = f"_{self.stem}_returning"
        self._function(name, parameters(self.spec.args), f"Write, and return the results of {self.spec.name}.", body)
        self.registrations.append(f'{self._library()}.impl({self.spec.opname!r}, {name}, "CompositeImplicitAutograd")')

    def _print_view(self) -> None:
        """Append to ``functions`` a copy of the reference of an op that may return views, and register it as the op."""
        reference = self.copy.function(self.op.reference, f"{self.stem}_reference")
        self.functions.append(self.printer.check_function())
        self.registrations.append(f"{self._library()}.define({public_schema(self.spec, self.spec.opname)!r})")
        name = f"_{self.stem}_composed"
        self._function(
            name,
            parameters(self.spec.args),
            f"{self.spec.name}, made of torch's ops.",
            self.printer.call([f"return {self._call(reference)}"]),
        )
        self.registrations.append(f'{self._library()}.impl({self.spec.opname!r}, {name}, "CompositeImplicitAutograd")')
        self.registrations.append(f"{self.name} = {_torch_op(self.spec.namespace, self.spec.opname)}")

    def _print_autocast(self) -> None:
        """Append the op's rule for autocast regions to ``functions``, and its registration to ``registrations``.
        Arguments whose declared dtypes must agree are cast to one dtype. Kernels run outside autocast.
        """
        groups: dict[str, list[Arg]] = {}
        for arg in self.spec.tensors:
            if arg.tensor is not None and not arg.tensor.concrete:
                groups.setdefault(arg.tensor.dtype_class, []).append(arg)
        lines = []
        for args in groups.values() if self.spec.autocast is not None else ():
            written = [a for a in args if a.mutated] or args
            rule = "widest" if written is not args else self.spec.autocast
            lines.append(
                f"kind = support.autocast_dtype({rule!r}, device_type, [{', '.join(a.name for a in written)}])"
            )
            lines += [f"{a.name} = support.cast({a.name}, kind)" for a in args if not a.mutated]
        inner = parameters(self.spec.args)
        body = [
            f"def call({inner}):",
            *(f"    {line}" for line in lines),
            "    with torch.autocast(device_type, enabled=False):",
            f"        return {self._call(self.handle)}",
            "",
            "return call",
        ]
        self._function(
            f"_{self.stem}_autocast",
            "device_type",
            f"The call of {self.spec.name} in an autocast region of a device type.",
            body,
        )
        for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            self.registrations.append(
                f'{self._library()}.impl({self.core!r}, _{self.stem}_autocast("{device}"), "{key}")'
            )

    def _print_autograd(self) -> None:
        """Append the op's gradient and register it. If the op has none, register a function that raises an error."""
        backward = self.op.gradient
        if backward is None:
            missing = f"support.no_gradient({self.spec.name!r})"
            self.registrations.append(
                f"torch.library.register_autograd({self.qualified!r}, {missing}, lib={self._library()})"
            )
            return
        self._print_setup(backward)
        self._print_backward(backward)
        self.registrations += [
            "torch.library.register_autograd(",
            f"    {self.qualified!r}, _{self.stem}_backward, setup_context=_{self.stem}_setup, lib={self._library()}",
            ")",
        ]

    def _print_setup(self, backward: Backward) -> None:
        """Append to ``functions`` the function that saves the tensors and scalars that ``backward`` reads."""
        results = list(self.spec.results)
        positional = [a.name for a in self.spec.args if not a.keyword_only]
        keyword = [a.name for a in self.spec.args if a.keyword_only]
        lines = [f"{', '.join(positional)}{',' * (len(positional) == 1)} = inputs"]
        lines += [f"{name} = keyword_only_inputs[{name!r}]" for name in keyword]
        values = {name: f"output[{i}]" if len(results) > 1 else "output" for i, name in enumerate(results)}
        tensors = [n for n in backward.saves if n in values or self.spec.arg(n).tensor is not None]
        others = [a.name for a in self.spec.scalars]
        kept = ", ".join(f"{n!r}: {values.get(n, n)}" for n in tensors)
        lines.append(f"support.save(ctx, {{{kept}}}, {{{', '.join(f'{n!r}: {n}' for n in others)}}})")
        cut = [values[n] for n in results if n in self.spec.detached]
        if cut:
            lines.append(f"ctx.mark_non_differentiable({', '.join(cut)})")
        takes = "ctx, inputs, keyword_only_inputs, output" if keyword else "ctx, inputs, output"
        self._function(f"_{self.stem}_setup", takes, f"Keep what the backward of {self.spec.name} reads.", lines)

    def _print_backward(self, backward: Backward) -> None:
        """Append to ``functions`` the function that computes gradients of arguments from those of results."""
        results, positional = self.spec.results, [a for a in self.spec.args if not a.keyword_only]
        single = len(results) == 1
        lines = ["values = support.saved(ctx)", f"asked = support.asked(ctx, {len(positional)})"]
        needs = ", ".join(
            f"{a.name}=support.needed(asked[{i}])" if a.name not in self.spec.detached else f"{a.name}=False"
            for i, a in enumerate(positional)
            if a.tensor is not None
        )
        lines.append(f"needs = support.Values({needs})")
        grads = "grads[0]" if single else "grads"
        if not backward.strided:
            lines += [
                f"values.{n} = support.contiguous(values.{n})"
                for n in backward.saves
                if n in results or self.spec.arg(n).tensor is not None
            ]
            grads = f"support.contiguous({grads})" if single else "tuple(support.contiguous(g) for g in grads)"
        if backward.ops:
            lines += self._gradient_ops(backward)
        else:
            function = self.copy.function(backward.function, f"_{self.stem}_gradient")
            given = {"saved": "values", "needs": "needs"}
            takes = inspect.signature(backward.function).parameters
            lines.append(f"gradients = {function}({', '.join(f'{p}={given.get(p, grads)}' for p in takes)})")
        answers = [
            f"support.gradient(gradients, {a.name!r}, asked[{i}]) if needs.{a.name} else None"
            if a.tensor is not None and not a.many
            else f"support.gradient(gradients, {a.name!r}, asked[{i}])"
            if a.many
            else "None"
            for i, a in enumerate(positional)
        ]
        lines += ["answers = (", *(f"    {a}," for a in answers), ")"]
        # torch asks for as many gradients as the call passed arguments.
        lines.append("return answers[: len(ctx.needs_input_grad)]")
        self._function(f"_{self.stem}_backward", "ctx, *grads", f"The gradients of {self.spec.name}.", lines)

    def _gradient_ops(self, backward: Backward) -> list[str]:
        """Return the lines that call the ops of the gradient formula and collect the results in ``gradients``."""
        lines = ["gradients = {}"]
        for part in backward.ops:
            op: Any = part.op
            name = self.copy.op_name(op)
            given = ", ".join(f"{n}=grads[{at}]" if at >= 0 else f"{n}=values.{n}" for n, at in part.takes(self.spec))
            asked = " or ".join(f"needs.{n}" for n in part.gives)
            made = f"{name}({given})"
            names = ", ".join(repr(n) for n in part.gives)
            made = f"({made},)" if len(part.gives) == 1 else made
            lines += [f"if {asked}:", f"    gradients.update(zip(({names},), {made}, strict=True))"]
        return lines


def _torch_op(namespace: str, name: str) -> str:
    """Return the Python expression for a torch op. ``name`` may end in an overload, as in ``add.out``."""
    packet, _, overload = name.partition(".")
    return f"torch.ops.{namespace}.{packet}.{overload or 'default'}"


def usable_kernels(op: Op, device: str) -> list[Kernel]:
    """Return the kernels of an op on a device in the order in which they are tried, without templates.

    On the CPU, Triton kernels are left out. They are the kernels of CUDA, which only Triton's interpreter runs there.
    """
    kernels = op.native_kernels(device)
    return [k for k in kernels if not (device == "cpu" and isinstance(k, LaunchedKernel))]
