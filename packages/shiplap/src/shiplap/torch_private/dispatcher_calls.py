"""Calls of an op without the Python that torch puts around them, and blocks of code outside of torch's modes.

Eager calls are counted in hundreds of nanoseconds. The conditions are therefore torch's own C functions, called one by
one: a frame of Python costs as much as one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling as is_dynamo_compiling
from torch.nn import Module, Parameter
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from typing_extensions import ParamSpec, TypeVar

from shiplap.torch_private import available

if TYPE_CHECKING:
    from torch._ops import OpOverload


P = ParamSpec("P", default=...)  # of the function that an op was declared from
R = TypeVar("R", bound=Tensor | Sequence[Tensor] | None, default=Any)
Returned = TypeVar("Returned")

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
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def untouched() -> bool:
    """Return whether no mode, tracer, functionalization or profiler of this thread has to see its calls of operators
    (takes 1 us).

    All of these except the function modes and the profiler set a dispatch key.
    """
    return _included().raw_repr() in _QUIET and not _function_modes() and not _profiled()


def builtin_of(overload: OpOverload[..., Any]) -> Callable[..., Any]:
    """Return the C function that a call of ``overload`` reduces to, or ``overload`` itself where its call does more.

    C++ code below that function handles modes, subclasses and tracers. Dynamo supports ``overload`` only.
    """
    if type(overload) is not torch._ops.OpOverload:
        return overload
    plain: Callable[..., Any] | None = getattr(overload._op, "plain", None)  # torch_private/dispatcher_library.py
    if plain is None:
        plain = overload._op if available("calls past OpOverload.__call__") else overload
    return plain


def in_code(overload: OpOverload[..., Any]) -> Callable[..., Any]:
    """Return the function that Inductor's generated code calls for ``overload``. It runs below autograd where the op
    has such a form, since that code records no gradients.
    """
    if type(overload) is not torch._ops.OpOverload:
        return overload
    coded: Callable[..., Any] = getattr(overload._op, "coded", overload._op)  # torch_private/dispatcher_library.py
    return coded


def _is_transformed() -> bool:
    """Return whether a trace, autocast, a transform of torch.func, or an open level of forward-mode AD has to see this
    thread's calls.
    """
    if is_dynamo_compiling() or compiler._is_compiling_flag or any_autocast() or functorch_transform() is not None:
        return True
    return bool(forward._current_level >= 0)


def is_compiling() -> bool:
    """Return whether Dynamo or another tracer of ``torch.compile`` or export traces this call."""
    return bool(is_dynamo_compiling() or compiler._is_compiling_flag)


def without_gradients(overload: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Call ``overload``, which records no gradients, with gradients switched off unless an argument requires one.

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
    """Return whether a call of ``module`` runs more than the ``forward`` of its class, that is hooks or a ``forward``
    set on the instance.
    """
    own: Any = module
    hooks = own._forward_hooks or own._forward_pre_hooks or own._backward_hooks or own._backward_pre_hooks
    return bool(hooks or "forward" in own.__dict__ or _any_global_hook())


def is_last_backward() -> bool:
    """Return whether an eager backward is running that is the last of its graph, because the graph is not kept.

    A tensor that an op returned for its backward alone may then be written to.
    """
    return not _is_transformed() and untouched() and not torch.is_grad_enabled() and not _keeps_graph()


def is_plain_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether no gradient, autocast, transform or trace has to see a call with these arguments, so that it may
    go below autograd.
    """
    if _is_transformed():
        return False
    return not (torch.is_grad_enabled() and any_requires_grad(*args, **kwargs))


def is_recorded_call(args: Sequence[Any]) -> bool:
    """Return whether nothing besides autograd has to see a call with these arguments, all of them plain tensors or
    other values.
    """
    if _is_transformed() or not untouched():
        return False
    kinds = {*map(type, args)} - _PLAIN
    return not kinds or not any(issubclass(kind, Tensor) for kind in kinds)


_CASTING = ("cpu", "cuda")  # the device types whose autocast is found without torch's dispatcher


def autocast_alone(args: Sequence[Any]) -> str | None:
    """Return the device type whose autocast has to see this call of plain tensors, if nothing else does but autograd,
    else None.
    """
    if is_dynamo_compiling() or compiler._is_compiling_flag or functorch_transform() is not None:
        return None
    if forward._current_level >= 0 or not _SIMPLE.issuperset(map(type, args)) or not untouched():
        return None
    kinds = {value.device.type for value in args if isinstance(value, Tensor)}
    kind = kinds.pop() if len(kinds) == 1 else ""  # of two device types, torch's dispatcher knows which comes first
    return kind if kind in _CASTING and torch.is_autocast_enabled(kind) else None


def is_autocast_on(kind: str) -> bool:
    """Return whether autocast of the device type ``kind`` sees the calls of this thread."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def is_in_autocast_region(kind: str) -> bool:
    """Return whether this thread is in an autocast region, of the device type ``kind`` where that can be known.

    The calls that autocast and fake tensors make exclude autocast, so that torch says that it is off. The depth of
    nested regions still counts the one around them, which torch gives only as the result of a change.
    """
    if is_autocast_on(kind):
        return True
    depth: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


def outside_autocast() -> Any:
    """Return a context in which autocast of no device type sees a call."""
    return torch._C._DisableAutocast()


def call_outside_autocast(function: Callable[..., Returned], *args: Any) -> Returned:
    """Return ``function(*args)``, called in :func:`outside_autocast`."""
    with torch._C._DisableAutocast():
        return function(*args)


class DirectCall(Generic[P, R]):
    """The call of an op: ``call_kernel`` if only a kernel has to see the call, else ``_call_dispatcher``.

    Attributes:
        can_skip_dispatcher: whether ``call_kernel`` is below autograd and autocast, so that both are checked here.
        _record_plain_call: calls its first argument with the others, and records that for autograd. None if more is
            needed.
        _record_natively: records a call in C++, where native code does. It goes through torch's dispatcher.
        overload: the torch op, which represents a call in a graph.
    """

    can_skip_dispatcher: bool
    overload: OpOverload[..., Any]
    call_kernel: Callable[..., Tensor | tuple[Tensor, ...] | None]  # of positional arguments
    _record_plain_call: Callable[..., Tensor | tuple[Tensor, ...] | None] | None = None
    _record_natively: Callable[..., Tensor | tuple[Tensor, ...] | None] | None = None

    def _call_dispatcher(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | tuple[Tensor, ...] | None:
        """Make a call through torch's dispatcher, which ``call_kernel`` cannot serve because a gradient, a mode or a
        transform has to see it, and return its results.
        """
        raise NotImplementedError

    def _call_traced(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a call that Dynamo traces: the registered overload itself, which becomes one node of the graph."""
        return self.overload(*args, **kwargs)

    def _explain_failure(self, args: Sequence[Any], kwargs: Mapping[str, Any], cause: Exception) -> bool:
        """Raise the error of the declaration behind a call that failed with ``cause``, if it says more than ``cause``
        does.

        Return True if a missing part has been added, so that the call is to be made once more.
        """
        raise NotImplementedError

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the op by the shortest way that serves these arguments: the kernel alone, a kernel that autograd
        records, or the dispatcher.
        """
        if is_dynamo_compiling():
            # It traces each line of ours, at every call of an op. Since 2.14, it also traces the handlers of an error
            # that a fake raises: `_explain_failure` would hide that error behind whatever cannot be traced in it.
            traced: R = self._call_traced(args, kwargs)
            return traced
        result: Tensor | tuple[Tensor, ...] | None
        try:
            # is_plain_call and is_recorded_call without their frames, and unpacking keywords that are rarely there. A
            # declaration in another thread may change the attributes at any time: each is read once.
            if (
                kwargs
                or compiler._is_compiling_flag
                or (
                    self.can_skip_dispatcher
                    and (any_autocast() or functorch_transform() is not None or forward._current_level >= 0)
                )
            ):
                result = self._call_dispatcher(args, kwargs)
            elif not self.can_skip_dispatcher or not is_grad_enabled() or not any_requires_grad(*args):
                result = self.call_kernel(*args)
            elif (native := self._record_natively) is not None:
                result = native(*args)
            elif (
                (recorded := self._record_plain_call) is None
                or not _SIMPLE.issuperset(map(type, args))
                or not untouched()
            ):
                result = self._call_dispatcher(args, kwargs)
            else:
                result = recorded(self.call_kernel, *args)
            return result  # type: ignore[return-value] # it is what the declaration says
        except (RuntimeError, TypeError) as e:
            if self._explain_failure(args, kwargs, e):
                return DirectCall.__call__(self, *args, **kwargs)
            raise
        except ValueError as e:  # a refused argument, which says itself what is wrong unless autocast has a part in it
            if any_autocast():
                self._explain_failure(args, kwargs, e)
            raise


Parameters = ParamSpec("Parameters")
Built = TypeVar("Built")


def without_modes() -> AbstractContextManager[object]:
    """Return a context without dispatch modes, in which a compiler's fake tensors are not made."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


@contextmanager
def outside_modes(*owners: Tensor) -> Iterator[None]:
    """Enter a block for values that are computed from ``owners`` and outlive the modes of this thread.

    A value that is computed once and kept, such as a table of neighbours or a packed weight, is used after the mode in
    which it was computed has ended. A tensor made in inference mode cannot be saved for a later backward, one made
    under a fake mode has no memory, and one made at a level of ``torch.func`` belongs to that level.

    The block is outside of inference mode, gradients, autocast, dispatch and function modes (fake tensors, traces,
    ``with torch.device``) and the levels of ``torch.func``. If an owner itself belongs to one of those, such as a fake
    tensor, the computed values do as well, and the block is outside of inference mode alone. A function that Dynamo
    traces must not enter it.
    """
    inference = torch.is_inference_mode_enabled()
    with ExitStack() as stack:
        if inference or any_autocast() or functorch_transform() is not None or not untouched():
            if not any(map(_belongs_to_mode, owners)):
                _leave_modes(stack, owners)
            elif not inference:
                yield
                return
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


def _leave_modes(stack: ExitStack, owners: Iterable[Tensor]) -> None:
    """Leave the transforms of torch.func, dispatch modes, torch functions and autocast of this thread until ``stack``
    is closed.
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    stack.enter_context(temporarily_clear_interpreter_stack())
    stack.enter_context(without_modes())
    stack.enter_context(torch._C.DisableTorchFunction())
    if any_autocast():
        for kind in {"cpu", *(owner.device.type for owner in owners)}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))


def built_outside_modes(function: Callable[Parameters, Built]) -> Callable[Parameters, Built]:
    """Return ``function``, decorated to run in :func:`outside_modes` of the tensors among its arguments.

    Objects and classes that have ``tensors``, a list, count with those. In a graph of Dynamo the function is traced.
    """

    @wraps(function)
    def built(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Built:
        """Call the function outside of all modes, or directly while Dynamo traces the call."""
        if is_dynamo_compiling():
            return function(*args, **kwargs)
        with outside_modes(*_tensors_among((*args, *kwargs.values()))):
            return function(*args, **kwargs)

    return built


def _tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among ``values``: tensors, own parameters and buffers of modules, and members of ``tensors`` of
    other objects.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, torch.nn.Module):
            yield from (*value.parameters(recurse=False), *value.buffers(recurse=False))
        else:
            yield from (t for t in getattr(value, "tensors", ()) if isinstance(t, Tensor))


def _belongs_to_mode(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is fake, of another subclass, wrapped by a transform, or an input of a running trace,
    so that it belongs to a mode.
    """
    if type(tensor) not in _PLAIN or torch._is_functional_tensor(tensor):
        return True
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return True
    if untouched():
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    trace: Any = get_proxy_mode()
    return trace is not None and tensor in trace.tracer.tensor_tracker


def without_memory(t: Tensor) -> bool:
    """Return whether ``t`` stands for zeros that have no memory. Forward mode makes such tangents of constants.

    Computing with such a tensor below autograd ends the process (torch 2.11 to 2.13).
    """
    return bool(t._is_zerotensor())
