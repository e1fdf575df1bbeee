"""``@sl.op`` makes a registered torch op from a declaration. The body is the reference. Kernels and gradient attach.

The steps of a call, and the file of each::

    op(x, y)                 torch_private/dispatcher_calls.py  does anything but a kernel have to see this call?
    |- no: op.call_kernel    dispatch/fast_paths.py             a generated function checks, looks up and launches
    |                                                           or torch's dispatcher, below autograd, calls native code
    `- yes: op._call_dispatcher dispatch/op.py                   a trace, a transform, autocast, autograd, or keywords
       |- op.record_call     dispatch/autograd.py               autograd alone: recorded, then as `call_kernel`
       `- op.overload        torch                              the dispatcher calls its layers, and `execute` last
    op.execute               dispatch/execute.py                below autograd and autocast:
       op.bind               plan/call_plan.py                  checks arguments, binds names to sizes: a Binding
       op.pick_kernel        dispatch/tuned_choices.py          the choice in force, or the first kernel that fits
       op.run_bound_call     dispatch/execute.py                Kernel.run_call, or the reference

:meth:`Op._explain_failure` turns the error of a failed call into one of the catalogue.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import unwrap
from types import FunctionType
from typing import Any, NoReturn, TypedDict, TypeVar, Unpack, cast, overload

from torch import Tensor

from shiplap.declare import code_walk
from shiplap.declare.batch import read_batching
from shiplap.declare.bucket import read_bucket_rule
from shiplap.declare.choices import convert_call
from shiplap.declare.gradient import Backward, GradientFn, Surrogate
from shiplap.declare.kernel import (
    Implementation,
    Kernel,
    KernelKeywords,
    read_terms,
    require_device_type,
    template_kernel,
)
from shiplap.declare.schema import BELOW_AUTOGRAD, public_schema
from shiplap.declare.sharding_rule import failure_hooks
from shiplap.declare.signature import DeclarationKeywords, check_keyword_names, check_keywords, check_op_name, read_spec
from shiplap.declare.spec import OpSpec
from shiplap.declare.template import Template, TemplateKeywords, Traced, read_template
from shiplap.declare.values import Result, Returned, Value
from shiplap.dispatch import compile_cache_key, tuned_choices
from shiplap.dispatch.autocast import explain_autocast
from shiplap.dispatch.endless_calls import op_calls_itself
from shiplap.dispatch.launch import workspace_size
from shiplap.dispatch.python_kernel import PythonFunction
from shiplap.dispatch.registration import RegisteredOp
from shiplap.dispatch.state import Sampler, bind_sampler
from shiplap.errors import ShiplapError, error, notice
from shiplap.torch_private import dispatcher_calls
from shiplap.torch_private.dispatcher_calls import P, R
from shiplap.torch_private.dispatcher_transforms import show_to_scripts
from shiplap.torch_private.graph_keys import TORCHS_OWN

Function = TypeVar("Function", bound=Callable[..., Returned])
Code = TypeVar("Code", bound=Callable[..., Returned] | Implementation)
Gradient = TypeVar("Gradient", bound=GradientFn)
Samples = TypeVar("Samples", bound=Sampler)

compile_cache_key.add_key_part(lambda op: BELOW_AUTOGRAD)  # compiled code names it
builders: list[Callable[[Op], object]] = []  # the package `shiplap` adds the one of `shiplap.kernels`
declared_ops: dict[str, Op] = {}  # by name; `dispatch/registry.py` shows them
# Set here, since declare must not import dispatch.
code_walk.find_op = declared_ops.get


class BackwardKeywords(TypedDict, total=False):
    """The keywords of ``Op.backward``, whose docstring explains them."""

    saves: Iterable[str] | None
    surrogate: Surrogate | None
    strided: bool
    once_differentiable: bool | None


# The names of an op that docs/concepts.md lists. The layers below use the internal ones of dispatch/state.py.
PUBLIC_NAMES = frozenset(
    {
        "adoption",
        "backward",
        "batches",
        "buckets",
        "build",
        "kernel",
        "kernels",
        "out",
        "overload",
        "reference",
        "samples",
        "sharding",
        "spec",
        "template",
        "workspace_bytes",
    }
)


class Op(dispatcher_calls.DirectCall[P, R], RegisteredOp):
    """A declared op. Call it like the function that declares it.

    ``dir(op)`` lists only ``PUBLIC_NAMES``, which are for users. ``OpState`` (dispatch/state.py) documents the internal
    attributes. ``overload`` and ``below_autograd`` are the torch ops that Shiplap registers for it.
    """

    _public_names = PUBLIC_NAMES
    reference: Callable[P, R]
    adoption: object = None  # what it has taken from an implementation that existed, see dispatch/adopt.py

    def __init__(self, spec: OpSpec, reference: Callable[P, R]) -> None:
        """Register the op ``spec`` with torch. Its name, docstring, module and signature are those of its reference."""
        super().__init__(spec, reference)
        self._former: list[Op] = []
        self._register()
        self.__name__, self.__doc__, self.__module__ = spec.opname, reference.__doc__, reference.__module__
        self.__signature__ = self.signature

    # --- calls (the module says how they go on) ----------------------------------------------------------------------

    def _call_dispatcher(self, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Result:
        """Return the result of the op, called through torch's dispatcher. If the dispatcher would only reach the
        function that records for autograd or the one that converts for autocast, call that function directly.
        """
        if self.plan.numbers is not None:
            self.plan.numbers(args, kwargs)
        # Dynamo has to see the op itself, so a traced call goes through the dispatcher.
        own = self.can_skip_dispatcher and not dispatcher_calls.is_dynamo_compiling()
        if own and not kwargs and dispatcher_calls.is_recorded_call(args):
            return self.record_call(None, *args)
        if own and not kwargs and self.cast is not None and (kind := dispatcher_calls.autocast_alone(args)) is not None:
            return self.call_converted(*self.cast(kind, tuple(args)))
        plain = own and not self.spec.mutated and dispatcher_calls.is_plain_call(args, kwargs)
        result: Result = (dispatcher_calls.builtin_of(self.below_autograd) if plain else self.overload)(*args, **kwargs)
        return result

    def _call_traced(self, args: Sequence[Value], kwargs: Mapping[str, Value]) -> Result:
        """Return the result of the op's overload while Dynamo traces it. First refuse scalars given as tensors with a
        gradient.
        """
        if (check := self.plan.numbers) is not None:
            check(args, kwargs)
        result: Result = self.overload(*args, **kwargs)
        return result

    def _explain_failure(self, args: Sequence[Value], kwargs: Mapping[str, Value], cause: Exception) -> bool:
        """Raise the catalogue error that explains ``cause``, the exception of a failed call. If there is none, return
        whether the call is to be repeated, because a failure hook has repaired the cause. A failure hook is a function
        that another part of Shiplap has registered.
        """
        if not isinstance(cause, ShiplapError) and (wrong := self.refusal(cause) or self.plan.misfit(args, kwargs)):
            raise (dispatcher_calls.any_autocast() and explain_autocast(args, kwargs, wrong)) or wrong from None
        if isinstance(cause, RecursionError) and op_calls_itself(self, cause):
            raise error("SL319", where=self.spec.name, got=f"{cause}", expected="a function without a call of the op")
        if isinstance(cause, ShiplapError):
            about_autocast = dispatcher_calls.any_autocast() and explain_autocast(args, kwargs, cause)
            if about_autocast:
                raise about_autocast from None
        return any(hook(self, (*args, *kwargs.values()), cause) for hook in failure_hooks)

    def out(
        self, *args: Value, out: Tensor | Sequence[Tensor], workspace: Tensor | None = None, **kwargs: Value
    ) -> Tensor | Sequence[Tensor]:
        """Run the op into ``out`` and return it. ``out`` is one contiguous tensor, or a sequence with one for each
        output.

        ``workspace`` is a uint8 tensor of at least ``workspace_bytes(...)`` bytes, aligned to 64 bytes. Without
        ``workspace=``, Shiplap allocates the scratch memory of the kernel. If the kernel needs an argument contiguous
        and it is not, the argument is copied. No gradient is recorded. The version of ``out`` is counted up, so that
        autograd notices the change. Native code runs a call with lists of tensors only where gradients are off, for
        example under ``torch.no_grad()``.

        Raises:
            ArgumentError: ``SL210``, ``SL212`` or ``SL213`` if tensors overlap, do not fit or are too small.
            KernelError: ``SL304`` if a gradient is requested.
            TypeError: the op's outputs have data-dependent sizes, or the op has no output.
        """
        if self.variant is None:
            raise TypeError(f"{self!r} has no out-variant: no outputs, sizes that depend on data, or an adopted op")
        return self.variant(args, kwargs, out, workspace)

    def workspace_bytes(self, *args: Value, **kwargs: Value) -> int:
        """Return the number of bytes of scratch memory that the kernel for these arguments needs. Return 0 if it needs
        none, or if the reference implementation would run.
        """
        kernel = self.pick_kernel(call := self.bind(self.spec.complete(args, kwargs)))
        return workspace_size(kernel.workspace, call) if kernel is not None else 0

    # --- what an author attaches --------------------------------------------------------------------------------------

    @overload
    def kernel(self, device: str, implementation: Code, **keywords: Unpack[KernelKeywords]) -> Code: ...

    @overload
    def kernel(
        self, device: str, implementation: None = None, **keywords: Unpack[KernelKeywords]
    ) -> Callable[[Function], Function]: ...

    def kernel(
        self, device: str, implementation: Code | None = None, **keywords: Unpack[KernelKeywords]
    ) -> Code | Callable[[Function], Function]:
        """Bind a kernel for ``device`` (a device type such as ``"cpu"``). The kernel bound last is tried first.

        ``implementation`` is a Python function (out-style or functional) or an :class:`Implementation` such as
        ``sl.cabi(...)``. Return ``implementation``. If it is not given, return a decorator for a function. A second
        kernel of the same name replaces the first.

        The parameters of a function must have the names of the op's arguments. Values are passed by these names, so the
        order does not matter. Tensors arrive contiguous. A strided tensor is passed as a copy, which is copied back if
        the op writes to the tensor.

        Args:
            name: the name of the kernel, by default that of the implementation.
            workspace: a dim expression, in bytes. The expression may use ``threads`` and ``itemsize``.
            dtypes: the dtypes that the kernel accepts, where the declaration accepts more.
            supports: a function of those arguments that it names. It returns True, or the reason why the kernel cannot
                run the call. A kernel with ``supports`` is not bound natively.
            strided: the names of the tensors that a Python kernel takes with any strides, or True for all.
            configs: the values of the compile-time parameters among which :func:`shiplap.tune` chooses. They are a list
                of dicts, or a function of the sizes that returns one. A Python kernel gets the values as keywords.
            default: the config that runs without a tuned choice, as a dict or a function of the sizes. By default it is
                the first config.
            prior: a function of sizes and a config that estimates a time in any unit. Tuning of many configs starts
                with the lowest estimates.
        """
        check_keywords(f"{self.spec.name}, kernel", keywords, KernelKeywords)
        self._extend("kernels are")
        require_device_type(self.spec, device)
        if implementation is None:

            def decorate(function: Function) -> Function:
                """Bind ``function`` as the kernel of the enclosing ``kernel`` call, and return it."""
                return self.kernel(device, function, **keywords)

            return decorate
        self._name_foreign_author(f"a kernel for {device}")
        code = implementation if isinstance(implementation, Implementation) else PythonFunction(implementation)
        # All terms are read before the first kernel is attached, so that an error leaves the op as it was.
        for terms in [read_terms(self.spec, code, each, **keywords) for each in code.devices(device)]:
            self._attach(code.bind(self.spec, terms))
        return implementation

    def template(self, device: str, source: str | Traced, **keywords: Unpack[TemplateKeywords]) -> Template:
        """Bind a templated kernel for ``device`` and return it. ``source`` is a ``*.triton.jinja`` or ``*.cpp.jinja``
        file beside the declaration, or a function of PyTorch with the reference's parameters.

        Inductor fuses neighbouring operations into a template. A Triton template also runs eager calls, as a kernel of
        the same name. Inductor tunes and fuses the code of a function. A second template of the same name replaces the
        first. :class:`TemplateKeywords` documents the keywords.
        """
        check_keywords(f"{self.spec.name}, template", keywords, TemplateKeywords)
        require_device_type(self.spec, device)
        self._name_foreign_author(f"a template for {device}")
        template = read_template(self.spec, self.file, device, source, **keywords)
        # A template declared again, as when a cell runs twice, replaces the first.
        others = [t for t in self.templates.get(template.device, []) if t.name != template.name]
        self.templates[template.device] = [*others, template]
        if (kernel := template_kernel(self.spec, template)) is not None:
            self._attach(kernel)
        tuned_choices.forget_derived_choices()
        return template

    @overload
    def backward(self, fn: Gradient, *more: Op, **keywords: Unpack[BackwardKeywords]) -> Gradient: ...

    @overload
    def backward(self, fn: None = None, **keywords: Unpack[BackwardKeywords]) -> Callable[[Gradient], Gradient]: ...

    def backward(
        self, fn: Gradient | None = None, *more: Op, **keywords: Unpack[BackwardKeywords]
    ) -> Gradient | Callable[[Gradient], Gradient]:
        """Declare the gradient as ``fn(grad, saved, needs) -> {argument: gradient}``, written with other ops.

        ``grad`` is the gradient of the output, or a tuple of gradients for several outputs. ``saved`` has every scalar,
        and the tensor arguments and results that the function reads. They are found in its code. ``saves`` names them
        where the code does not show them, as in ``getattr(saved, name)``. ``needs.<argument>`` is True if autograd uses
        the gradient of that argument. In ``grad``, the entry of a result in ``nondifferentiable=`` is a zero.

        Gradients and saved tensors are contiguous, so that the function may launch kernels on their memory.
        ``strided=True`` passes them with any strides, for a function whose operations all accept any strides.

        ``once_differentiable=True`` refuses a gradient of the gradient (``SL313``). By default the backward is examined
        when such a gradient is requested. If autograd does not record all of it, the gradients there are computed from
        the reference, or they are refused. ``False`` states that autograd may differentiate the backward as it is, and
        nothing is examined.

        ``surrogate`` is a function in plain PyTorch with the parameters of the reference. The gradient and the tangent
        (the forward derivative) are then those of that function, as in a straight-through estimator. The audit compares
        with it.

        In place of a function, ``fn`` and ``more`` may be declared ops. Each is called if a gradient that it returns is
        needed. Their arguments are called ``grad`` or ``grad_<output>``, or like an argument or output of this op, and
        their outputs ``grad_<argument>``. The arguments and outputs of this op that they take are saved.

        Raises:
            DeclarationError: ``SL110`` if saved names, a surrogate or ops do not fit the declaration, ``SL134`` if
                ``saves`` has to be given.
        """
        check_keywords(f"{self.spec.name}, backward", keywords, BackwardKeywords)
        self._extend("gradient is")
        if fn is None:
            return lambda f: self.backward(f, **keywords)
        self._name_foreign_author("a gradient")
        self.drop_native()
        self.gradient = _read_backward(self.spec, (fn, *more), **keywords)
        self._reregister()
        tuned_choices.forget_derived_choices()
        return fn

    def samples(self, fn: Samples) -> Samples:
        """Declare a function that builds the sample arguments of the op. It is needed for arguments whose values have a
        meaning, such as row numbers, offsets or sorted keys.

        ``fn(rng, sizes, dtype, device)`` returns all arguments in order. It may leave out a parameter that it does not
        use. ``rng`` is a seeded generator on the CPU. ``sizes`` maps each dim and each scalar argument to the requested
        value. ``dtype`` is the dtype of the floating-point arguments.
        """
        bind_sampler(self.spec, fn)
        self.sampler = fn
        return fn

    def buckets(self, default: str = "pow2", **kinds: str) -> None:
        """Declare which calls share a tuned choice. ``"pow2"`` rounds a dim up to a power of two, ``"exact"`` keeps it,
        and ``"none"`` ignores it.

        ``default`` applies to the dims that ``kinds`` does not name. Integer scalars are kept, and float scalars are
        ignored.
        """
        self.drop_native()
        self.rule = read_bucket_rule(self.spec, default, kinds)
        tuned_choices.forget_derived_choices()

    def batches(self, *dims: str) -> None:
        """Declare that calls can be merged into one call if they differ only in the arguments that have one of
        ``dims``. The merged call gets these arguments concatenated along that dim.

        For example, ``mm.batches("n")`` declares that products with an equal left matrix are columns of one product.
        ``sl.rewrites`` merges such calls if that is faster (:class:`shiplap.rewrite.group.JoinedCalls`).
        """
        self.batching = tuple(read_batching(self.spec, dim) for dim in dims)

    def build(self) -> None:
        """Compile the native binding of the op's kernels, or find it in the cache, and use it from now on. The native
        binding is the C++ code that torch calls in place of Python.

        The ops of one kernel library share a binding and get it together. ``shiplap build`` does the same for all ops
        of a module. Raise ``SL404`` if the op's kernels, such as Python functions, have no native binding. Raise
        ``SL405`` or ``SL406`` if the binding cannot be built.
        """
        for build in builders:
            build(self)

    def drop_native(self) -> None:
        """Remove the native binding of the op, the C++ code that torch calls in place of Python, if it has one. Calls
        run in Python until the binding is built again.
        """
        native, self.native = self.native, None
        if native is not None:
            native.release()
            self.install_fast_path()

    def _extend(self, what: str) -> None:
        """Raise ``SL131`` if a result of the op may be a view of an argument. Nothing can be attached to such an op,
        since its reference is its implementation. ``what`` names the thing to attach in the errors of subclasses, such
        as ``"kernels are"``.
        """
        if self.spec.view:
            got = f"a result that may be a view of {self.spec.returns[0].alias or 'an argument'}"
            raise error("SL131", where=self.spec.name, got=got, expected="fresh results, or arguments written to")

    def _attach(self, kernel: Kernel) -> None:
        """Add a kernel to the op. The native binding is removed, and the fast paths are built again. Stored calls and
        tuned choices that were derived from the former kernels are cleared.
        """
        self.drop_native()
        self.attach_kernel(kernel)
        self.install_fast_path()
        tuned_choices.forget_derived_choices()

    def _name_foreign_author(self, what: str) -> None:
        """Issue a notice if another package than the one that declares the op attaches ``what``, such as ``"a kernel
        for cpu"``. The script that is run as ``__main__`` may do so without a notice.
        """
        # Frame 1 is a method of this class, and frame 2 its caller.
        frame = sys._getframe(2)
        while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("shiplap."):
            frame = frame.f_back
        author, owner = (str(n).partition(".")[0] for n in (frame.f_globals.get("__name__", ""), self.__module__))
        if author not in (owner, "", "__main__", "shiplap") and owner != "__main__":
            text = f"{author} attaches {what} to {self.spec.name}, which {owner} declares"
            notice(f"author {author} {self.spec.name} {what}", f"{text}: calls may run code of {author}")

    # --- what torch has of it -----------------------------------------------------------------------------------------

    def _register(self) -> None:
        """Define the op's schema and implementations in torch, replacing an earlier declaration of the same function.
        Raise ``SL108`` if another function has declared the name.
        """
        previous = declared_ops.get(self.spec.name)
        if previous is not None:
            # Another function under the same name would replace the first without a trace.
            if not _is_same_home(previous.reference, self.reference):
                raise error(
                    "SL108",
                    where=self.spec.name,
                    got=_function_home(self.reference),
                    expected=_function_home(previous.reference),
                )
            previous.drop_native()
        if previous is not None and previous.spec == self.spec:
            self._take_over(previous)
        else:
            self._register_with_torch()
        declared_ops[self.spec.name] = self
        self._show_to_scripts()
        compile_cache_key.add_op_to_key(self, self.operator_names)

    def _show_to_scripts(self) -> None:
        """Let TorchScript call this op, unless a scripted call could give something else than the op. TorchScript finds
        ops by their names without overloads, and converts neither arguments nor results.
        """
        base = self.spec.name.partition(".")[0]
        same = [op for name, op in declared_ops.items() if name.partition(".")[0] == base]
        for op in same:
            name = op.overload.name()  # of the schema that was declared last
            show_to_scripts(op, name if len(same) == 1 and "." not in self.spec.name and not op.spec.converts else None)

    def _take_over(self, previous: Op) -> None:
        """Use the torch registration of ``previous``, an earlier declaration with the same schema, for this op. Python
        objects of earlier declarations then behave as this op.
        """
        self._registrations, self.variant, self.entrance = previous._registrations, previous.variant, previous.entrance
        self.can_skip_dispatcher, self._former = previous.can_skip_dispatcher, [*previous._former, previous]
        self.mutating_overload, self.cast = previous.mutating_overload, previous.cast
        self._reregister()
        # Objects of ours alone: who holds a former op, as a model or another module does, calls the new declaration.
        for former in self._former:
            replaced, former.__dict__ = former.__dict__, self.__dict__
            if replaced is not self.__dict__ and (native := replaced["native"]) is not None:
                native.release()  # attached since

    def __reduce__(self) -> str:
        """Return the qualified name of the reference, by which ``copy`` and ``pickle`` find the op again. A model that
        holds an op can therefore be deep-copied.
        """
        return self.reference.__qualname__

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise ``SL139``. ``torch.jit.script`` calls this method of an object that it is to compile."""
        expected = "a function or a module that calls the op"
        raise error("SL139", where=self.spec.name, got="torch.jit.script of the op", expected=expected)

    def __dir__(self) -> list[str]:
        """Return the public attributes of an op, for completion, and those that begin with an underscore."""
        return sorted({name for name in super().__dir__() if name.startswith("_")} | PUBLIC_NAMES)

    def __repr__(self) -> str:
        """Return the schema of the op and the names of its kernels by device type."""
        devices = ", ".join(f"{d}: {'/'.join(k.name for k in ks)}" for d, ks in self.kernels.items())
        return f"<shiplap op {self.spec.namespace}::{public_schema(self.spec)}; kernels {devices or 'none'}>"


class ConvertingOp(Op[P, R]):
    """An op whose calls in Python take members of an ``Enum`` as arguments, or return a tuple of one result. Its calls
    convert them from and to the values of the torch schema, which has neither.
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the op with arguments converted to its schema, such as members of an enum. Return its result in the
        declared form.
        """
        values, named = convert_call(self.spec, args, kwargs)
        call: Callable[..., Any] = super().__call__  # of what the schema takes
        result = call(*values, **named)
        made: Any = (result,) if self.spec.single_tuple else result
        return cast("R", made)

    def out(
        self, *args: Value, out: Tensor | Sequence[Tensor], workspace: Tensor | None = None, **kwargs: Value
    ) -> Tensor | Sequence[Tensor]:
        """Run the op on ``args`` and ``kwargs`` into the tensors ``out``, and return ``out``. Enum members among the
        arguments are converted to the values of the schema first. :meth:`Op.out` documents all arguments, such as
        ``workspace``.
        """
        values, named = convert_call(self.spec, args, kwargs)
        return super().out(*values, out=out, workspace=workspace, **named)

    def workspace_bytes(self, *args: Value, **kwargs: Value) -> int:
        """Return the bytes of scratch memory that a call needs, after converting its arguments to the schema."""
        values, named = convert_call(self.spec, args, kwargs)
        return super().workspace_bytes(*values, **named)


def _function_home(fn: Callable[..., Returned]) -> str:
    """Return the module and qualified name of a function, such as ``pkg.mod.f``."""
    return f"{fn.__module__}.{fn.__qualname__}"


def _is_same_home(a: Callable[..., Returned], b: Callable[..., Returned]) -> bool:
    """Return whether ``a`` and ``b`` are defined by one function of the source. This is so if a notebook cell was run
    twice, or if a file was both imported and run as ``__main__``.
    """
    files = [fn.__code__.co_filename if isinstance(fn, FunctionType) else None for fn in map(unwrap, (a, b))]
    return _function_home(a) == _function_home(b) or (
        files[0] == files[1] is not None and a.__qualname__ == b.__qualname__
    )


def _read_backward(
    spec: OpSpec,
    parts: tuple[GradientFn, ...],
    saves: Iterable[str] | None = None,
    surrogate: Surrogate | None = None,
    strided: bool = False,
    once_differentiable: bool | None = None,
) -> Backward:
    """Return the declared gradient of an op. ``parts`` is one function, or one or more ops that compute it.

    :meth:`Op.backward` documents ``saves``, ``surrogate``, ``strided`` and ``once_differentiable``. Raise ``SL110`` for
    any other ``parts``, and if ``saves`` is given with ops.
    """
    ops = [part for part in parts if isinstance(part, Op)]
    if not ops and len(parts) == 1:
        return Backward.declare(spec, parts[0], saves, surrogate, strided, once_differentiable)
    if len(ops) < len(parts):
        raise error("SL110", where=spec.name, got=f"{parts}", expected="one function, or declared ops alone")
    if saves is not None:
        raise error("SL110", where=spec.name, got=f"saves={saves!r}", expected="no saves=: the ops take what is saved")
    return Backward.by_ops(spec, ops, surrogate, once_differentiable)


def op(name: str, **declaration: Unpack[DeclarationKeywords]) -> OpDecorator:
    """Declare a torch op from an annotated function whose body is its reference.

    Args:
        name: ``"namespace::name"``, or ``"namespace::name.overload"`` for one of several ops of one name.
        dims: sizes that are computed from other sizes and scalars, such as ``{"k": "prod(kernel)"}``.
        bounds: upper bounds of output dims whose size depends on data, ``{"m": "2 * n"}``. Every call checks them.
        requires: preconditions on sizes and scalars, ``("min(stride) >= 1",)``. Every call checks them.
        mutates: the names of arguments that the op writes to. They are tensors, optional tensors or lists of tensors.
        contiguous: the names of tensor arguments that must be contiguous. Other arguments may have any strides.
        outputs: the names of the outputs, for out-style kernels. By default they are ``out``, or ``out0``, ``out1``,
            ...
        autocast: the dtype of float inputs under autocast, ``"widest"`` of theirs, ``"autocast"``, ``"float32"`` or
            None.
        tolerance: a relative error accepted beyond rounding, and the reason for it, such as ``(1e-3, "tanh for erf")``.
        reference_is_fast_on: the device types on which the body calls a tuned library. There it runs before templates.
        aliases: for each result the argument that it is (one of ``mutates``) or may be a view of, None for a new
            tensor.
        specialize: int arguments that are never symbols. torch compiles anew for each value, and the schema has
            ``int``.
        fake: ``"reference"`` if the sizes, dtypes and devices of results are to be found by a run of the reference
            without data. This is the default for lists, scalars, optional results and ops without tensors.
        nondifferentiable: the names of results that carry no gradient, and of arguments that get none.
        random: for random results, the int, integer tensor or Generator argument that seeds them, or ``"global"`` for
            torch's own generator. The audit compares distributions, and requires equal bits for equal seeds.
        unordered: the names of results whose rows are a set. The audit compares their rows in any order.
        tags: ``torch.Tag.cudagraph_unsafe`` if a kernel waits for the device. torch.compile then keeps the op out of
            CUDA graphs.

    Raises:
        DeclarationError: ``SL1xx`` if torch could not carry out the declaration.

    Example:
        >>> import shiplap as sl
        >>> from jaxtyping import Float
        >>> from torch import Tensor
        >>> @sl.op("demo::axpy")
        ... def axpy(x: Float[Tensor, "n"], y: Float[Tensor, "n"], a: float = 1.0) -> Float[Tensor, "n"]:
        ...     return a * x + y
    """
    return OpDecorator(name, **declaration)


class OpDecorator:
    """The decorator that ``sl.op(...)`` returns. It makes a registered op of the decorated function and keeps the
    function's parameter types for type checkers.
    """

    def __init__(self, name: str, **declaration: Unpack[DeclarationKeywords]) -> None:
        """Check the op's name and the keywords of its declaration, and store them. Raise ``SL101`` for a namespace of
        torch itself.
        """
        check_op_name(name)
        check_keywords(name, declaration)
        if name.partition("::")[0] in TORCHS_OWN:
            raise error("SL101", where="@sl.op", got=f"{name}, of torch itself", expected="a namespace of your own")
        self.name, self.declaration = name, declaration

    def __call__(self, fn: Callable[P, R]) -> Op[P, R]:
        """Return the registered op that the annotated function ``fn`` declares. ``fn`` is its reference."""
        spec = read_spec(self.name, fn, **self.declaration)
        check_keyword_names(spec)
        return (ConvertingOp if spec.converts else Op)(spec, fn)
