"""Calls of an op without the Python that torch puts around them.

Eager calls are counted in hundreds of nanoseconds, so the questions are torch's own C functions, asked one by one: a
frame of Python costs as much as one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

__all__ = ["ShortCut", "builtin", "is_plain_call", "is_recorded_call", "is_zero", "untouched"]

compiler: Any = torch.compiler
forward: Any = forward_ad
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
functorch_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_PLAIN = (Tensor, torch.nn.Parameter)
is_zero: Callable[[Tensor], bool] = Tensor._is_zerotensor  # zeros that have no memory
_KEYS: Any = torch._C.DispatchKey
_quiet: Any = torch._C.DispatchKeySet(_KEYS.BackendSelect)
_QUIET = frozenset((_quiet.raw_repr(), _quiet.add(_KEYS.ADInplaceOrView).raw_repr()))  # the first: inference mode
_included: Callable[[], Any] = torch._C._dispatch_tls_local_include_set
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled


def untouched() -> bool:
    """Whether no mode, tracer, functionalization or profiler of this thread has to see its calls (1 us).

    Known to hold on torch 2.11 to 2.15: each of them but the last two puts a dispatch key into force.
    """
    return _included().raw_repr() in _QUIET and not _function_modes() and not _profiled()


def builtin(overload: Any) -> Callable[..., Any]:
    """The C function that ``overload`` calls and nothing else; ``overload`` itself where its call does more.

    Modes, subclasses and tracers are seen to in C++ below it. Dynamo knows ``overload`` only.
    """
    return overload._op if type(overload) is torch._ops.OpOverload else overload


def _transformed() -> bool:
    """Whether a trace, autocast, torch.func or forward-mode AD (a level is open) has to see this thread's calls."""
    if torch.compiler.is_compiling() or any_autocast() or functorch_transform() is not None:
        return True
    return bool(forward._current_level >= 0)


def is_plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no gradient, autocast, transform or trace has to see this call: it may go below autograd."""
    if _transformed():
        return False
    return not (torch.is_grad_enabled() and any_requires_grad(*args, **kwargs))


def is_recorded_call(args: tuple[Any, ...]) -> bool:
    """Whether autograd alone has to see this call of plain tensors."""
    if _transformed() or not untouched():
        return False
    return not any(isinstance(a, Tensor) and type(a) not in _PLAIN for a in args)


class ShortCut:
    """An op's call: plain ones go to ``_plain``, all others to ``_dispatch``; ``_explain`` sees what went wrong."""

    _split: bool  # whether `_plain` is below autograd and autocast
    _plain: Callable[..., Any]
    _dispatch: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    _explain: Callable[[tuple[Any, ...], dict[str, Any], Exception], None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            # is_plain_call without its frame, that of is_compiling, and unpacking keywords that are rarely there.
            if (
                kwargs
                or is_dynamo_compiling()
                or compiler._is_compiling_flag
                or (
                    self._split
                    and (
                        any_autocast()
                        or functorch_transform() is not None
                        or forward._current_level >= 0
                        or (is_grad_enabled() and any_requires_grad(*args))
                    )
                )
            ):
                return self._dispatch(args, kwargs)
            return self._plain(*args)
        except (RuntimeError, TypeError) as e:
            self._explain(args, kwargs, e)
            raise
