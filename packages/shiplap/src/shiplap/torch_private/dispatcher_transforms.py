"""torch.func and forward-mode gradients, for the Autograd kernel of an op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

if TYPE_CHECKING:
    from shiplap.torch_private.dispatcher_library import Keys, Overload


class Recorder(Protocol):
    """An ``autograd.Function``: ``apply`` calls its forward and records it."""

    def apply(self, *args: Any) -> Tensor | tuple[Tensor, ...] | None: ...


def function(name: str, members: dict[str, Any]) -> Recorder:
    """Return an ``autograd.Function`` of that name."""
    made: Any = type(name, (torch.autograd.Function,), members)
    recorder: Recorder = made
    return recorder


_level: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_AFTER_AUTOGRAD: Any = torch._C._after_autograd_keyset


def active() -> bool:
    """Return whether torch.func or forward-mode AD is active in this thread."""
    return _level() is not None or forward_ad._current_level >= 0


def carries_tangent(values: Iterable[Any]) -> bool:
    """Return whether any tensor, or tensor of a list, is a dual one, so that forward-mode AD needs the tangent of the
    result.
    """
    lists = [v if isinstance(v, (list, tuple)) else (v,) for v in values]
    tensors = [v for vs in lists for v in vs if isinstance(v, Tensor)]
    unpack: Any = forward_ad.unpack_dual
    return any(unpack(t, level=0).tangent is not None for t in tensors)  # torch has one level


def with_tangents(values: Any, other: Any) -> Any:
    """Return ``values``, a tensor or several, with the tangents of ``other``."""
    if not isinstance(values, Tensor):
        return tuple(with_tangents(v, o) for v, o in zip(values, other, strict=True))
    unpack: Any = forward_ad.unpack_dual
    primal, tangent = unpack(values, level=0).primal, unpack(other, level=0).tangent
    make_dual: Any = forward_ad.make_dual
    return primal if tangent is None else make_dual(primal, tangent, level=0)


def below_autograd(overload: Overload, keys: Keys | None) -> Callable[..., Any]:
    """Return the call of ``overload`` below autograd at this level. Transforms further out see all of it."""
    redispatch = partial(overload.redispatch, keys & _AFTER_AUTOGRAD)

    def below(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):  # a Function's forward has both off
            return redispatch(*args, **kwargs)

    return below


def level_function(name: str, members: dict[str, Any]) -> Recorder:
    """Return an ``autograd.Function`` that records at one level of torch.func, as the formulas of torch's own ops
    do.
    """
    made: Any = type(name, (_SingleLevelFunction,), members)
    recorder: Recorder = made
    return recorder


def apply_at_level(function: Recorder, *args: Any) -> Tensor | tuple[Tensor, ...] | None:
    """Record a call of a :func:`level_function`."""
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return function.apply(*args)
