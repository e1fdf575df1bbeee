"""Modes of torch: one that sees every operator (``torch.utils._python_dispatch``), and blocks that are outside of all.

What is computed once and kept, such as a table of neighbours or a packed weight, is used after the mode in which it was
asked for has ended. A tensor made in inference mode cannot be saved for a later backward. One made under a fake mode
has no memory. One made at a level of ``torch.func`` belongs to that level. So it is built outside of these modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import ParamSpec, TypeVar

from shiplap.torch_private.dispatcher_calls import any_autocast, functorch_transform, untouched

P = ParamSpec("P")
R = TypeVar("R")

__all__ = ["TorchDispatchMode"]

_PLAIN = frozenset((Tensor, Parameter))


def without_modes() -> AbstractContextManager[object]:
    """A block in which no mode is in force: a compiler's fake tensors are not made in it."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


@contextmanager
def outside_modes(*owners: Tensor) -> Iterator[None]:
    """A block for what is computed from ``owners`` and outlives the modes of this thread.

    The block is outside of inference mode, gradients, autocast, dispatch and function modes (fake tensors, traces,
    ``with torch.device``) and the levels of ``torch.func``. Where an owner itself belongs to one of those, such as a
    fake tensor, so does whatever is computed from it: then the block is outside of inference mode alone. A function
    that Dynamo traces must not enter it.
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
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    stack.enter_context(temporarily_clear_interpreter_stack())
    stack.enter_context(without_modes())
    stack.enter_context(torch._C.DisableTorchFunction())
    if any_autocast():
        for kind in {"cpu", *(owner.device.type for owner in owners)}:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))


def built_outside_modes(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: ``function`` runs in :func:`outside_modes` of the tensors among its arguments.

    Objects and classes that have ``tensors``, a list, count with those. In a graph of Dynamo the function is traced.
    """

    @wraps(function)
    def built(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling():
            return function(*args, **kwargs)
        with outside_modes(*_tensors_among((*args, *kwargs.values()))):
            return function(*args, **kwargs)

    return built


def _tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, torch.nn.Module):
            yield from (*value.parameters(recurse=False), *value.buffers(recurse=False))
        else:
            yield from (t for t in getattr(value, "tensors", ()) if isinstance(t, Tensor))


def _belongs_to_mode(tensor: Tensor) -> bool:
    """Whether ``tensor`` is fake, of a subclass, wrapped by a transform, or an input of a trace that is under way."""
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
    """Whether ``t`` stands for zeros that are nowhere in memory: forward mode makes such tangents of constants.

    To compute with one below autograd ends the process (torch 2.11 to 2.13).
    """
    return bool(t._is_zerotensor())
