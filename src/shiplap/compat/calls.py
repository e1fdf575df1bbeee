"""Calls of an op without the Python that torch puts around them.

Eager calls are counted in hundreds of nanoseconds, so the questions are torch's own C functions, asked one by one: a
frame of Python costs as much as one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

__all__ = ["ShortCut", "builtin", "is_plain_call"]

compiler: Any = torch.compiler
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad
functorch_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


def builtin(overload: Any) -> Callable[..., Any]:
    """The C function that ``overload`` calls and nothing else; ``overload`` itself where its call does more.

    Modes, subclasses and tracers are seen to in C++ below it. Dynamo knows ``overload`` only.
    """
    return overload._op if type(overload) is torch._ops.OpOverload else overload


def is_plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no gradient, autocast, functorch transform or trace has to see this call: it may go below autograd."""
    if torch.compiler.is_compiling() or any_autocast() or functorch_transform() is not None:
        return False
    return not (torch.is_grad_enabled() and any_requires_grad(*args, **kwargs))


class ShortCut:
    """An op's call: plain ones go to ``_plain``, all others to ``_dispatch``; ``_explain`` sees what went wrong."""

    _split: bool  # whether `_plain` is below autograd and autocast
    _plain: Callable[..., Any]
    _dispatch: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    _explain: Callable[[tuple[Any, ...], dict[str, Any], Exception], None]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            # is_plain_call without its frame, that of is_compiling, and unpacking keywords that are rarely there.
            if kwargs or is_dynamo_compiling() or compiler._is_compiling_flag or (self._split and (
                any_autocast() or functorch_transform() is not None or (is_grad_enabled() and any_requires_grad(*args))
            )):  # fmt: skip
                return self._dispatch(args, kwargs)
            return self._plain(*args)
        except (RuntimeError, TypeError) as e:
            self._explain(args, kwargs, e)
            raise
