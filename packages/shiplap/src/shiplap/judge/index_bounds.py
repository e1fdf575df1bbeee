"""Indices that lie outside of what they index, which are looked for on the processor before a GPU sees them.

A kernel of torch that reads at such an index on a GPU ends all later use of the device in its process, and the process
that judges runs the reference. On the processor the same call raises an error.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shiplap.sampling.case import tensors_among, tree_map
from shiplap.sandbox.device_memory import lies_on_device

OUT_OF_RANGE = re.compile(r"out of (range|bounds)", re.IGNORECASE)
ROOM_SHARE = 16  # other draws may have indices that are larger by the inverse of this
MOST_LOCKED = 256 << 20  # bytes of a tensor from which on its copy is not page-locked
TRIAL_S = 2.0  # seconds of one trial, from which on trials of as many elements are left out


def is_index_data(t: Tensor) -> bool:
    """Return whether the integers of ``t`` may be indices or labels, that is whether they are int32 or int64."""
    return t.dtype in (torch.int32, torch.int64)


class TrialTooLong(Exception):
    """The error that a call of the reference on the processor takes too long to look for indices out of range."""


class _Deadline(torch.overrides.TorchFunctionMode):
    """A context manager in which a call of a torch function after the time ``until`` raises ``TrialTooLong``."""

    def __init__(self, until: float) -> None:
        """Store the time ``until``, by ``time.monotonic``."""
        super().__init__()
        self.until = until

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the torch function ``func`` and return its result. Raise ``TrialTooLong`` if the time is over."""
        if time.monotonic() > self.until:
            raise TrialTooLong
        return func(*args, **(kwargs or {}))


class IndexTrials:
    """Trials of one reference on the processor, which show whether it would index outside of a tensor.

    A trial ends after 2 seconds, between two calls of torch functions. Later arguments of as many elements are not
    tried, since their trials would take as long.

    Attributes:
        left_out: the number of arguments for which the trial took too long, or was not begun for that reason.
    """

    def __init__(self, call: Callable[..., Any], own: Sequence[Tensor]) -> None:
        """Store the reference ``call``, and the tensors ``own`` of its own arguments, whose shapes its indices fit. A
        copy of a module is moved to the processor at the first trial.
        """
        self._call, self._own = call, own
        self._on_host: Callable[..., Any] | None = None
        self._too_many: float = math.inf  # elements of arguments whose trial takes too long
        self.left_out = 0

    def would_end_device(self, args: tuple[Any, ...], *, scalars: bool = False) -> bool:
        """Return whether a call of the reference with ``args`` could end all use of the GPU on which they lie, since it
        indexes outside of a tensor. The result is False for arguments on the processor, and True if a trial takes too
        long. It is also False for arguments without tensors of indices, unless ``scalars`` is true, which means that
        other arguments have changed, from which the reference may compute indices.
        """
        given = tensors_among(args)
        count = sum(t.numel() for t in given)
        if not any(map(lies_on_device, given)) or not (scalars or _index_tensors(given)):
            return False
        if count < self._too_many:
            try:
                return self.indexes_outside(args, scalars=scalars)
            except TrialTooLong:
                self._too_many = count
        self.left_out += 1
        return True

    def indexes_outside(self, args: tuple[Any, ...], seconds: float = TRIAL_S, *, scalars: bool = False) -> bool:
        """Return whether the reference would use an index outside of a tensor for ``args`` or for other draws like
        them. Raise ``TrialTooLong`` if a call on the processor takes more than about ``seconds``.

        The call is made on copies on the processor: once with ``args``, and once with the largest index everywhere. If
        the shape of another tensor is not that of the reference's own arguments, this index is a little larger than
        those in ``args``, since other draws may have larger ones. The result is False for a call that cannot run on the
        processor. It is also False for arguments without indices, unless ``scalars`` is true.
        """
        given = tensors_among(args)
        has_indices = bool(_index_tensors(given))
        if not (scalars or has_indices):
            return False
        pairs = zip(given, self._own, strict=False)
        same = all(a.shape == b.shape for a, b in pairs if not is_index_data(a))
        if self._on_host is None:
            call = self._call
            self._on_host = copy.deepcopy(call).cpu() if isinstance(call, torch.nn.Module) else call

        def largest(t: Tensor) -> Tensor:
            """Return a copy of ``t`` on the processor. If it holds indices, all of them are the largest one, or a
            little more than it.
            """
            if not is_index_data(t) or not t.numel():
                return to_host(t)
            top = int(t.max())
            return torch.full_like(t, top if same else top + top // ROOM_SHARE + 1, device="cpu")

        tried, until = self._on_host, time.monotonic() + seconds
        return any(_is_refused(tried, tree_map(moved, args), until) for moved in (to_host, *([largest] * has_indices)))


def _index_tensors(given: Sequence[Tensor]) -> list[Tensor]:
    """Return those of the tensors ``given`` that hold indices and are not empty."""
    return [t for t in given if is_index_data(t) and t.numel()]


def to_host(t: Tensor) -> Tensor:
    """Return a copy of ``t`` on the processor, so that a reference that changes its arguments does not change ``t``.

    A copy from a GPU lies in page-locked memory, which torch keeps for the next one: most of the time of a copy to new
    memory is that of its pages. A large tensor would take too much of such memory. Some machines have too little of it,
    and some classes and layouts of tensors cannot be made there.
    """
    t = t.detach()
    if t.is_cuda and t.layout is torch.strided and t.numel() * t.itemsize <= MOST_LOCKED:
        with contextlib.suppress(RuntimeError, TypeError):
            return torch.empty_like(t, device="cpu", pin_memory=True).copy_(t)
    return t.cpu() if lies_on_device(t) else t.clone()


def _is_refused(call: Callable[..., Any], args: tuple[Any, ...], until: float) -> bool:
    """Return whether ``call`` raises an error for ``args`` that says that an index is out of range. Raise
    ``TrialTooLong`` at the time ``until``, by ``time.monotonic``.
    """
    with torch.no_grad():
        try:
            with _Deadline(until):
                call(*args)
        except TrialTooLong:
            raise
        except Exception as e:
            return bool(OUT_OF_RANGE.search(str(e)))
    return False
