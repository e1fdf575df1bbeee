"""Calls of an op without the Python that torch puts around them.

Eager calls are counted in hundreds of nanoseconds. The conditions are therefore torch's own C functions, called one by
one: a frame of Python costs as much as one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Module, Parameter
from torch.nn.modules import module as modules
from typing_extensions import ParamSpec, TypeVar

from shiplap.torch_private import available

if TYPE_CHECKING:
    from shiplap.torch_private.dispatcher_library import Overload

__all__ = [
    "DirectCall",
    "P",
    "R",
    "allows_tf32",
    "autocast_alone",
    "builtin_of",
    "in_code",
    "is_autocast_on",
    "is_compiling",
    "is_dynamo_compiling",
    "is_hooked",
    "is_plain_call",
    "is_recorded_call",
    "is_zero",
    "outside_autocast",
    "untouched",
    "without_gradients",
]

P = ParamSpec("P", default=...)  # of the function that an op was declared from
R = TypeVar("R", bound=Tensor | Sequence[Tensor] | None, default=Any)

compiler: Any = torch.compiler
forward: Any = forward_ad
allows_tf32: Callable[[], bool] = torch._C._get_cublas_allow_tf32
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
_PLAIN = frozenset((Tensor, Parameter))
_SIMPLE = _PLAIN | {type(None), bool, int, float, str, list, tuple}  # of these none is a subclass of tensors
functorch_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
is_zero: Callable[[Tensor], bool] = Tensor._is_zerotensor  # zeros that have no memory
_KEYS: Any = torch._C.DispatchKey
_quiet: Any = torch._C.DispatchKeySet(_KEYS.BackendSelect)
_QUIET = frozenset((_quiet.raw_repr(), _quiet.add(_KEYS.ADInplaceOrView).raw_repr()))  # the first: inference mode
_included: Callable[[], Any] = torch._C._dispatch_tls_local_include_set
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_any_global_hook: Callable[[], Any] = vars(modules)["_has_any_global_hook"]


def untouched() -> bool:
    """Return whether no mode, tracer, functionalization or profiler of this thread has to see its calls (1 us).

    All of these except the function modes and the profiler set a dispatch key.
    """
    return _included().raw_repr() in _QUIET and not _function_modes() and not _profiled()


def builtin_of(overload: Overload) -> Callable[..., Any]:
    """Return the C function that a call of ``overload`` reduces to, or ``overload`` itself where its call does more.

    C++ code below that function handles modes, subclasses and tracers. Dynamo supports ``overload`` only.
    """
    if type(overload) is not torch._ops.OpOverload:
        return overload
    plain: Callable[..., Any] | None = getattr(overload._op, "plain", None)  # torch_private/dispatcher_library.py
    if plain is None:
        plain = overload._op if available("calls past OpOverload.__call__") else overload
    return plain


def in_code(overload: Overload) -> Callable[..., Any]:
    """Return the function that Inductor's code calls for ``overload``, below autograd, as that code records no
    gradients.
    """
    if type(overload) is not torch._ops.OpOverload:
        return overload
    coded: Callable[..., Any] = getattr(overload._op, "coded", overload._op)  # torch_private/dispatcher_library.py
    return coded


def _is_transformed() -> bool:
    """Return whether a trace, autocast, torch.func or forward-mode AD (a level is open) has to see this thread's
    calls.
    """
    if is_dynamo_compiling() or compiler._is_compiling_flag or any_autocast() or functorch_transform() is not None:
        return True
    return bool(forward._current_level >= 0)


def is_compiling() -> bool:
    """Return whether a trace has to see this call."""
    return bool(is_dynamo_compiling() or compiler._is_compiling_flag)


def without_gradients(overload: Overload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Call ``overload``, which records nothing, with gradients off where no argument requires one.

    Native code cannot read whether a tensor requires a gradient, and passes every call with gradients on to Python.
    Lists are not searched, so an op that takes lists of tensors must not be called like this.
    """
    if is_dynamo_compiling() or compiler._is_compiling_flag:
        overload(*args, **kwargs)
    elif not is_grad_enabled() or any_requires_grad(*args, **kwargs):
        builtin_of(overload)(*args, **kwargs)
    else:
        set_grad_enabled(False)
        try:
            builtin_of(overload)(*args, **kwargs)
        finally:
            set_grad_enabled(True)


def is_hooked(module: Module) -> bool:
    """Return whether a call of ``module`` runs more than the ``forward`` of its class: hooks, or a ``forward`` of its
    own.
    """
    own: Any = module
    hooks = own._forward_hooks or own._forward_pre_hooks or own._backward_hooks or own._backward_pre_hooks
    return bool(hooks or "forward" in own.__dict__ or _any_global_hook())


def is_plain_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether no gradient, autocast, transform or trace has to see this call, so that it may go below
    autograd.
    """
    if _is_transformed():
        return False
    return not (torch.is_grad_enabled() and any_requires_grad(*args, **kwargs))


def is_recorded_call(args: Sequence[Any]) -> bool:
    """Return whether autograd alone has to see this call of plain tensors."""
    if _is_transformed() or not untouched():
        return False
    kinds = {*map(type, args)} - _PLAIN
    return not kinds or not any(issubclass(kind, Tensor) for kind in kinds)


_CASTING = {kind: torch._C.DispatchKeySet(getattr(_KEYS, f"Autocast{kind.upper()}")) for kind in ("cpu", "cuda")}


def autocast_alone(args: Sequence[Any]) -> str | None:
    """Return the device type whose autocast has to see this call of plain tensors, if nothing else does but
    autograd.
    """
    if is_dynamo_compiling() or compiler._is_compiling_flag or functorch_transform() is not None:
        return None
    if forward._current_level >= 0 or not _SIMPLE.issuperset(map(type, args)) or not untouched():
        return None
    kinds = {value.device.type for value in args if isinstance(value, Tensor)}
    kind = kinds.pop() if len(kinds) == 1 else ""  # of two device types, torch's dispatcher knows which comes first
    return kind if kind in _CASTING and torch.is_autocast_enabled(kind) else None


def is_autocast_on(kind: str) -> bool:
    """Whether this thread is in an autocast region of the device type ``kind``."""
    return kind in _CASTING and torch.is_autocast_enabled(kind)


def outside_autocast(kind: str) -> Any:
    """Return a context in which autocast of the device type ``kind`` sees no call, as in the calls that autocast
    makes.
    """
    return torch._C._ExcludeDispatchKeyGuard(_CASTING[kind])


class DirectCall(Generic[P, R]):
    """The call of an op: ``direct`` if only a kernel has to see the call, else ``through`` the dispatcher.

    Attributes:
        separable: whether ``direct`` is below autograd and autocast, so that both have to be checked here.
        recorded: calls its first argument with the others, and records that for autograd. None if more is needed.
        overload: the torch op, which represents a call in a graph.
    """

    separable: bool
    overload: Overload
    direct: Callable[..., Tensor | tuple[Tensor, ...] | None]  # of positional arguments
    recorded: Callable[..., Tensor | tuple[Tensor, ...] | None] | None = None

    def through(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | tuple[Tensor, ...] | None:
        """Make any call that ``direct`` cannot serve."""
        raise NotImplementedError

    def traced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | tuple[Tensor, ...] | None:
        """Make a call that Dynamo traces."""
        result: Tensor | tuple[Tensor, ...] | None = self.overload(*args, **kwargs)
        return result

    def explain(self, args: Sequence[Any], kwargs: Mapping[str, Any], cause: Exception) -> bool:
        """Raise the error behind a call that failed, if it says more than ``cause`` does.

        Return True if a missing part has been added, so that the call is to be made once more.
        """
        raise NotImplementedError

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: Tensor | tuple[Tensor, ...] | None
        if is_dynamo_compiling():
            # It traces each line of ours, at every call of an op. Since 2.14, it also traces the handlers of an error
            # that a fake raises: `explain` would hide that error behind whatever cannot be traced in it.
            result = self.traced(args, kwargs)
            return result  # type: ignore[return-value] # it is what the declaration says
        try:
            # is_plain_call and is_recorded_call without their frames, and unpacking keywords that are rarely there. A
            # declaration in another thread may change the attributes at any time: each is read once.
            if (
                kwargs
                or compiler._is_compiling_flag
                or (
                    self.separable
                    and (any_autocast() or functorch_transform() is not None or forward._current_level >= 0)
                )
            ):
                result = self.through(args, kwargs)
            elif not self.separable or not is_grad_enabled() or not any_requires_grad(*args):
                result = self.direct(*args)
            elif (recorded := self.recorded) is None or not _SIMPLE.issuperset(map(type, args)) or not untouched():
                result = self.through(args, kwargs)
            else:
                result = recorded(self.direct, *args)
            return result  # type: ignore[return-value] # it is what the declaration says
        except (RuntimeError, TypeError) as e:
            if self.explain(args, kwargs, e):
                return self(*args, **kwargs)
            raise
        except ValueError as e:  # a refused argument, which says itself what is wrong unless autocast has a part in it
            if any_autocast():
                self.explain(args, kwargs, e)
            raise
