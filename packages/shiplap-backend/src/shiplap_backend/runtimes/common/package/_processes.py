"""Tensors of the device between processes: a queue or a pipe carries a copy in host memory to the receiver's device.

Memory is not shared: the bytes themselves are sent, so the sender may end before they are received. What cannot be
copied raises where it is received, since a queue pickles in a thread of its own, where an error would leave the
receiver waiting for ever. A tensor that autograd made is the exception: it raises in the sender, as for torch's other
devices.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing.reductions as shared

_NAME = ""  # of the device: `register`


def register(name: str) -> None:
    """Register with ``torch.multiprocessing`` how tensors and storages of the device ``name`` are sent to other
    processes.

    They are sent as copies in host memory.
    """
    global _NAME
    _NAME = name
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduce_tensor)
    ForkingPickler.register(torch.UntypedStorage, _reduce_storage)


def _reduce_tensor(value: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and the arguments with which another process rebuilds the tensor ``value``.

    A tensor of this device is rebuilt from a copy of its values. Raise ``RuntimeError`` if autograd computed it. Any
    other tensor is reduced by torch's own function.
    """
    if value.device.type != _NAME:
        reduced: tuple[Callable[..., Any], tuple[Any, ...]] = shared.reduce_tensor(value)
        return reduced
    # As torch's own reduction says for other devices.
    if value.requires_grad and not value.is_leaf:
        raise RuntimeError("a tensor that autograd made cannot be sent to another process: detach() it first")
    parameter = isinstance(value, torch.nn.Parameter)
    return _reduce_copy(value.detach(), _rebuild_tensor, str(value.device), value.requires_grad, parameter)


def _reduce_storage(value: torch.UntypedStorage) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and the arguments with which another process rebuilds the storage ``value``.

    A storage of this device is rebuilt from a copy of its bytes. Any other storage is reduced by torch's own function.
    """
    if value.device.type != _NAME:
        reduced: tuple[Callable[..., Any], tuple[Any, ...]] = shared.reduce_storage(value)
        return reduced
    # A tensor of its bytes, because a storage alone cannot be pickled by value.
    whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value)
    return _reduce_copy(whole, _rebuild_storage, str(value.device))


def _reduce_copy(value: Any, rebuild: Callable[..., Any], *more: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return ``rebuild`` and its arguments, which are a pickled copy of ``value`` on the host and ``more``.

    If ``value`` cannot be copied, return a function that raises the reason in the other process.
    """
    try:
        return rebuild, (pickle.dumps(value.cpu()), *more)
    except Exception as e:
        return _raise_unsent, (f"a {type(value).__name__} of device {_NAME!r} could not be sent: {e}",)


def _raise_unsent(text: str) -> None:
    """Raise ``RuntimeError`` with ``text`` in the receiving process, since the sender could not copy the value."""
    raise RuntimeError(text)


def _load_device() -> None:
    """Import and register the device, so that a tensor from another process can be rebuilt.

    In a process that has registered it, nothing is done.
    """
    importlib.import_module(__package__).autoload()


def _rebuild_tensor(copy: bytes, device: str, grad: bool, parameter: bool) -> torch.Tensor:
    """Return the tensor that another process has sent as the pickled ``copy``, on ``device``.

    It requires a gradient if and only if ``grad`` is true. If ``parameter`` is true, it is a ``torch.nn.Parameter``,
    and otherwise a ``torch.Tensor``.
    """
    _load_device()
    made = pickle.loads(copy).to(device)
    return torch.nn.Parameter(made, requires_grad=grad) if parameter else made.requires_grad_(grad)


def _rebuild_storage(copy: bytes, device: str) -> torch.UntypedStorage:
    """Return the storage that another process has sent as the pickled ``copy``, on ``device``."""
    _load_device()
    made: torch.Tensor = pickle.loads(copy).to(device)
    return made.untyped_storage()
