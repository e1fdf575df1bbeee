"""``torch.library`` with types: ops that are registered together, the registered ops of this process, and writes that
autograd has to know of.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.library import Library

from shiplap.torch_private import available
from shiplap.torch_private.dispatcher_calls import Refusal, answer_failure, is_autocast_on

if TYPE_CHECKING:
    from torch._C import DispatchKeySet
    from torch._ops import OpOverload


_COUNTS: Any = torch._C.DispatchKey.ADInplaceOrView  # under which torch counts writes
_is_off: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_switch_off: Callable[[Any, bool], None] = torch._C._dispatch_tls_set_dispatch_key_excluded
_frames: Any = torch._C._dynamo.eval_frame


def with_write_counts(call: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """Return a function that calls ``call`` and then reports to autograd that it has written to the arguments at the
    positions ``places``.

    If a backward needs the old values of such an argument, the backward then raises an error. Torch's own operators
    report their writes, but kernels behind a C function do not.
    """

    def called(*args: Any, **kwargs: Any) -> Any:
        """Return the result of ``call``. Increment autograd's version counter of each argument at the positions
        ``places`` that is not None.
        """
        result = call(*args, **kwargs)
        for i in places:
            if i < len(args) and args[i] is not None:
                increment_version(args[i])
        return result

    return called


def keep_from_dynamo(function: Implementation) -> Implementation:
    """Mark ``function`` so that Dynamo compiles neither its frames nor those of the functions that it calls. Return
    ``function``.

    If an op breaks a graph, torch calls it while Dynamo is active, and Dynamo would compile each Python frame of the
    call, which takes seconds. ``torch.compiler.disable`` would prevent this as well, but adds two frames to each call.
    """
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is not None and available("calls past OpOverload.__call__"):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(skip, skip))
    return function


def version_of(tensor: Tensor) -> int:
    """Return the number of writes to ``tensor`` that torch has counted. Return 0 for a tensor made in inference mode,
    which has no such counter.
    """
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def counting_writes() -> Iterator[None]:
    """Return a context in which torch counts writes to tensors, as in eager code. Below a compiled graph torch
    otherwise does not count them.
    """
    if not _is_off(_COUNTS):
        yield
        return
    _switch_off(_COUNTS, False)
    try:
        yield
    finally:
        _switch_off(_COUNTS, True)


Overload: TypeAlias = "OpOverload[..., Any]"  # a registered op: ``torch.ops.<namespace>.<name>.default``
Keys: TypeAlias = "DispatchKeySet"
Implementation: TypeAlias = Callable[..., Any]
Check: TypeAlias = Callable[[Sequence[Any], Mapping[str, Any]], None]  # of the arguments of a call, which may raise
# Of a device type, the arguments of a call and its keywords. It returns both, converted by the rule of the op.
Cast: TypeAlias = Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


_kept: list[Registrations] = []  # torch would free registrations while another thread calls them
_COMPUTE = ("/CPU", "/CUDA", "Autograd", "AutogradCPU", "AutogradCUDA", "ImplicitAutograd", "ExplicitAutograd")
_editions: dict[tuple[str, str], int] = {}
_AUTOCAST_KEYS = {  # by device type; the one without a name is the device of an extension, which names it itself
    "cpu": "AutocastCPU",
    "cuda": "AutocastCUDA",
    "xpu": "AutocastXPU",
    "mps": "AutocastMPS",
    "hpu": "AutocastHPU",
    "": "AutocastPrivateUse1",
}


def replaced_operators(own: Callable[[str], bool]) -> frozenset[str]:
    """Return the names ``aten/name/key`` of torch's operators that Python code has replaced at a dispatch key under
    which results are computed.

    An operator is left out if ``own(file)`` is True for each file that has replaced it. Torch's own files replace
    operators for tensors without data and, in some versions, a few GPU operators. The function works on torch 2.11 to
    2.15.
    """
    made = (k for k in torch.library._impls if k.startswith("aten/") and k.endswith(_COMPUTE))
    return frozenset(k for k in made if not all(map(own, _files_of(k.split("/")[1]))))


def _files_of(operator: str) -> list[str]:
    """Return the Python files that have registered a kernel for the ATen operator ``operator``, as listed in the
    dispatcher's dump. A file may occur more than once.
    """
    return re.findall(r"registered at (\S+\.py):\d+", str(torch._C._dispatch_dump(f"aten::{operator}")))


def name_of_edition(name: str, edition: int) -> str:
    """Return the name in torch of the schema number ``edition`` that this process has declared for ``name``. For the
    second schema it is ``name__2``.
    """
    base, dot, overload = name.partition(".")
    return name if edition == 1 else f"{base}__{edition}{dot}{overload}"


class Registrations:
    """Ops of one namespace that are registered together, with their implementations.

    They stay until the process ends, since torch frees removed ops without recording whether a thread is inside a call.
    Each other schema of an op is a new edition, with another name in torch. ``torch.ops.<namespace>.<name>`` is always
    the op that was defined last.
    """

    def __init__(self, namespace: str, edition: int = 1) -> None:
        """Open a fragment of the torch library ``namespace``. If ``edition`` is above 1, this number is appended to the
        names in it.
        """
        self.namespace, self.edition = namespace, edition
        library: Any = Library  # torch gives it no types
        self._library = library(namespace, "FRAGMENT")
        self._refusals: dict[str, Refusal] = {}
        self._checks: dict[str, Check | None] = {}
        self._casts: dict[str, Cast] = {}
        self._defined: list[str] = []
        self._writing: set[str] = set()
        self._above: dict[str, str] = {}
        self._functions: list[Implementation] = []
        _kept.append(self)

    @staticmethod
    def is_foreign(namespace: str, name: str) -> bool:
        """Return whether torch has an op ``name`` in ``namespace`` that was not registered here."""
        return (namespace, name) not in _editions and find_overload(namespace, name) is not None

    @classmethod
    def of(cls, namespace: str, name: str) -> Registrations:
        """Return a new registration of the op ``name`` in ``namespace``, without defining anything yet. Torch admits
        one schema for each name. If the process has used this name before, a number is appended to the op's name.
        """
        edition = _editions[namespace, name] = _editions.get((namespace, name), 0) + 1
        return cls(namespace, edition)

    def define(self, schema: str, tags: Sequence[torch.Tag] = ()) -> None:
        """Define an op with torch by ``schema``, which begins with the op's name, and with torch's tags ``tags``."""
        name, opening, rest = schema.partition("(")
        self._defined.append(name)
        self._writing |= {name} if "!)" in schema else set()
        self._library.define(f"{self._named(name)}{opening}{rest}", tags=tuple(tags))

    def _named(self, name: str) -> str:
        """Return the name in torch of the op ``name``. If an earlier schema had the same name in this process, it ends
        in a number.
        """
        return name_of_edition(name, self.edition)

    def overload(self, name: str) -> Overload:
        """Return the overload ``name`` or ``name.overload`` as users call it.

        The first call replaces the function of the overload by one that raises Shiplap's errors in place of torch's. If
        the op has a part below autograd, that function calls this part directly unless autograd is needed.
        """
        base, _, suffix = self._named(name).partition(".")
        packet: Any = getattr(getattr(torch.ops, self.namespace), base)
        overload: Overload = getattr(packet, suffix or "default")
        refusal = self._refusals.get(name) if available("calls past OpOverload.__call__") else None
        if refusal is None or hasattr(overload._op, "plain"):
            return overload
        if name in self._above:
            above = self.overload(self._above[name])
            self._wrap(overload, packet, _through_autograd(overload._op, refusal, above))
            return overload
        raw = next((below for below, above in self._above.items() if above == name and not suffix), None)
        if any("Tensor[]" in str(each) or "Tensor?[]" in str(each) for each in overload._schema.arguments):
            raw = None  # to look for gradients in every list would be too slow
        if raw is not None:
            lower = getattr(getattr(torch.ops, self.namespace), self._named(raw).partition(".")[0])
            short: Implementation = getattr(lower, raw.partition(".")[2])._op
            short = getattr(short, "plain", short)
            written = [
                i
                for i, a in enumerate(overload._schema.arguments)
                if a.alias_info is not None and a.alias_info.is_write
            ]
            short = with_write_counts(short, written) if written else short
        # ``torch.ops.ns.name`` calls the function of the packet, and not that of its overload.
        for each in (overload,) if suffix else (packet, overload):
            check, plain = self._checks[name], partial(self._leave_autocast, name, each._op)
            told = (
                _with_own_errors(each._op, refusal, check, plain)
                if raw is None
                else _below_autograd(each._op, refusal, short, check, plain)
            )
            self._wrap(each, packet, told)
        return overload

    def _leave_autocast(self, name: str, plain: Implementation, *args: Any, **kwargs: Any) -> Any:
        """Return ``plain(*args, **kwargs)`` with autocast off, and with ``args`` converted by the autocast rule of the
        op ``name``.

        This is for calls under both autocast and ``torch.func``. A level of ``torch.func`` passes the operator on with
        the autocast state of the call, so the kernels would see autocast on.
        """
        if (cast := self._casts.get(name)) is not None:
            values = (*args, *kwargs.values())
            given = [t for value in values for t in (value if isinstance(value, (list, tuple)) else (value,))]
            for kind in dict.fromkeys(t.device.type for t in given if isinstance(t, torch.Tensor)):
                if is_autocast_on(kind):
                    args, kwargs = cast(kind, args, kwargs)
        with torch._C._DisableAutocast():
            return plain(*args, **kwargs)

    def _wrap(self, op: Any, packet: Any, function: Implementation) -> None:
        """Make Python calls of ``op``, an overload or its packet, call ``function`` instead of torch's own function.

        A call of ``torch.ops.ns.name`` without gradients then takes a seventh less time if a Python kernel computes it
        (torch 2.13, AMD EPYC, 2026-11-28). Errors of native code keep their classes. Torch has no public hook for this.
        :meth:`overload` calls this method only on a version of torch on which a test run has verified it.
        """
        op._op = keep_from_dynamo(function)
        self._functions.append(function)  # TorchScript knows functions by their id, and asks for the one in ``_op``
        torch.jit._builtins._register_builtin(function, packet._qualified_op_name)

    def show_to_modes(self, name: str, above: str) -> None:
        """Show calls of ``name`` to dispatch modes, tensor subclasses and tracers as calls of ``above``. ``above`` is
        the op that users call, and ``name`` its part below autograd.
        """
        self._above[name] = above

        def shown(keys: Keys, *args: Any, **kwargs: Any) -> Any:
            """Dispatch a call of the part below autograd again, with autograd excluded, as a call of ``above``, the op
            that users call. Return its result.
            """
            with torch._C._AutoDispatchBelowAutograd():
                return self.overload(above).redispatch(keys, *args, **kwargs)

        self._library.impl(self._named(name), shown, "Python", with_keyset=True)

    def translate_errors(self, name: str, refusal: Refusal, check: Check | None = None) -> None:
        """Register ``refusal(error, args, kwargs)`` for the op ``name``.

        ``refusal`` returns the ``ShiplapError`` to raise in place of a ``RuntimeError`` of a call, None to raise the
        original error, or True to repeat the call. ``check(args, kwargs)``, unless it is None, is called before torch
        converts the arguments, and raises an error for wrong ones.
        """
        self._refusals[name], self._checks[name] = refusal, check

    def publish(self) -> None:
        """Make ``torch.ops.<namespace>.<name>`` the op that was defined here, for each op of this object. An earlier op
        of that name then has only its numbered name.
        """
        namespace = getattr(torch.ops, self.namespace)
        for name in self._defined if self.edition > 1 else ():
            base, _, suffix = name.partition(".")
            packet = getattr(namespace, self._named(base))
            if not suffix:
                setattr(namespace, name, packet)
            elif base not in self._defined:  # one of several ops of a name: the others stay what they are
                setattr(getattr(namespace, base), suffix, getattr(packet, suffix))

    def new_overload_object(self, name: str) -> Overload:
        """Return the op ``name`` as another Python object of the same registration.

        Compiled code is guarded by the identity of the object. Code compiled for the old object is thus not used for
        the new one. Torch does the same when it forgets a library.
        """
        namespace, base = getattr(torch.ops, self.namespace), self._named(name).partition(".")[0]
        if base in vars(namespace):
            delattr(namespace, base)
        self.publish()
        return self.overload(name)

    def implement(self, name: str, function: Implementation, check: Check | None = None) -> None:
        """Register ``function`` as the implementation of the op ``name`` for every device type, below autograd and
        autocast.

        If the op writes to arguments, ``check``, unless it is None, is first called with the arguments. Lazily
        conjugated and negated tensors are copied only after that, since the copies would no longer share memory.
        """
        self._library.impl(self._named(name), keep_from_dynamo(function), "CompositeExplicitAutograd")
        # Torch's own copies lazily conjugated and negated tensors too, but writes them back for one returned tensor.
        for key in ("Conjugate", "Negative") if name in self._writing else ():
            self._library.impl(self._named(name), partial(self._write_resolved, name, check), key)

    def _write_resolved(self, name: str, check: Check | None, /, *args: Any, **kwargs: Any) -> Any:
        """Call an op that writes to arguments, with resolved copies in place of lazily conjugated and negated tensors.
        Copy what it has written back into the original tensors, and return the op's result.
        """
        if check is not None:
            check(args, kwargs)
        overload, given = self.overload(name), [*args, *kwargs.values()]
        plain = [_without_marks(v) for v in given]
        result = overload(*plain[: len(args)], **dict(zip(kwargs, plain[len(args) :], strict=True)))
        schema = overload._schema.arguments
        written = {a.name for a in schema if a.alias_info is not None and a.alias_info.is_write}
        for key, old, new in zip([*(a.name for a in schema[: len(args)]), *kwargs], given, plain, strict=True):
            pairs = zip(old, new, strict=True) if isinstance(old, (list, tuple)) else [(old, new)]
            for mine, copy in pairs if key in written else ():
                # A tensor that was plain has been written to directly.
                if mine is not copy:
                    mine.copy_(copy)
        return result

    def implement_by_ops(self, name: str, function: Implementation) -> None:
        """Register ``function``, which computes the op ``name`` by calls of other ops (torch's
        ``CompositeImplicitAutograd``). Transforms and traces then see the other ops in place of this one.
        """
        for key in ("CompositeImplicitAutograd", "FuncTorchBatched"):  # vmap knows how to take apart torch's own alone
            self._library.impl(self._named(name), keep_from_dynamo(function), key)

    def map(self, name: str, function: Implementation, *, always: bool = False) -> None:
        """Register ``function`` as the implementation of ``name`` that ``torch.vmap`` calls if it maps over a tensor
        argument. If ``always`` is true, it is called inside ``torch.vmap`` even if no tensor is mapped over.
        """
        for key in ("FuncTorchBatched", *(("FuncTorchVmapMode",) if always else ())):
            self._library.impl(self._named(name), keep_from_dynamo(function), key)

    def fake(self, name: str, function: Implementation) -> None:
        """Register ``function`` as the fake implementation of ``name``, which torch calls for tensors without data."""
        torch.library.register_fake(f"{self.namespace}::{self._named(name)}", function, lib=self._library)

    def register_autograd(self, name: str, function: Implementation) -> None:
        """Register ``function(dispatch key set, *args)`` as what autograd calls for the op ``name``."""
        self._library.impl(self._named(name), keep_from_dynamo(function), "Autograd", with_keyset=True)

    def skip_autograd(self, name: str) -> None:
        """Make calls of the op ``name`` skip autograd. Its implementation computes gradients by itself or has none."""
        self._library.impl(self._named(name), torch.library.fallthrough_kernel, "Autograd")

    def register_autocast(self, name: str, overload: Overload, cast: Cast) -> None:
        """Register that a call of ``name`` under ``torch.autocast`` calls ``overload`` with the arguments that ``cast``
        returns. This holds for any device type.
        """
        self._casts[name] = cast
        for device_type, key in _AUTOCAST_KEYS.items():
            kernel = _autocast_kernel(overload, device_type, cast)
            self._library.impl(self._named(name), keep_from_dynamo(kernel), key)


def _without_marks(value: Any) -> Any:
    """Return a tensor, or a list of values, with copies in place of lazily conjugated and negated tensors. Return other
    values unchanged.
    """
    if isinstance(value, (list, tuple)):
        return [_without_marks(v) for v in value]
    return value.resolve_conj().resolve_neg() if isinstance(value, Tensor) else value


def _with_own_errors(
    plain: Implementation, refusal: Refusal, check: Check | None = None, leave: Implementation | None = None
) -> Implementation:
    """Return a function that calls ``check``, unless it is None, and then ``plain``, the op's function in torch.

    ``refusal`` is that of :meth:`Registrations.translate_errors`. If both autocast and ``torch.func`` are active,
    ``leave`` is called in place of ``plain``.
    """
    any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
    transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack

    def called(*args: Any, **kwargs: Any) -> Any:
        """Call ``check`` and then ``plain`` with the arguments. If autocast and a transform of ``torch.func`` are both
        active, call ``leave`` in place of ``plain``. For a ``RuntimeError``, do what ``refusal`` returns.
        """
        try:
            if check is not None:
                check(args, kwargs)
            if leave is not None and any_autocast() and transform() is not None:
                return leave(*args, **kwargs)
            return plain(*args, **kwargs)
        except RuntimeError as e:
            return answer_failure(e, refusal, called, args, kwargs)

    vars(called)["plain"] = plain
    return called


def _below_autograd(
    plain: Implementation,
    refusal: Refusal,
    raw: Implementation,
    check: Check | None,
    leave: Implementation,
    *,
    cast: bool = False,
) -> Implementation:
    """Return a function that calls ``raw``, the op's part below autograd, if neither autograd, autocast, ``torch.func``
    nor a tracer is involved.

    Otherwise it calls ``check`` and then ``plain``, the op's function in torch. Errors and ``leave`` are as in
    :func:`_with_own_errors`. If ``cast`` is true, autocast has already converted the arguments, and whether it is on
    does not matter. Skipping autograd matters because its formula is a Python function, which takes longer than most
    small kernels.
    """
    any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
    any_autocast: Callable[[], bool] = bool if cast else torch._C._is_any_autocast_enabled
    transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
    traced: Callable[[], Any] = torch._C._get_tracing_state
    included: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_included
    ahead: Any = torch._C.DispatchKey.PreDispatch
    overridden: Callable[[tuple[Any, ...]], bool] = torch._C._has_torch_function  # by a mode, a subclass or a proxy
    compiler: Any = torch.compiler
    enabled, forward = torch.is_grad_enabled, torch.autograd.forward_ad

    def called(*args: Any, **kwargs: Any) -> Any:
        """Call the part of the op below autograd if no gradient, mode or tracer is involved. Otherwise check the
        arguments and call the op's function in torch.
        """
        try:
            if (
                kwargs
                or any_autocast()
                or transform() is not None
                or forward._current_level >= 0
                or (enabled() and any_requires_grad(*args))
                or overridden(args)
                or traced() is not None
                or included(ahead)
                or compiler._is_compiling_flag
            ):
                if check is not None:
                    check(args, kwargs)
                if any_autocast() and transform() is not None:
                    return leave(*args, **kwargs)
                return plain(*args, **kwargs)
            return raw(*args)
        except RuntimeError as e:
            return answer_failure(e, refusal, called, args, kwargs)

    vars(called)["plain"] = plain
    if not cast:
        vars(called)["cast"] = _below_autograd(plain, refusal, raw, check, leave, cast=True)
    return called


def _through_autograd(plain: Implementation, refusal: Refusal, above: Overload) -> Implementation:
    """Return a function that calls ``above``, the op with its gradient, if an argument needs a gradient or a tangent.

    Otherwise it calls ``plain``, the function of the part below autograd. Errors are as in :func:`_with_own_errors`. A
    graph of ``torch.fx.symbolic_trace`` contains calls of that part. This function makes such a graph trainable.
    """
    any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
    enabled, forward = torch.is_grad_enabled, torch.autograd.forward_ad

    def called(*args: Any, **kwargs: Any) -> Any:  # one frame: compiled code pays for it at every op
        """Call the op with its gradient if an argument needs a gradient or a tangent, and the part below autograd
        otherwise. Raise Shiplap's error in place of a ``RuntimeError`` that has one.
        """
        try:
            if forward._current_level >= 0 or (enabled() and any_requires_grad(*args, **kwargs)):
                return above(*args, **kwargs)
            return plain(*args, **kwargs)
        except RuntimeError as e:
            return answer_failure(e, refusal, called, args, kwargs)

    vars(called)["plain"] = plain
    vars(called)["coded"] = _with_own_errors(plain, refusal)
    return called


def find_overload(namespace: str, name: str) -> Overload | None:
    """Return the registered overload of the op ``name``, or of ``name.overload``, in ``namespace``. Return None if
    there is none.
    """
    base, _, suffix = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return None if packet is None else getattr(packet, suffix or "default", None)


def _autocast_kernel(overload: Overload, device_type: str, cast: Cast) -> Implementation:
    """Return the autocast kernel of an overload for ``device_type``. An empty string stands for the PrivateUse1 device.
    The kernel converts the arguments by ``cast`` and calls the overload below autocast.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        """Convert the arguments by ``cast``, the op's autocast rule. Call the overload with autocast off and return its
        result.
        """
        args, kwargs = cast(device_type or torch._C._get_privateuse1_backend_name(), args, kwargs)
        with torch._C._DisableAutocast():
            return getattr(overload._op, "cast", overload)(*args, **kwargs)

    return kernel


def registered_names() -> frozenset[str]:
    """Return ``namespace::name`` or ``namespace::name.overload`` of every op that is registered now."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def is_torch_attribute(namespace: str, name: str, overload: str) -> bool:
    """Return whether torch's own objects in ``torch.ops`` have an attribute named ``namespace``, ``name`` or
    ``overload``. Such an attribute would hide an op of that name.
    """
    levels = (
        (torch.ops, namespace, torch._ops._OpNamespace),
        (torch.ops.aten, name, torch._ops.OpOverloadPacket),
        (torch.ops.aten.add, overload, torch._ops.OpOverload),
    )
    return any(
        word in dir(type(holder)) or (word in vars(holder) and not isinstance(vars(holder)[word], kind))
        for holder, word, kind in levels
    )


def _custom_op_definition(name: str) -> Any:
    """Return torch's definition object of the op ``name`` if ``torch.library.custom_op`` made it. Return None for any
    other op.
    """
    custom = sys.modules.get("torch._library.custom_ops")
    return getattr(custom, "OPDEFS", {}).get(name.removesuffix(".default"))


def custom_op_module(name: str) -> str:
    """Return the name of the module whose Python function is the op ``name`` of ``torch.library.custom_op``. Return an
    empty string for any other op.
    """
    return str(getattr(getattr(_custom_op_definition(name), "_init_fn", None), "__module__", ""))


def library_namespaces(package: str) -> frozenset[str]:
    """Return the namespaces of the ``torch.library.Library`` objects that modules of ``package`` hold."""
    prefix = package + "."
    modules = [m for n, m in list(sys.modules.items()) if m is not None and (n == package or n.startswith(prefix))]
    held = (v for m in modules for v in list(vars(m).values()) if issubclass(type(v), Library))  # __class__ may warn
    return frozenset(library.ns for library in held)


def is_composite(name: str) -> bool:
    """Return whether the op ``namespace::name`` is composed of other ops. A dispatch mode then observes the other ops
    in place of it.
    """
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


_KEYS = (  # of dispatch, for which a library registers kernels and rules
    *("CPU", "CUDA", "XPU", "MPS", "CompositeExplicitAutograd", "CompositeImplicitAutograd", "FuncTorchBatched"),
    *("Meta", "Autograd", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA"),
)


def dispatch_keys(name: str) -> frozenset[str]:
    """Return those dispatch keys in ``_KEYS``, such as ``CPU`` and ``AutogradCPU``, for which the op
    ``namespace::name`` has its own kernel.
    """
    return frozenset(key for key in _KEYS if torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def has_gradient(name: str) -> bool:
    """Return whether torch has a gradient formula for the op ``namespace::name``. It has one for each op that is
    composed of other ops.

    Each op of ``torch.library.custom_op`` has a kernel for autograd, which raises an error in the backward if no
    formula was registered. Return False for such an op without a formula.
    """
    keys, definition = dispatch_keys(name), _custom_op_definition(name)
    if not keys & {"Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd"}:
        return False
    return definition is None or getattr(definition, "_backward_fn", definition) is not None


def has_meta_kernel(name: str) -> bool:
    """Return whether a call of the op ``namespace::name`` with tensors on the meta device finds an implementation."""
    namespace, _, rest = name.partition("::")
    op: Overload | None = find_overload(namespace, rest)
    return op is not None and bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "Meta"))
