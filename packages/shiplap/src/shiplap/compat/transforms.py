"""torch.func and forward-mode gradients, as the Autograd kernel of an op meets them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

__all__ = ["active", "apply_at_level", "below_autograd", "carries_tangent", "level_function"]

_level: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
_AFTER_AUTOGRAD: Any = torch._C._after_autograd_keyset


def active() -> bool:
    """Whether torch.func or forward-mode AD is under way in this thread."""
    return _level() is not None or forward_ad._current_level >= 0


def carries_tangent(values: Iterable[Any]) -> bool:
    """Whether any tensor, or tensor of a list, is a dual one: forward-mode AD asks for the tangent of the result."""
    lists = [v if isinstance(v, (list, tuple)) else (v,) for v in values]
    tensors = [v for vs in lists for v in vs if isinstance(v, Tensor)]
    return any(forward_ad.unpack_dual(t, level=0).tangent is not None for t in tensors)  # torch has one level


def below_autograd(overload: Any, keys: Any) -> Callable[..., Any]:
    """The call of ``overload`` that comes after autograd at this level: transforms further out see all of it."""
    redispatch = partial(overload.redispatch, keys & _AFTER_AUTOGRAD)

    def below(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):  # a Function's forward has both off
            return redispatch(*args, **kwargs)

    return below


def level_function(name: str, members: dict[str, Any]) -> Any:
    """An ``autograd.Function`` that records at one level of torch.func, as the formulas of torch's own ops do."""
    return type(name, (_SingleLevelFunction,), members)


def apply_at_level(function: Any, *args: Any) -> Any:
    """Record a call of a :func:`level_function`."""
    from torch._functorch.utils import enable_single_level_autograd_function

    with enable_single_level_autograd_function():
        return function.apply(*args)
