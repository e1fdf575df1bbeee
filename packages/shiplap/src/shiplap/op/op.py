"""``@sl.op``: a declaration becomes a registered torch op. The body is the reference; kernels and gradient attach."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.library import Library

from shiplap import compat
from shiplap.compat import calls
from shiplap.errors import error, notice
from shiplap.op import choices, registry
from shiplap.op.autocast import make_cast
from shiplap.op.autograd import Backward, floating_outputs, make_autograd
from shiplap.op.batch import Batching, read_batching
from shiplap.op.bucket import read_rule
from shiplap.op.check import Binding, Checker
from shiplap.op.config import read_space
from shiplap.op.declare import check_name, read_spec, read_workspace
from shiplap.op.explain import explain
from shiplap.op.fake import make_fake
from shiplap.op.fast import compile_bind
from shiplap.op.launch import Kernel, PythonKernel, check_sharing, fit_outputs, own_outputs
from shiplap.op.out import OutVariant, WithOut, has_out
from shiplap.op.route import route_of
from shiplap.op.schema import schema, tags
from shiplap.op.source import home, same_home, source_digest
from shiplap.op.spec import OpSpec
from shiplap.op.template import Template, as_kernel, read_template
from shiplap.settings import settings

__all__ = ["Op", "op"]


class Native(Protocol):
    """Native code registered for an op, ahead of ``Op.execute``."""

    library: Path

    def release(self) -> None: ...


class Op(calls.ShortCut, WithOut):
    """A declared op. Call it like the function it was declared from.

    Attributes:
        spec: the declaration as data.
        reference: the decorated function, plain PyTorch, the law for every kernel and gradient.
        overload: the registered ``torch.ops.<namespace>.<name>.default``.
        raw: the same below autograd and autocast; compiled graphs hold this one.
        kernels: implementations by device type, first one first.
        templates: kernel sources by device type, into which compiled code fuses its neighbours.
        gradient: the declared backward, or None.
        native: the native binding in force, or None: then ``execute`` serves.
        sampler: builds arguments for the audit, or None: then they are drawn from the declaration.
        batching: dims along which several calls may be made as one.
    """

    _library: Library

    def __init__(self, spec: OpSpec, reference: Callable[..., Any]) -> None:
        self.spec, self.reference = spec, reference
        self._source = source_digest(reference)
        self.kernels: dict[str, list[Kernel]] = {}
        self.templates: dict[str, list[Template]] = {}
        self.gradient: Backward | None = None
        self.sampler: Callable[..., tuple[Any, ...]] | None = None
        self.native: Native | None = None
        self.batching: tuple[Batching, ...] = ()
        self._former: list[Op] = []
        self._checker, self._bind, self.rule = Checker(spec), compile_bind(spec), read_rule(spec)
        self._differentiable = not spec.mutated and floating_outputs(spec)
        self._register()
        self.__name__, self.__doc__, self.__module__ = spec.opname, reference.__doc__, reference.__module__
        self.__signature__ = inspect.signature(reference)

    def _dispatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._split and calls.is_plain_call(args, kwargs):
            return self.raw(*args, **kwargs)
        recorded = self._split and not kwargs and calls.is_recorded_call(args)
        return self._record(None, *args) if recorded else self.overload(*args, **kwargs)

    def _below(self, *args: Any, **kwargs: Any) -> Any:
        """The op below autograd."""
        return self._plain(*args) if self._split and not kwargs else self.raw(*args, **kwargs)

    def _explain(self, args: tuple[Any, ...], kwargs: dict[str, Any], cause: Exception) -> None:
        explain(self._checker, self.__signature__, args, kwargs, cause)

    def __reduce__(self) -> str:
        """Copied and pickled by name, as functions are: a model that holds an op can be deep-copied."""
        return self.reference.__qualname__

    def __repr__(self) -> str:
        devices = ", ".join(f"{d}: {'/'.join(k.name for k in ks)}" for d, ks in self.kernels.items())
        return f"<shiplap op {self.spec.namespace}::{schema(self.spec)}; kernels {devices or 'none'}>"

    def kernel(
        self,
        device: str,
        implementation: Any = None,
        *,
        name: str | None = None,
        workspace: str | None = None,
        dtypes: Iterable[str] = (),
        supports: Callable[..., bool | str] | None = None,
        configs: Any = None,
        default: Any = None,
        prior: Callable[..., float] | None = None,
    ) -> Any:
        """Bind a kernel for ``device`` (a device type such as ``"cpu"``); the last one bound is tried first.

        ``implementation`` is a Python function (out-style or functional) or an object with ``bind(spec)`` such as
        ``sl.cabi(...)``; without it this is a decorator. ``workspace`` is a dim expression in bytes (it may use
        ``threads`` and ``itemsize``). ``dtypes`` names what the kernel takes where the declaration admits more;
        ``supports`` gets the arguments and returns True or the reason why not (and keeps the kernel from being bound
        natively). Binding a name again replaces that kernel.

        ``configs`` lists what :func:`shiplap.tune` chooses from, dicts that arrive as keywords of a Python function, or
        is a function of the sizes that returns such a list. Without a choice ``default`` runs (a dict, or a function of
        the sizes; by default the first). ``prior(sizes, config)`` estimates a time in any unit: large spaces are
        searched from its best.
        """
        if implementation is None:
            return lambda fn: self.kernel(
                device,
                fn,
                name=name,
                workspace=workspace,
                dtypes=dtypes,
                supports=supports,
                configs=configs,
                default=default,
                prior=prior,
            )
        device = device.partition(":")[0]
        scratch = read_workspace(self.spec, workspace) if workspace else None
        taken = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
        if hasattr(implementation, "bind"):
            run, identity, label = implementation.bind(self.spec, scratch), implementation.identity, implementation.name
        else:
            run, identity = PythonKernel(self.spec, implementation, scratch), source_digest(implementation)
            label = getattr(implementation, "__name__", "kernel")
        space = read_space(self.spec, name or label, configs, default, prior, implementation)
        if space is not None and hasattr(run, "configure"):
            run.configure(space)
        identity = f"{identity}/{workspace}/{taken}" + (f"/{space.identity}" if space else "")
        kernel = Kernel(name or label, device, run, identity, supports, taken, space)
        self._attach(kernel)
        return implementation

    def template(self, device: str, source: str, **declaration: Any) -> Template:
        """Bind a templated kernel: ``source`` is a ``*.triton.jinja`` or ``*.cpp.jinja`` file beside the declaration.

        Compiled code fuses its neighbours into it; a Triton template is also a kernel of its name, for eager calls.
        ``configs``: compile-time parameters, the default first;
        ``grid(sizes, config, cdiv)`` (Triton); ``tables``: host-computed lookup tables, ``{name: fn(sizes)}``;
        ``innermost``: the dim of an argument that must be adjacent in memory, ``{"b": "k"}``; ``supports(sizes,
        dtypes, config)``: True or the reason why not; ``fuses(sizes)``: whether neighbours are better off inside;
        ``default=False``: only where measured; ``name``. Binding a name again replaces that template.
        """
        template = read_template(self.spec, self.reference.__code__.co_filename, device, source, **declaration)
        others = [t for t in self.templates.get(template.device, []) if t.name != template.name]
        self.templates[template.device] = [*others, template]
        if (kernel := as_kernel(self.spec, template)) is not None:
            self._attach(kernel)
        registry.refresh(self)
        return template

    def _attach(self, kernel: Kernel) -> None:
        """Bind ``kernel``: one of the author's before all others; a template behind them, and in nobody's place."""
        self.drop_native()
        others = [k for k in self.kernels.get(kernel.device, []) if k.name != kernel.name or k.template is None]
        if kernel.template is None:
            self.kernels[kernel.device] = [kernel, *(k for k in others if k.name != kernel.name)]
        elif kernel.name not in [k.name for k in others]:
            self.kernels[kernel.device] = [*others, kernel]
        self._plain = route_of(self)
        registry.refresh(self)

    def own(self, device: str) -> list[Kernel]:
        """The kernels for a device type that are no templates."""
        return [k for k in self.kernels.get(device, ()) if k.template is None]

    def eager(self, device: str) -> list[Kernel]:
        """What is tried in this order where nothing was chosen; then the reference runs.

        A reference that is a library call there (``library=``) comes before templates; one that is no ``default`` is
        run where it was chosen only.
        """
        library = device in self.spec.library
        found = self.kernels.get(device, ())
        return [k for k in found if k.template is None or (k.template.default and not library)]

    def backward(self, fn: Callable[..., Any] | None = None, *, saves: Iterable[str] | None = None) -> Any:
        """Declare the gradient: ``fn(grad, saved, needs) -> {argument: gradient}``, in terms of other ops.

        ``grad`` is the output's gradient (a tuple for several outputs), ``saved`` has every scalar and the tensors
        of ``saves`` (default: all tensor arguments) by name, ``needs.<argument>`` says which gradients are used.
        """
        if fn is None:
            return lambda f: self.backward(f, saves=saves)
        self.gradient = Backward.declare(self.spec, fn, saves)
        self._declare()
        registry.refresh(self)
        return fn

    def samples(self, fn: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        """Declare how arguments are drawn whose values mean something (row numbers, offsets, sorted keys).

        ``fn(rng, sizes, dtype, device)`` returns all arguments in order; ``rng`` is a seeded CPU generator, ``sizes``
        maps each dim and each scalar argument to the value asked for, ``dtype`` is that of the floating arguments.
        """
        self.sampler = fn
        return fn

    def buckets(self, default: str = "pow2", **kinds: str) -> None:
        """Declare which calls share a choice: ``"pow2"`` rounds a dim up, ``"exact"`` keeps it, ``"none"`` drops it.

        ``default`` is for the dims that ``kinds`` does not name; scalars are exact, float scalars dropped.
        """
        self.drop_native()
        self.rule = read_rule(self.spec, default, kinds)
        registry.refresh(self)

    def batches(self, *dims: str) -> None:
        """Declare that calls which agree in every argument without a dim are one call, concatenated along it.

        ``mm.batches("n")``: products of one left side are columns of one product. ``sl.rewrites`` merges such calls
        where it pays (:class:`shiplap.rewrite.group.JoinedCalls`).
        """
        self.batching = tuple(read_batching(self.spec, dim) for dim in dims)

    def drop_native(self) -> None:
        """Go back to ``execute``: called before what the native code was registered for changes."""
        native, self.native = self.native, None
        if native is not None:
            native.release()

    @property
    def identity(self) -> str:
        """What compiled artefacts depend on: declaration, reference, gradient and kernels."""
        parts = [self.spec.digest, self._source, *([str(self.rule)] if self.rule != read_rule(self.spec) else [])]
        parts += [f"{self.gradient.source}/{self.gradient.saves}"] if self.gradient else []
        parts += [f"{d}/{k.name}/{k.identity}" for d, ks in sorted(self.kernels.items()) for k in ks]
        parts += [f"{d}/{t.name}/{t.identity}" for d, ts in sorted(self.templates.items()) for t in ts]
        return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]

    def pick(self, call: Any) -> Kernel | None:
        """The kernel that takes this bound call, or None when the reference has to run; says why, once."""
        device = call.device.type
        if choices.active and not isinstance(found := choices.find(self, call), choices.Missing):
            return found
        reasons = []
        for kernel in self.eager(device):
            if isinstance(serving := kernel.serving(call), Kernel):
                return serving
            reasons.append(f"{kernel.name}: {serving}")
        if device in self.spec.library:
            return None
        names = [k.name for k in self.kernels.get(device, ())]  # the reason may hold sizes: it is no key
        self._unserved(device, "; ".join(reasons) or f"no kernel for {device}", key=str(names))
        return None

    def _unserved(self, device: str, why: str, key: str) -> None:
        """Say once that the reference runs, or raise SL306 where that is forbidden."""
        if settings().strict:
            raise error("SL306", where=self.spec.name, got=why, expected=f"a kernel for {device}")
        notice(f"{self.spec.name}/{device}/{key}", f"{self.spec.name} runs its reference ({why}): correct, not fast")

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """The real implementation, below autograd and autocast."""
        if kwargs:
            args = (*args, *(kwargs.get(a.name, a.default) for a in self.spec.args[len(args) :]))
        call = (self._bind and self._bind(*args)) or self._checker.bind(args)
        if self.spec.mutated:
            check_sharing(self.spec, call)
        return self.serve(call, self.pick(call))

    def serve(self, call: Binding, kernel: Kernel | None) -> Any:
        """Run a bound call with the kernel that was picked, or with the reference."""
        if self._differentiable and torch.is_grad_enabled() and calls.any_requires_grad(*call.args):
            # A graph that was traced where nothing required grad holds `raw`; now it is trained.
            positional, named = self._as_given(call.args)
            return self._record(None, *positional, **named)
        # Where no autograd formula stands in front, torch would record the operations of the kernel.
        with nullcontext() if self._differentiable or not torch.is_grad_enabled() else torch.no_grad():
            outs = kernel.run(call) if kernel else fit_outputs(self.spec, call, self._reference(call.args))
        return outs[0] if len(outs) == 1 else outs or None

    def _law(self, *args: Any, **kwargs: Any) -> Any:
        """The reference of a checked call, as torch records it: where a tangent is asked for, which no kernel has."""
        call = self._checker.bind((*args, *(kwargs.get(a.name, a.default) for a in self.spec.args[len(args) :])))
        self._unserved(str(call.device), "forward-mode AD is the reference's", key="tangent")
        return own_outputs(self._reference(call.args))

    def _reference(self, args: tuple[Any, ...]) -> Any:
        positional, named = self._as_given(args)
        return self.reference(*positional, **named)

    def _as_given(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments in schema order → how a function takes them: keyword-only ones by name."""
        split = sum(not a.keyword_only for a in self.spec.args)
        return args[:split], {a.name: v for a, v in zip(self.spec.args[split:], args[split:], strict=True)}

    def _register(self) -> None:
        """Define the schema and the implementations that every op has."""
        previous = registry.find(self.spec.name)
        if previous is not None:
            if not same_home(previous.reference, self.reference):
                raise error("SL108", where=self.spec.name, got=home(self.reference), expected=home(previous.reference))
            previous.drop_native()
            compat.destroy_library(previous._library)
            self._former = [*previous._former, previous]
        self._declare()
        for former in self._former:  # whoever holds one calls this op: torch has freed what it was registered as
            former.__dict__ = self.__dict__
        registry.add(self)

    def _declare(self) -> None:
        """(Re)build the torch registration; done again when a gradient is attached, since torch allows it only once."""
        if hasattr(self, "_library"):
            self.drop_native()
            compat.destroy_library(self._library)
        spec, self._library = self.spec, Library(self.spec.namespace, "FRAGMENT")
        self.overload = self._define(spec.opname)
        self.raw = self._define(f"{spec.opname}__raw") if self._differentiable else self.overload
        # Whether a list holds a tensor to record takes a look at each: calls with lists all go through the dispatcher.
        self._split = self._differentiable and not any(a.many for a in spec.args)
        self._plain = route_of(self)
        if self._differentiable:
            self._library.impl(f"{spec.opname}__raw", torch.library.fallthrough_kernel, "Autograd")
            self._record = make_autograd(spec, self.overload, self._below, self._law, self.gradient)
            self._library.impl(spec.opname, self._record, "Autograd", with_keyset=True)
        self.variant = OutVariant(self, self._library) if has_out(spec) else None
        if spec.autocast is not None:
            compat.register_autocast_rule(self._library, spec.opname, self.overload, make_cast(spec))

    def _define(self, name: str) -> Any:
        """Schema, real implementation and fake under ``name`` (two overloads of one name cannot be redeclared)."""
        spec = self.spec
        self._library.define(schema(spec, name), tags=tags(spec))
        self._library.impl(name, self.execute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{spec.namespace}::{name}", make_fake(self._checker), lib=self._library)
        return getattr(getattr(torch.ops, spec.namespace), name).default


def op(
    name: str,
    *,
    dims: Mapping[str, str] | None = None,
    bounds: Mapping[str, str] | None = None,
    requires: Iterable[str] = (),
    mutates: Iterable[str] = (),
    contiguous: Iterable[str] = (),
    outputs: Iterable[str] = (),
    autocast: str | None = "widest",
    library: Iterable[str] = (),
    tolerance: tuple[float, str] | None = None,
) -> Callable[[Callable[..., Any]], Op]:
    """Declare a torch op from an annotated function whose body is its reference.

    Args:
        name: ``"namespace::name"``.
        dims: sizes that follow from others, ``{"k": "prod(kernel)"}``.
        bounds: upper bounds of data-dependent output dims, ``{"m": "n * prod(kernel)"}``; asserted at run time.
        requires: preconditions on sizes and scalars, ``("min(stride) >= 1",)``.
        mutates: names of tensor arguments that the op writes to.
        contiguous: names of tensor arguments that must arrive contiguous (others may have any strides).
        outputs: names of the outputs (default ``out``, or ``out0``, ``out1``, ...), keywords of out-style kernels.
        autocast: dtype of floating inputs under autocast: ``"widest"`` of them, ``"autocast"``, ``"float32"`` or None.
        tolerance: what a kernel may be off by besides rounding, relatively, and why: ``(1e-3, "tanh for erf")``.
        library: device types on which the body is a call of a tuned library: fast, so that it stands before templates.

    Raises:
        DeclarationError: SL1xx, when torch could not carry out the declaration.

    Example:
        >>> import shiplap as sl
        >>> from jaxtyping import Float
        >>> from torch import Tensor
        >>> @sl.op("demo::axpy")
        ... def axpy(x: Float[Tensor, "n"], y: Float[Tensor, "n"], a: float = 1.0) -> Float[Tensor, "n"]:
        ...     return a * x + y
    """
    check_name(name)

    def declare(fn: Callable[..., Any]) -> Op:
        spec = read_spec(
            name,
            fn,
            dims=dims or {},
            bounds=bounds or {},
            requires=requires,
            mutates=mutates,
            contiguous=contiguous,
            outputs=outputs,
            autocast=autocast,
            library=library,
            tolerance=tolerance,
        )
        return Op(spec, fn)

    return declare
