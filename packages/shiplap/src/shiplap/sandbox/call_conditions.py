"""Calls of a target under other conditions of its caller than those of the other calls of a judgement."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shiplap.sandbox.device_memory import lies_on_device
from shiplap.sandbox.equal_bits import bits_are_equal
from shiplap.sandbox.protocol import tree_leaves
from shiplap.torch_private.process_state import set_deterministic

DELAYING_BYTES, DELAYS = 256 << 20, 100  # bytes that are written so many times, which takes a GPU some milliseconds


def call_in_other_thread(target: Callable[..., Any], *args: Any) -> Any:
    """Return what ``target`` returns for ``args`` in another thread, in inference mode, with deterministic algorithms
    and another number of threads of torch. Raise the exception that it raises.
    """
    outcome: list[Any] = []
    failed: list[BaseException] = []
    threads, strict = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()

    def run() -> None:
        """Call ``target``, and add its result to ``outcome`` or its exception to ``failed``."""
        torch.set_num_threads(1 if threads > 1 else 2)
        try:
            with torch.inference_mode():
                outcome.append(target(*args))
        except BaseException as e:
            failed.append(e)

    set_deterministic(True, warn_only=True)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        set_deterministic(strict, warn_only=warns)
        torch.set_num_threads(threads)
    if failed:
        raise failed[0]
    return outcome[0]


def call_on_other_stream(target: Callable[..., Any], *args: Any) -> Any:
    """Return what ``target`` returns for ``args`` on another stream of a GPU than the default one, with copies in the
    place of the tensors among them that lie there. Tensors inside lists and dicts stay as they are.

    The values of the copies arrive on that stream behind work of some milliseconds, and are zeros before. A kernel that
    is launched on the default stream, which does not wait for other streams of torch, reads these zeros.
    """
    given = [torch.zeros_like(a) if isinstance(a, Tensor) and lies_on_device(a) else a for a in args]
    room, stream = torch.empty(DELAYING_BYTES, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for value in range(DELAYS):
            room.fill_(value)
        for to, source in zip(given, args, strict=True):
            if to is not source:
                to.copy_(source)
        result = target(*given)
    torch.cuda.synchronize()
    return result


def call_under_autocast(target: Callable[..., Any], *args: Any) -> Any:
    """Return what ``target`` returns for ``args`` under autocast to bfloat16."""
    with torch.autocast("cuda" if any(map(lies_on_device, tree_leaves(list(args)))) else "cpu", torch.bfloat16):
        return target(*args)


def call_on_parameters(target: Callable[..., Any], *args: Any) -> Any:
    """Return what ``target`` returns for ``args`` if each of them that is a tensor and can have a gradient is a
    parameter of a module. Tensors inside lists and dicts stay as they are. It computes no gradient, as in evaluation.
    """
    return target(*(torch.nn.Parameter(a) if _can_be_parameter(a) else a for a in args))


def _can_be_parameter(value: Any) -> bool:
    """Return whether ``value`` is a tensor of a dtype that can have a gradient."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.itemsize > 1


def call_in_gradient_mode(target: Callable[..., Any], *args: Any) -> Any:
    """Return what ``target`` returns for ``args``, none of which requires a gradient, where gradients are recorded, as
    a caller without ``torch.no_grad`` has it.
    """
    with torch.enable_grad():
        return target(*args)


def call_on_one_tensor(target: Callable[..., Any], *args: Any) -> Any:
    """Return what ``target`` returns for ``args`` if tensors with equal sizes, strides and values are one tensor."""
    given: list[Any] = []
    for each in args:
        same = (a for a in given if isinstance(a, Tensor) and isinstance(each, Tensor) and _look_alike(a, each))
        given.append(next(same, each))
    return target(*given)


def _look_alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal dtypes, sizes, strides and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and bits_are_equal(a, b)


CONDITIONS = {
    "thread": call_in_other_thread,
    "stream": call_on_other_stream,
    "gradient mode": call_in_gradient_mode,
    "autocast": call_under_autocast,
    "parameters": call_on_parameters,
    "one tensor": call_on_one_tensor,
}
"""Functions that call a target under other conditions of the caller, by name."""
