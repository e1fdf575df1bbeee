"""The needs of a launch other than its tensors. They are scratch memory, and the right device as the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from shiplap.declare.binding import Binding
from shiplap.declare.dim_expression import Expr
from shiplap.declare.spec import OpSpec
from shiplap.declare.values import EnvValue
from shiplap.dispatch.outputs import tensors_in_arguments
from shiplap.errors import error


def is_current_device(device: torch.device) -> bool:
    """Return whether ``device`` is the current CUDA device, on which Triton and other launchers launch. The result is
    True for the CPU.
    """
    return device.type != "cuda" or device.index == torch.cuda.current_device()


def is_capturing(device: torch.device) -> bool:
    """Return whether the current CUDA stream is being captured into a CUDA graph. The result is False for the CPU."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(spec: OpSpec, device: torch.device) -> None:
    """Raise ``SL318`` during a CUDA graph capture for an op whose result sizes depend on data. The copy of the sizes to
    the host would break the capture.
    """
    if is_capturing(device):
        got = f"a CUDA graph capture, and {', '.join(spec.dynamic)} that depends on data"
        raise error("SL318", where=spec.name, got=got, expected="a call outside of a capture")


# None leaves workspaces uninitialised, as outside of an audit.
_workspace_fill: ContextVar[int | None] = ContextVar("shiplap_workspace_fill", default=None)
_poison_listeners: list[Callable[[int | None], None]] = []


def add_poison_listener(listener: Callable[[int | None], None]) -> None:
    """Call ``listener`` with the byte that fills scratch memory during a test, now and whenever it changes. The byte is
    None if the memory stays uninitialised. Native bindings that allocate workspaces themselves register a listener.
    """
    _poison_listeners.append(listener)
    listener(_workspace_fill.get())


def _notify_poison_listeners() -> None:
    """Call all listeners with the byte that fills workspaces now, or None if they stay uninitialised."""
    for listener in _poison_listeners:
        listener(_workspace_fill.get())


@contextmanager
def poisoned_workspace(byte: int) -> Iterator[None]:
    """Enter a context in which every workspace is filled with ``byte``. A kernel that reads uninitialised scratch
    memory then has a result that depends on ``byte``.
    """
    token = _workspace_fill.set(byte)
    _notify_poison_listeners()
    try:
        yield
    finally:
        _workspace_fill.reset(token)
        _notify_poison_listeners()


def allocate_workspace(expr: Expr | None, call: Binding) -> Tensor:
    """Return scratch memory for a call as a uint8 tensor. The value of the expression ``expr`` for the sizes of the
    call is its number of bytes. PyTorch's allocator provides it, so that a CUDA graph pool owns it.
    """
    return allocate_bytes(workspace_size(expr, call), call.device)


def allocate_bytes(size: int, device: torch.device) -> Tensor:
    """Return a uint8 tensor of ``size`` bytes, uninitialised or filled with the byte of :func:`poisoned_workspace`."""
    made = torch.empty(size, dtype=torch.uint8, device=device)
    # Uninitialised by default: filling takes time, and only audits need it.
    byte = _workspace_fill.get()
    return made if byte is None else made.fill_(byte)


def workspace_size(expr: Expr | None, call: Binding) -> int:
    """Return the bytes of scratch memory that the workspace expression ``expr`` gives for this call. Return 0 if
    ``expr`` is None. Raise ``SL208`` if the number is negative.
    """
    if expr is None:
        return 0
    # The environment of the call is not changed, since later steps read it as well.
    env: dict[str, EnvValue] = call.env
    if "threads" in expr.names:
        env = {**env, "threads": torch.get_num_threads()}
    if "itemsize" in expr.names:
        env = {**env, "itemsize": _widest_itemsize(call)}
    size = int(expr(env))
    if size < 0:
        raise error(
            "SL208",
            what="the size of the workspace is negative",
            where="workspace=",
            got=f"{expr.source} = {size}",
            expected="a number of bytes",
            fix=f'write workspace="max({expr.source}, 0)", or exclude such sizes with requires=',
        )
    return size


def _widest_itemsize(call: Binding) -> int:
    """Return the bytes of an element of the widest dtype among the call's dtype classes (annotations such as
    ``Float``). If there are none, return that of its widest tensor, or 1.
    """
    return max(
        (d.itemsize for d in call.dtypes.values() or (t.dtype for t in tensors_in_arguments(call.args))), default=1
    )
